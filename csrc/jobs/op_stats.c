/* The operations SL_OP_STATS and SL_OP_HISTOGRAM: statistics per segment, the latter with a histogram of the whole
 * tensor. */
#include "jobs/op.h"
#include "kernels/tier.h"
#include "platform/platform.h"

/* The dtype of accumulated values. */
static int32_t accumulated_as(const sl_job *job) {
    switch (job->from) {
    case SL_BF16:
    case SL_F16: return job->op == SL_OP_STATS ? job->from : SL_F32; /* histograms use the exponents of f32 */
    case SL_F64:
    case SL_I32:
    case SL_U32:
    case SL_I64:
    case SL_U64: return SL_F64;
    default: return SL_F32;
    }
}

static int32_t plan_stats(const sl_job *job, sl_plan *plan, sl_error *error) {
    const sl_dtype_info *from = sl_dtype_get(job->from);
    if (from == NULL) return sl_fail(error, SL_E_ARGUMENT, -1, "unknown dtype %d", job->from);
    int32_t status = accumulated_as(job) == SL_F32 ? sl_plan_floats(job, plan, error) : SL_OK;
    if (status != SL_OK) return status;
    status = sl_plan_pieces(job, (uint64_t)from->block, SL_STATS_BLOCK, SL_STATS_SEGMENT, plan, error);
    plan->scratch += SL_STATS_BLOCK * (sizeof(double) + sizeof(float)) + sizeof(sl_exponents);
    return status;
}

_Static_assert(SL_STATS_SEGMENT * sizeof(double) <= SL_CHUNK, "a chunk holds a segment of every dtype");

/* A chunk on a thread. */
typedef struct work {
    const sl_job *job;
    const sl_plan *plan;
    sl_accumulator accumulator;
    sl_stats *records;
    double *doubles;         /* SL_STATS_BLOCK values */
    float *floats;           /* SL_STATS_BLOCK values */
    sl_exponents *exponents; /* NULL without a histogram */
} work;

/* Returns a block's values in the accumulator's dtype. */
static const void *values(const work *self, const uint8_t *source, size_t count) {
    const sl_job *job = self->job;
    if (job->from == self->accumulator.from) return source;
    if (self->accumulator.from == SL_F64) {
        sl_stats_widen(job->from, source, self->doubles, count);
        return self->doubles;
    }
    return sl_floats(self->plan, source, count, self->floats);
}

/* Adds `count` elements, which begin at the start of a block. */
static int32_t add(void *context, const uint8_t *source, uint64_t element, uint64_t count, sl_error *error) {
    const work *self = context;
    const sl_dtype_info *from = sl_dtype_get(self->job->from);
    (void)error;
    for (uint64_t end = element + count, some; element < end; element += some, source += sl_dtype_bytes(from, some)) {
        sl_stats *record = &self->records[element / SL_STATS_SEGMENT];
        if (element % SL_STATS_SEGMENT == 0) sl_stats_clear(record);
        some = sl_min_u64(end - element, SL_STATS_BLOCK);
        const void *block = values(self, source, (size_t)some);
        if (self->exponents != NULL && self->accumulator.from == SL_F32)
            sl_exponents_f32(self->exponents, block, (size_t)some);
        if (self->exponents != NULL && self->accumulator.from == SL_F64)
            sl_exponents_f64(self->exponents, block, (size_t)some);
        if (from->kind == SL_KIND_INT || from->kind == SL_KIND_BOOL)
            sl_stats_add_integers(record, &self->accumulator, block, (size_t)some, element, self->doubles,
                                  self->job->from, source);
        else
            sl_stats_add(record, &self->accumulator, block, (size_t)some, element, self->doubles);
    }
    return SL_OK;
}

static void add_bins(const work *self, sl_atomic *bins, uint64_t begin, uint64_t end) {
    uint64_t own[SL_HISTOGRAM_BINS], zeros = 0;
    for (uint64_t element = begin; element < end; element += SL_STATS_SEGMENT)
        zeros += self->records[element / SL_STATS_SEGMENT].zeros;
    sl_exponents_to_bins(self->exponents, zeros, own);
    for (size_t i = 0; i < SL_HISTOGRAM_BINS; i++)
        if (own[i] > 0) sl_atomic_add(&bins[i], own[i]);
}

static int32_t run_stats(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *scratch, sl_error *error) {
    sl_atomic *bins = job->memory;
    uint8_t *spare = scratch + SL_STAGING;
    work self = {.job = job, .plan = plan, .records = job->memory, .doubles = (double *)(void *)spare};
    self.accumulator = sl_accumulator_find(plan->tier, accumulated_as(job));
    self.floats = (float *)(void *)(spare + SL_STATS_BLOCK * sizeof(double));
    if (job->op == SL_OP_HISTOGRAM) {
        self.records = (sl_stats *)(void *)(bins + SL_HISTOGRAM_BINS);
        self.exponents = (sl_exponents *)(void *)(spare + SL_STATS_BLOCK * (sizeof(double) + sizeof(float)));
        memset(self.exponents, 0, sizeof *self.exponents);
    }
    int32_t status = sl_each_piece(job, plan, chunk, scratch, add, &self, error);
    if (status != SL_OK) return status;
    uint64_t begin = sl_chunk_begin(job, plan, chunk), end = sl_chunk_begin(job, plan, chunk + 1);
    if (self.exponents != NULL) add_bins(&self, bins, sl_element_at(plan, begin), sl_element_at(plan, end));
    return SL_OK;
}

const sl_op sl_op_stats = {"stats", SL_TAKES_NONE, SL_TAKES_NONE, SL_TAKES_ANY, SL_TAKES_NONE, plan_stats, run_stats};
const sl_op sl_op_histogram = {"histogram",   SL_TAKES_NONE, SL_TAKES_NONE, SL_TAKES_ANY,
                               SL_TAKES_NONE, plan_stats,    run_stats};
