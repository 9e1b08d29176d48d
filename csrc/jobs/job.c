#include "jobs/job.h"

#include <stdlib.h>

#include "platform/platform.h"

/* What to do with a job of one run. */
static int32_t cut_run(const sl_job *job, int32_t direction, sl_cut *cut, sl_error *error) {
    cut->step = direction == SL_READ ? SL_CHUNK : SL_WRITE_CHUNK;
    cut->shortfall = direction == SL_READ ? 0 : job->offset % SL_WRITE_CHUNK; /* aligned in the file */
    if (cut->conversion.first != NULL) {
        uint64_t unit = sl_dtype_bytes(cut->conversion.from, sl_conversion_unit(&cut->conversion));
        if (job->size % unit != 0)
            return sl_fail(error, SL_E_ARGUMENT, -1, "%llu bytes are no whole number of blocks of %llu",
                           (unsigned long long)job->size, (unsigned long long)unit);
        cut->step -= cut->step % unit;
        cut->scratch = SL_PASSAGE;
    }
    cut->chunks = job->size > 0 ? (job->size - 1 + cut->shortfall) / cut->step + 1 : 0;
    return SL_OK;
}

static int32_t cut_job(const sl_job *job, int32_t direction, int32_t tier, sl_cut *cut, sl_error *error) {
    memset(cut, 0, sizeof *cut);
    cut->tier = tier;
    if (direction == SL_READ && sl_stats_wanted(job)) return sl_stats_cut(job, cut, error);
    if (direction == SL_READ && sl_values_wanted(job)) return sl_values_cut(job, cut, error);
    if (direction == SL_READ && job->from != job->to && !sl_conversion_find(tier, job->from, job->to, &cut->conversion))
        return sl_fail(error, SL_E_ARGUMENT, -1, "no conversion from dtype %d to %d", job->from, job->to);
    return job->grid != NULL ? sl_grid_cut(job, cut, error) : cut_run(job, direction, cut, error);
}

/* Where chunk `c` of a job begins; the job's size for the chunk after its last. */
static uint64_t chunk_begin(const sl_job *job, const sl_cut *cut, uint64_t c) {
    uint64_t whole = c * cut->step, less = cut->shortfall;
    return c == cut->chunks ? job->size : sl_min_u64(whole > less ? whole - less : 0, job->size);
}

int32_t sl_job_fetch(const sl_job *job, uint64_t begin, uint64_t size, uint8_t *passage, const uint8_t **source,
                     sl_error *error) {
    if (job->file == SL_MEMORY) {
        *source = sl_job_memory(job) + begin;
        return SL_OK;
    }
    *source = passage;
    return sl_file_read(job->file, job->offset + begin, passage, size, error);
}

/* Refuses what a conversion to blocks could not hold: their scales say where. `source` is element `index` of the job. */
static int32_t check_blocks(const sl_conversion *conversion, int32_t to, const uint8_t *source, const uint8_t *blocks,
                            uint64_t count, uint64_t index, sl_error *error) {
    uint64_t bad = sl_blocks_finite(to, blocks, count);
    if (bad == count) return SL_OK;
    uint64_t block = (uint64_t)conversion->to->block, unit = sl_conversion_unit(conversion);
    /* The f32 values of the first unit that has a bad block: as many as the largest block. */
    uint8_t values[256 * 4];
    uint64_t begin = bad * block / unit * unit;
    const uint8_t *at = source + sl_dtype_bytes(conversion->from, begin);
    if (conversion->second != NULL)
        conversion->first(at, values, (size_t)unit);
    else
        memcpy(values, at, (size_t)unit * 4);
    const uint8_t *first = values + (bad * block - begin) * 4;
    int32_t status = sl_values_refuse(first, block, index + bad * block, error);
    if (status != SL_OK) return status;
    uint64_t largest = 0;
    uint32_t bits = 0;
    for (uint64_t i = 0; i < block; i++) {
        uint32_t magnitude = sl_load_le32(first + 4 * i) & 0x7fffffff; /* ordered as its bits are */
        if (magnitude > bits) {
            bits = magnitude;
            largest = i;
        }
    }
    float value;
    memcpy(&value, &bits, sizeof value);
    return sl_fail(error, SL_E_RANGE, (int64_t)(index + bad * block + largest),
                   "has the magnitude %g, too large for %s: float16 could not hold the scale of its block", (double)value,
                   conversion->to->name);
}

/* Source bytes [begin, begin + size) of a job to its destination, converted. */
static int32_t convert_chunk(const sl_job *job, const sl_conversion *conversion, uint64_t begin, uint64_t size,
                             uint8_t *passage, sl_error *error) {
    uint64_t unit = sl_conversion_unit(conversion), unit_bytes = sl_dtype_bytes(conversion->from, unit);
    uint64_t most = SL_PASSAGE - SL_PASSAGE % unit_bytes;
    for (uint64_t end = begin + size; begin < end;) {
        uint64_t some = sl_min_u64(end - begin, most), element = begin / unit_bytes * unit;
        const uint8_t *source;
        uint8_t *target = (uint8_t *)job->memory + sl_dtype_bytes(conversion->to, element);
        uint64_t count = some / unit_bytes * unit;
        int32_t status = sl_job_fetch(job, begin, some, passage, &source, error);
        if (status != SL_OK) return status;
        sl_conversion_run(conversion, source, target, (size_t)count);
        if (conversion->to->bits == 0)
            status = check_blocks(conversion, job->to, source, target, count / (uint64_t)conversion->to->block, element, error);
        if (status != SL_OK) return status;
        begin += some;
    }
    return SL_OK;
}

typedef struct run {
    const sl_job *jobs;
    uint64_t count;
    sl_cut *cuts;          /* of each job */
    uint64_t *first_chunk; /* of each job; one more at the end: the number of chunks */
    int32_t direction;
} run;

/* The job that a chunk belongs to. */
static uint64_t job_of(const run *self, uint64_t chunk) {
    uint64_t low = 0, high = self->count;
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        if (self->first_chunk[middle] <= chunk)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static int32_t move_chunk(void *context, uint64_t chunk, void *scratch, sl_error *error) {
    const run *self = context;
    uint64_t i = job_of(self, chunk), c = chunk - self->first_chunk[i];
    const sl_job *job = &self->jobs[i];
    const sl_cut *cut = &self->cuts[i];
    if (job->grid != NULL) return sl_grid_run(job, cut, c, scratch, error);
    uint64_t begin = chunk_begin(job, cut, c), size = chunk_begin(job, cut, c + 1) - begin;
    uint8_t *memory = (uint8_t *)job->memory + begin;
    if (self->direction != SL_READ)
        return sl_platform_write(job->file, self->direction == SL_APPEND, job->offset + begin, memory, size, error);
    if (sl_stats_wanted(job)) return sl_stats_run(job, cut, begin, size, scratch, error);
    if (sl_values_wanted(job)) return sl_values_run(job, cut, begin, size, scratch, error);
    if (job->from != job->to) return convert_chunk(job, &cut->conversion, begin, size, scratch, error);
    if (job->file == SL_MEMORY) {
        memcpy(memory, sl_job_memory(job) + begin, (size_t)size);
        return SL_OK;
    }
    return sl_file_read(job->file, job->offset + begin, memory, size, error);
}

/* Bytes of the jobs in the chunks before `chunk`. */
static uint64_t bytes_before(const run *self, uint64_t chunk) {
    uint64_t i = self->count > 0 ? job_of(self, chunk) : 0, bytes = 0;
    for (uint64_t k = 0; k < i; k++) bytes += self->jobs[k].size;
    return i < self->count ? bytes + chunk_begin(&self->jobs[i], &self->cuts[i], chunk - self->first_chunk[i]) : bytes;
}

int32_t sl_jobs_run(const sl_job *jobs, uint64_t count, int32_t direction, int32_t tier, int32_t threads,
                    int32_t slice_ms, sl_cursor *cursor, sl_error *error) {
    uint64_t memory = (count + 1) * (sizeof(uint64_t) + sizeof(sl_cut));
    run self = {jobs, count, malloc((size_t)((count + 1) * sizeof(sl_cut))), malloc((size_t)((count + 1) * sizeof(uint64_t))), direction};
    int32_t status = self.cuts != NULL && self.first_chunk != NULL ? SL_OK : sl_fail_memory(error, memory);
    uint64_t scratch = 0;
    if (status == SL_OK) self.first_chunk[0] = 0;
    for (uint64_t i = 0; i < count && status == SL_OK; i++) {
        status = cut_job(&jobs[i], direction, tier, &self.cuts[i], error);
        self.first_chunk[i + 1] = self.first_chunk[i] + self.cuts[i].chunks;
        if (self.cuts[i].scratch > scratch) scratch = self.cuts[i].scratch;
        if (status != SL_OK) cursor->failed_job = i;
    }
    if (status == SL_OK) {
        uint64_t total = self.first_chunk[count], next = cursor->chunks_done;
        status = sl_parallel(move_chunk, &self, scratch, next, total, direction == SL_APPEND ? 1 : threads, slice_ms, &next,
                             error);
        if (status == SL_OK) {
            cursor->chunks_done = next;
            cursor->finished = next == total;
            cursor->bytes_done = bytes_before(&self, next);
        } else
            cursor->failed_job = job_of(&self, next);
    }
    free(self.first_chunk);
    free(self.cuts);
    return status;
}
