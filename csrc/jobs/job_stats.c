#include "jobs/job.h"
#include "kernels/stats.h"
#include "platform/platform.h"

bool sl_stats_wanted(const sl_job *job) { return job->to == SL_STATS || job->to == SL_STATS_HISTOGRAM; }

/* What values become before they are added up. */
static int32_t kind_of(const sl_job *job) {
    switch (job->from) {
    case SL_BF16:
    case SL_F16: return job->to == SL_STATS ? job->from : SL_F32; /* histograms look at the exponents of f32 */
    case SL_F64:
    case SL_I32:
    case SL_U32:
    case SL_I64:
    case SL_U64: return SL_F64;
    default: return SL_F32;
    }
}

int32_t sl_stats_cut(const sl_job *job, sl_cut *cut, sl_error *error) {
    const sl_dtype_info *from = sl_dtype_get(job->from);
    const sl_channels *channels = job->channels;
    bool scaled = channels != NULL, readable = from != NULL && job->grid == NULL;
    if (readable && scaled)
        readable = job->from == SL_I8 && channels->count > 0 && channels->inner > 0;
    else if (readable && kind_of(job) == SL_F32 && job->from != SL_F32)
        readable = sl_conversion_find(cut->tier, job->from, SL_F32, &cut->conversion);
    if (!readable) return sl_fail(error, SL_E_ARGUMENT, -1, "there are no statistics of dtype %d", job->from);
    uint64_t unit_bytes = (uint64_t)from->block_bytes, segment_bytes = sl_dtype_bytes(from, SL_STATS_SEGMENT);
    if (job->size % unit_bytes != 0)
        return sl_fail(error, SL_E_ARGUMENT, -1, "%llu bytes are no whole number of blocks of %llu",
                       (unsigned long long)job->size, (unsigned long long)unit_bytes);
    cut->step = SL_CHUNK - SL_CHUNK % segment_bytes;
    cut->chunks = job->size > 0 ? (job->size - 1) / cut->step + 1 : 0;
    cut->scratch = SL_PASSAGE + SL_STATS_BLOCK * (sizeof(double) + sizeof(float)) + sizeof(sl_exponents);
    return SL_OK;
}

_Static_assert(SL_STATS_SEGMENT * sizeof(double) <= SL_CHUNK, "a chunk holds a segment of every dtype");

/* Part of a job on one thread. */
typedef struct part {
    const sl_job *job;
    const sl_cut *cut;
    sl_summer summer; /* of what values become */
    double *doubles; /* SL_STATS_BLOCK of them */
    float *floats;   /* likewise */
    sl_exponents *exponents; /* NULL where no histogram is wanted */
} part;

/* A block's values as the summer takes them. */
static const void *values(const part *self, const uint8_t *source, uint64_t element, size_t count) {
    const sl_job *job = self->job;
    if (job->channels != NULL) {
        sl_values_restore(job, sl_quant_get(self->cut->tier), source, element, count, self->floats);
        return self->floats;
    }
    if (job->from == self->summer.from) return source;
    if (self->summer.from == SL_F64) {
        sl_stats_widen(job->from, source, self->doubles, count);
        return self->doubles;
    }
    sl_conversion_run(&self->cut->conversion, source, self->floats, count);
    return self->floats;
}

/* `count` elements from a block's start on. */
static void add(const part *self, sl_stats *records, const uint8_t *source, uint64_t element, uint64_t count) {
    const sl_dtype_info *from = sl_dtype_get(self->job->from);
    for (uint64_t end = element + count, some; element < end; element += some, source += sl_dtype_bytes(from, some)) {
        sl_stats *record = &records[element / SL_STATS_SEGMENT];
        if (element % SL_STATS_SEGMENT == 0) sl_stats_clear(record);
        some = sl_min_u64(end - element, SL_STATS_BLOCK);
        const void *block = values(self, source, element, (size_t)some);
        if (self->exponents != NULL && self->summer.from == SL_F32) sl_exponents_f32(self->exponents, block, (size_t)some);
        if (self->exponents != NULL && self->summer.from == SL_F64) sl_exponents_f64(self->exponents, block, (size_t)some);
        sl_stats_add(record, &self->summer, block, (size_t)some, element, self->doubles);
    }
}

static void add_bins(const part *self, sl_atomic *bins, const sl_stats *records, uint64_t begin, uint64_t end) {
    uint64_t own[SL_HISTOGRAM_BINS], zeros = 0;
    for (uint64_t element = begin; element < end; element += SL_STATS_SEGMENT) zeros += records[element / SL_STATS_SEGMENT].zeros;
    sl_exponents_fold(self->exponents, zeros, own);
    for (size_t i = 0; i < SL_HISTOGRAM_BINS; i++)
        if (own[i] > 0) sl_atomic_add(&bins[i], own[i]);
}

int32_t sl_stats_run(const sl_job *job, const sl_cut *cut, uint64_t begin, uint64_t size, uint8_t *scratch, sl_error *error) {
    const sl_dtype_info *from = sl_dtype_get(job->from);
    uint64_t block = (uint64_t)from->block, unit_bytes = (uint64_t)from->block_bytes;
    uint64_t block_bytes = sl_dtype_bytes(from, SL_STATS_BLOCK), most = SL_PASSAGE - SL_PASSAGE % block_bytes;
    sl_atomic *bins = job->memory;
    sl_stats *records = job->memory;
    uint8_t *spare = scratch + SL_PASSAGE;
    part self = {job, cut, sl_summer_find(cut->tier, kind_of(job)), (double *)(void *)spare, NULL, NULL};
    self.floats = (float *)(void *)(spare + SL_STATS_BLOCK * sizeof(double));
    if (job->to == SL_STATS_HISTOGRAM) {
        records = (sl_stats *)(void *)(bins + SL_HISTOGRAM_BINS);
        self.exponents = (sl_exponents *)(void *)(spare + SL_STATS_BLOCK * (sizeof(double) + sizeof(float)));
        memset(self.exponents, 0, sizeof *self.exponents);
    }
    uint64_t first = begin / unit_bytes * block, last = (begin + size) / unit_bytes * block;
    for (uint64_t end = begin + size, some; begin < end; begin += some) {
        some = sl_min_u64(end - begin, most);
        const uint8_t *source;
        int32_t status = sl_job_fetch(job, begin, some, scratch, &source, error);
        if (status != SL_OK) return status;
        add(&self, records, source, begin / unit_bytes * block, some / unit_bytes * block);
    }
    if (self.exponents != NULL) add_bins(&self, bins, records, first, last);
    return SL_OK;
}
