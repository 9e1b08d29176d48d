/* Jobs: chunks, pieces, and conversion of values to f32. */
#include "jobs/job.h"

#include "jobs/packed.h"
#include "kernels/quant.h"

int32_t sl_plan_pieces(const sl_job *job, uint64_t unit, uint64_t piece, uint64_t chunk, sl_plan *plan,
                       sl_error *error) {
    const sl_dtype_info *from = sl_dtype_get(job->from);
    uint64_t piece_bytes = sl_dtype_bytes(from, piece), chunk_bytes = sl_dtype_bytes(from, chunk);
    plan->unit = unit;
    plan->unit_bytes = sl_dtype_bytes(from, unit);
    if (job->size % plan->unit_bytes != 0)
        return sl_fail(error, SL_E_ARGUMENT, -1, "%llu bytes are not a whole number of blocks of %llu",
                       (unsigned long long)job->size, (unsigned long long)plan->unit_bytes);
    plan->piece = SL_STAGING - SL_STAGING % piece_bytes;
    plan->scratch = SL_STAGING;
    sl_plan_bytes(job, SL_CHUNK - SL_CHUNK % chunk_bytes, 0, plan);
    return SL_OK;
}

int32_t sl_plan_values(const sl_job *job, sl_plan *plan, sl_error *error) {
    uint64_t unit = (uint64_t)sl_dtype_get(job->from)->block * sl_packed_unit(job);
    int32_t status = sl_plan_pieces(job, unit, unit, unit, plan, error);
    plan->scratch += SL_VALUES * sizeof(float);
    return status;
}

void sl_plan_bytes(const sl_job *job, uint64_t step, uint64_t shortfall, sl_plan *plan) {
    plan->step = step;
    plan->shortfall = shortfall;
    plan->chunks = job->size > 0 ? (job->size - 1 + shortfall) / step + 1 : 0;
}

uint64_t sl_chunk_begin(const sl_job *job, const sl_plan *plan, uint64_t chunk) {
    uint64_t whole = chunk * plan->step, less = plan->shortfall;
    return chunk == plan->chunks ? job->size : sl_min_u64(whole > less ? whole - less : 0, job->size);
}

int32_t sl_each_piece(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *staging, sl_piece_fn work,
                      void *context, sl_error *error) {
    uint64_t begin = sl_chunk_begin(job, plan, chunk), end = sl_chunk_begin(job, plan, chunk + 1);
    for (uint64_t some; begin < end; begin += some) {
        some = sl_min_u64(end - begin, plan->piece);
        const uint8_t *source;
        int32_t status;
        if (job->packed != NULL) {
            status = sl_packed_restore(job, plan, sl_element_at(plan, begin), sl_element_at(plan, some), staging,
                                       staging + plan->packed, error);
            source = staging;
        } else
            status = sl_fetch(job, begin, some, staging, &source, error);
        if (status == SL_OK)
            status = work(context, source, sl_element_at(plan, begin), sl_element_at(plan, some), error);
        if (status != SL_OK) return status;
    }
    return SL_OK;
}

int32_t sl_plan_floats(const sl_job *job, sl_plan *plan, sl_error *error) {
    if (job->from == SL_F32 || sl_conversion_find(plan->tier, job->from, SL_F32, &plan->conversion)) return SL_OK;
    return sl_fail(error, SL_E_ARGUMENT, -1, "no conversion from dtype %d to f32", job->from);
}

const void *sl_floats(const sl_plan *plan, const uint8_t *source, uint64_t count, float *values) {
    if (plan->conversion.first == NULL) return source;
    sl_conversion_run(&plan->conversion, source, values, (size_t)count);
    return values;
}

int32_t sl_check_finite(const void *values, uint64_t count, uint64_t index, sl_error *error) {
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits = sl_load_le32((const uint8_t *)values + 4 * i), rest = bits & 0x7fffffff;
        if (rest < SL_F32_INFINITY) continue;
        const char *what = rest > SL_F32_INFINITY ? "nan" : rest == bits ? "infinity" : "minus infinity";
        return sl_fail(error, SL_E_RANGE, (int64_t)(index + i), "is %s: only finite numbers can be quantized", what);
    }
    return SL_OK;
}

int32_t sl_check_blocks(const sl_conversion *conversion, int32_t to, const uint8_t *source, const uint8_t *blocks,
                        uint64_t count, uint64_t index, sl_error *error) {
    uint64_t bad = sl_blocks_finite(to, blocks, count);
    if (bad == count) return SL_OK;
    uint64_t block = (uint64_t)conversion->to->block, unit = sl_conversion_unit(conversion);
    /* The f32 values of the first unit with a bad block, with room for the largest block. */
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
        uint32_t magnitude = sl_load_le32(first + 4 * i) & 0x7fffffff; /* magnitudes order like their bits */
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
