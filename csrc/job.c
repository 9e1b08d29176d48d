#include "job.h"

#include <stdlib.h>

#include "kernel.h"
#include "platform.h"

typedef struct run {
    const sl_job *jobs;
    uint64_t count;
    const uint64_t *first_chunk; /* of job i; one more at the end: the number of chunks */
    int32_t direction;
    int32_t tier;
} run;

static uint64_t chunk_size(int32_t direction) { return direction == SL_READ ? SL_CHUNK : SL_WRITE_CHUNK; }

/* Bytes by which a job's first chunk is shorter than the others: those that are written are aligned in the file. */
static uint64_t shortfall(const sl_job *job, int32_t direction) {
    return direction == SL_READ ? 0 : job->offset % SL_WRITE_CHUNK;
}

static uint64_t chunks_of(const sl_job *job, int32_t direction) {
    uint64_t chunk = chunk_size(direction);
    return job->size > 0 ? (job->size - 1 + shortfall(job, direction)) / chunk + 1 : 0;
}

/* Where chunk `c` of a job begins; the job's size for the chunk after its last. */
static uint64_t chunk_begin(const sl_job *job, int32_t direction, uint64_t c) {
    uint64_t whole = c * chunk_size(direction), less = shortfall(job, direction);
    return sl_min_u64(whole > less ? whole - less : 0, job->size);
}

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

static const uint8_t *address(const sl_job *job) { return (const uint8_t *)(uintptr_t)job->offset; }

/* Source bytes [begin, begin + size) of a job to its destination, converted. */
static int32_t convert_chunk(const run *self, const sl_job *job, uint64_t begin, uint64_t size, void *passage,
                             sl_error *error) {
    sl_conversion conversion;
    if (!sl_conversion_find(self->tier, job->from, job->to, &conversion))
        return sl_fail(error, SL_E_ARGUMENT, -1, "no conversion from dtype %d to %d", job->from, job->to);
    uint64_t block = (uint64_t)conversion.from->block, block_bytes = (uint64_t)conversion.from->block_bytes;
    for (uint64_t end = begin + size; begin < end;) {
        uint64_t some = sl_min_u64(end - begin, SL_PASSAGE), element = begin / block_bytes * block;
        const void *source = passage;
        if (job->file == SL_MEMORY)
            source = address(job) + begin;
        else {
            int32_t status = sl_file_read(job->file, job->offset + begin, passage, some, error);
            if (status != SL_OK) return status;
        }
        sl_conversion_run(&conversion, source, (uint8_t *)job->memory + sl_dtype_bytes(conversion.to, element),
                          (size_t)(some / block_bytes * block));
        begin += some;
    }
    return SL_OK;
}

static int32_t move_chunk(void *context, uint64_t chunk, void *passage, sl_error *error) {
    const run *self = context;
    uint64_t i = job_of(self, chunk);
    const sl_job *job = &self->jobs[i];
    uint64_t begin = chunk_begin(job, self->direction, chunk - self->first_chunk[i]);
    uint64_t size = chunk_begin(job, self->direction, chunk - self->first_chunk[i] + 1) - begin;
    uint8_t *memory = (uint8_t *)job->memory + begin;
    if (self->direction != SL_READ)
        return sl_platform_write(job->file, self->direction == SL_APPEND, job->offset + begin, memory, size, error);
    if (job->from != job->to) return convert_chunk(self, job, begin, size, passage, error);
    if (job->file == SL_MEMORY) {
        memcpy(memory, address(job) + begin, (size_t)size);
        return SL_OK;
    }
    return sl_file_read(job->file, job->offset + begin, memory, size, error);
}

int32_t sl_jobs_run(const sl_job *jobs, uint64_t count, int32_t direction, int32_t tier, int32_t threads,
                    int32_t slice_ms, sl_cursor *cursor, sl_error *error) {
    uint64_t *first_chunk = malloc((size_t)(count + 1) * sizeof *first_chunk);
    if (first_chunk == NULL) return sl_fail_memory(error, (count + 1) * sizeof *first_chunk);
    first_chunk[0] = 0;
    uint64_t passage = 0;
    for (uint64_t i = 0; i < count; i++) {
        first_chunk[i + 1] = first_chunk[i] + chunks_of(&jobs[i], direction);
        if (jobs[i].from != jobs[i].to) passage = SL_PASSAGE;
    }

    run self = {jobs, count, first_chunk, direction, tier};
    uint64_t total = first_chunk[count], next = cursor->chunks_done;
    int32_t status = sl_parallel(move_chunk, &self, passage, next, total, direction == SL_APPEND ? 1 : threads, slice_ms,
                                 &next, error);
    if (status == SL_OK) {
        cursor->chunks_done = next;
        cursor->finished = next == total;
        uint64_t i = count > 0 ? job_of(&self, next) : 0;
        cursor->bytes_done = 0;
        for (uint64_t k = 0; k < i; k++) cursor->bytes_done += jobs[k].size;
        if (i < count) cursor->bytes_done += chunk_begin(&jobs[i], direction, next - first_chunk[i]);
    } else
        cursor->failed_job = job_of(&self, next);
    free(first_chunk);
    return status;
}
