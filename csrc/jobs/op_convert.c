/* The operation SL_OP_CONVERT: conversion between dtypes. A file's bytes pass through the staging buffer. */
#include "jobs/op.h"
#include "kernels/stream.h"

static int32_t plan_convert(const sl_job *job, sl_plan *plan, sl_error *error) {
    if (job->from == job->to || !sl_conversion_find(plan->tier, job->from, job->to, &plan->conversion))
        return sl_fail(error, SL_E_ARGUMENT, -1, "no conversion from dtype %d to %d", job->from, job->to);
    uint64_t unit = sl_conversion_unit(&plan->conversion), block_bytes = sl_dtype_bytes(plan->conversion.from, unit);
    uint64_t size = sl_dtype_bytes(plan->conversion.to, job->size / block_bytes * unit);
    plan->streams = plan->conversion.to->bits > 0 && sl_stream_pays(job->memory, size, SL_STREAM_FROM);
    return sl_plan_pieces(job, unit, unit, unit, plan, error);
}

typedef struct work {
    const sl_job *job;
    const sl_conversion *conversion;
    bool streams;
} work;

static int32_t convert(void *context, const uint8_t *source, uint64_t element, uint64_t count, sl_error *error) {
    const work *self = context;
    const sl_dtype_info *to = self->conversion->to;
    uint8_t *target = (uint8_t *)self->job->memory + sl_dtype_bytes(to, element);
    (self->streams ? sl_conversion_stream : sl_conversion_run)(self->conversion, source, target, (size_t)count);
    if (to->bits > 0) return SL_OK;
    return sl_check_blocks(self->conversion, self->job->to, source, target, count / (uint64_t)to->block, element,
                           error);
}

static int32_t run_convert(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *scratch, sl_error *error) {
    work self = {job, &plan->conversion, plan->streams};
    int32_t status = sl_each_piece(job, plan, chunk, scratch, convert, &self, error);
    if (plan->streams) sl_stream_end();
    return status;
}

const sl_op sl_op_convert = {"convert",     SL_TAKES_NONE, SL_TAKES_NONE, SL_TAKES_NONE,
                             SL_TAKES_NONE, plan_convert,  run_convert};
