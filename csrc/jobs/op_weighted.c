/* The operation SL_OP_WEIGHTED: quantizes rows to blocks with an importance for each column. */
#include "jobs/op.h"
#include "kernels/tier.h"

typedef struct work {
    const sl_job *job;
    const sl_plan *plan;
    sl_weighted_fn quantize;
    const sl_dtype_info *to;
    float *row;      /* its values so far, in file byte order */
    uint64_t filled; /* number of these values */
} work;

static int32_t plan_weighted(const sl_job *job, sl_plan *plan, sl_error *error) {
    const sl_channels *columns = job->channels;
    const sl_dtype_info *from = sl_dtype_get(job->from), *to = sl_dtype_get(job->to);
    if (to == NULL || sl_tier_weighted(plan->tier, job->to) == NULL)
        return sl_fail(error, SL_E_ARGUMENT, -1, "no quantization with importance to dtype %d", job->to);
    int32_t status = sl_plan_floats(job, plan, error);
    if (status != SL_OK) return status;
    uint64_t count = columns->count, row_bytes, buffer;
    if (count == 0 || columns->inner != 1 || columns->factors == NULL || count % (uint64_t)to->block != 0 ||
        count % (uint64_t)from->block != 0)
        return sl_fail(error, SL_E_ARGUMENT, -1, "rows of %llu columns are not whole blocks with importance",
                       (unsigned long long)count);
    row_bytes = sl_dtype_bytes(from, count);
    if (job->size % row_bytes != 0 || !sl_mul_u64(count, sizeof(float), &buffer))
        return sl_fail(error, SL_E_ARGUMENT, -1, "%llu bytes are not whole rows of %llu", (unsigned long long)job->size,
                       (unsigned long long)row_bytes);
    status = sl_plan_values(job, plan, error);
    if (status != SL_OK || job->size == 0) return status;
    if (buffer > SIZE_MAX / 2) return sl_fail_memory(error, buffer); /* sums with it must not wrap around */
    plan->scratch += buffer;
    /* Chunks are whole rows, because the weights of some types depend on the row. */
    sl_plan_bytes(job, row_bytes > SL_CHUNK ? row_bytes : SL_CHUNK - SL_CHUNK % row_bytes, 0, plan);
    return SL_OK;
}

/* Quantizes a row whose first element is the job's element `begin`. */
static int32_t quantize_row(const work *self, uint64_t begin, sl_error *error) {
    uint64_t count = self->job->channels->count;
    const sl_conversion direct = {NULL, NULL, sl_dtype_get(SL_F32), self->to};
    uint8_t *blocks = (uint8_t *)self->job->memory + sl_dtype_bytes(self->to, begin);
    int32_t status = sl_check_finite(self->row, count, begin, error);
    if (status != SL_OK) return status;
    self->quantize(self->row, self->job->channels->factors, blocks, (size_t)count);
    return sl_check_blocks(&direct, self->job->to, (const uint8_t *)self->row, blocks,
                           count / (uint64_t)self->to->block, begin, error);
}

static int32_t take(void *context, const uint8_t *source, uint64_t element, uint64_t count, sl_error *error) {
    work *self = context;
    const sl_dtype_info *from = sl_dtype_get(self->job->from);
    uint64_t columns = self->job->channels->count;
    for (uint64_t end = element + count, some; element < end; element += some) {
        some = sl_min_u64(end - element, columns - self->filled);
        if (self->plan->conversion.first == NULL)
            memcpy(self->row + self->filled, source, (size_t)some * sizeof(float));
        else
            sl_conversion_run(&self->plan->conversion, source, self->row + self->filled, (size_t)some);
        source += sl_dtype_bytes(from, some);
        self->filled += some;
        if (self->filled < columns) continue;
        self->filled = 0;
        int32_t status = quantize_row(self, element + some - columns, error);
        if (status != SL_OK) return status;
    }
    return SL_OK;
}

static int32_t run_weighted(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *scratch, sl_error *error) {
    work self = {job,
                 plan,
                 sl_tier_weighted(plan->tier, job->to),
                 sl_dtype_get(job->to),
                 (float *)(void *)(scratch + SL_STAGING + SL_VALUES * sizeof(float)),
                 0};
    return sl_each_piece(job, plan, chunk, scratch, take, &self, error);
}

const sl_op sl_op_weighted = {
    "quantize with importance", SL_TAKES_NONE, SL_NEEDS, SL_TAKES_ANY, SL_TAKES_NONE, plan_weighted, run_weighted};
