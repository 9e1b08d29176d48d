/* The operation SL_OP_CONVERT: from one dtype to another; a file's bytes pass through the staging buffer. */
#include "jobs/op.h"
#include "kernels/quant.h"

static int32_t plan_convert(const sl_job *job, sl_plan *plan, sl_error *error) {
    if (job->from == job->to || !sl_conversion_find(plan->tier, job->from, job->to, &plan->conversion))
        return sl_fail(error, SL_E_ARGUMENT, -1, "no conversion from dtype %d to %d", job->from, job->to);
    uint64_t unit = sl_conversion_unit(&plan->conversion);
    return sl_plan_pieces(job, unit, unit, unit, plan, error);
}

/* Refuses values that blocks cannot hold, which their scales reveal. `source` is element `index` of the job. */
static int32_t check_blocks(const sl_conversion *conversion, int32_t to, const uint8_t *source, const uint8_t *blocks,
                            uint64_t count, uint64_t index, sl_error *error) {
    uint64_t bad = sl_blocks_finite(to, blocks, count);
    if (bad == count) return SL_OK;
    uint64_t block = (uint64_t)conversion->to->block, unit = sl_conversion_unit(conversion);
    /* The f32 values of the first unit with a bad block; room for the largest block. */
    uint8_t values[256 * 4];
    uint64_t begin = bad * block / unit * unit;
    const uint8_t *at = source + sl_dtype_bytes(conversion->from, begin);
    if (conversion->second != NULL)
        conversion->first(at, values, (size_t)unit);
    else
        memcpy(values, at, (size_t)unit * 4);
    const uint8_t *first = values + (bad * block - begin) * 4;
    int32_t status = sl_check_finite(first, block, index + bad * block, error);
    if (status != SL_OK) return status;
    uint64_t largest = 0;
    uint32_t bits = 0;
    for (uint64_t i = 0; i < block; i++) {
        uint32_t magnitude = sl_load_le32(first + 4 * i) & 0x7fffffff; /* magnitudes compare like their bits */
        if (magnitude > bits) {
            bits = magnitude;
            largest = i;
        }
    }
    float value;
    memcpy(&value, &bits, sizeof value);
    return sl_fail(error, SL_E_RANGE, (int64_t)(index + bad * block + largest),
                   "has magnitude %g, too large for %s: float16 could not hold the scale of its block", (double)value,
                   conversion->to->name);
}

typedef struct work {
    const sl_job *job;
    const sl_conversion *conversion;
} work;

static int32_t convert(void *context, const uint8_t *source, uint64_t element, uint64_t count, sl_error *error) {
    const work *self = context;
    const sl_dtype_info *to = self->conversion->to;
    uint8_t *target = (uint8_t *)self->job->memory + sl_dtype_bytes(to, element);
    sl_conversion_run(self->conversion, source, target, (size_t)count);
    if (to->bits > 0) return SL_OK;
    return check_blocks(self->conversion, self->job->to, source, target, count / (uint64_t)to->block, element, error);
}

static int32_t run_convert(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *scratch, sl_error *error) {
    work self = {job, &plan->conversion};
    return sl_each_piece(job, plan, chunk, scratch, convert, &self, error);
}

const sl_op sl_op_convert = {"convert", SL_TAKES_NONE, SL_TAKES_NONE, plan_convert, run_convert};
