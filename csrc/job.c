#include "job.h"

#include <stdlib.h>

#include "platform.h"

typedef struct run {
    const sl_job *jobs;
    uint64_t count;
    const uint64_t *first_chunk; /* of job i; one more at the end: the number of chunks */
    int32_t direction;
} run;

static uint64_t chunks_of(const sl_job *job) { return job->size / SL_CHUNK + (job->size % SL_CHUNK != 0); }

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

static int32_t move_chunk(void *context, uint64_t chunk, sl_error *error) {
    const run *self = context;
    uint64_t i = job_of(self, chunk);
    const sl_job *job = &self->jobs[i];
    uint64_t begin = (chunk - self->first_chunk[i]) * SL_CHUNK;
    uint64_t size = sl_min_u64(job->size - begin, SL_CHUNK);
    uint8_t *memory = (uint8_t *)job->memory + begin;
    if (self->direction == SL_READ) return sl_platform_read_at(job->file, job->offset + begin, memory, size, error);
    return sl_platform_write(job->file, self->direction == SL_APPEND, job->offset + begin, memory, size, error);
}

int32_t sl_jobs_run(const sl_job *jobs, uint64_t count, int32_t direction, int32_t threads, int32_t slice_ms,
                    sl_cursor *cursor, sl_error *error) {
    uint64_t *first_chunk = malloc((size_t)(count + 1) * sizeof *first_chunk);
    if (first_chunk == NULL) return sl_fail_memory(error, (count + 1) * sizeof *first_chunk);
    first_chunk[0] = 0;
    for (uint64_t i = 0; i < count; i++) first_chunk[i + 1] = first_chunk[i] + chunks_of(&jobs[i]);

    run self = {jobs, count, first_chunk, direction};
    uint64_t total = first_chunk[count], next = cursor->chunks_done;
    int32_t status = sl_parallel(move_chunk, &self, next, total, direction == SL_APPEND ? 1 : threads, slice_ms, &next, error);
    if (status == SL_OK) {
        cursor->chunks_done = next;
        cursor->finished = next == total;
        uint64_t i = count > 0 ? job_of(&self, next) : 0;
        cursor->bytes_done = 0;
        for (uint64_t k = 0; k < i; k++) cursor->bytes_done += jobs[k].size;
        if (i < count) cursor->bytes_done += sl_min_u64((next - first_chunk[i]) * SL_CHUNK, jobs[i].size);
    } else
        cursor->failed_job = job_of(&self, next);
    free(first_chunk);
    return status;
}
