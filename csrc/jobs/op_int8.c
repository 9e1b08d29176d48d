/* The operation SL_OP_INT8: quantizes numbers to int8 codes with per-axis factors. */
#include "jobs/channels.h"
#include "jobs/op.h"
#include "kernels/tier.h"

typedef struct work {
    const sl_job *job;
    const sl_plan *plan;
    sl_quant kernels;
    float *values; /* SL_VALUES values */
} work;

static int32_t plan_int8(const sl_job *job, sl_plan *plan, sl_error *error) {
    int32_t status = sl_plan_floats(job, plan, error);
    if (status != SL_OK) return status;
    status = sl_channels_check(job->channels, (uint64_t)sl_dtype_get(job->from)->block, true, error);
    return status == SL_OK ? sl_plan_values(job, plan, error) : status;
}

static int32_t quantize(void *context, const uint8_t *source, uint64_t element, uint64_t count, sl_error *error) {
    const work *self = context;
    const sl_channels *channels = self->job->channels;
    const sl_dtype_info *from = sl_dtype_get(self->job->from);
    int8_t *out = (int8_t *)self->job->memory + element;
    (void)error;
    for (uint64_t end = element + count, some; element < end; element += some, out += some) {
        const float *factors = channels->factors + sl_channel_of(channels, element);
        some = sl_min_u64(SL_VALUES, sl_channels_run(channels, element, end - element));
        const void *values = sl_floats(self->plan, source, some, self->values);
        if (sl_channels_alternate(channels))
            self->kernels.to_int8_each(values, out, (size_t)some, factors);
        else
            self->kernels.to_int8(values, out, (size_t)some, *factors);
        source += sl_dtype_bytes(from, some);
    }
    return SL_OK;
}

static int32_t run_int8(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *scratch, sl_error *error) {
    work self = {job, plan, sl_tier_quant(plan->tier), (float *)(void *)(scratch + SL_STAGING)};
    return sl_each_piece(job, plan, chunk, scratch, quantize, &self, error);
}

const sl_op sl_op_int8 = {"int8", SL_TAKES_NONE, SL_NEEDS, SL_TAKES_ANY, SL_TAKES_NONE, plan_int8, run_int8};
