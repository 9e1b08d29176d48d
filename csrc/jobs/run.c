/* Running jobs: the table of operations, and the chunks of all jobs, which the threads share. */
#include <stdlib.h>

#include "jobs/direct.h"
#include "jobs/op.h"
#include "jobs/packed.h"
#include "platform/parallel.h"

static const sl_op *const OPS[SL_OP_COUNT] = {
    [SL_OP_COPY] = &sl_op_copy,           [SL_OP_CONVERT] = &sl_op_convert,       [SL_OP_GRID] = &sl_op_grid,
    [SL_OP_WRITE] = &sl_op_write,         [SL_OP_APPEND] = &sl_op_append,         [SL_OP_INT8] = &sl_op_int8,
    [SL_OP_ABSMAX] = &sl_op_absmax,       [SL_OP_FINITE] = &sl_op_finite,         [SL_OP_STATS] = &sl_op_stats,
    [SL_OP_HISTOGRAM] = &sl_op_histogram, [SL_OP_RESTORE] = &sl_op_restore,       [SL_OP_WEIGHTED] = &sl_op_weighted,
    [SL_OP_MERGE] = &sl_op_merge,         [SL_OP_WRITE_BACK] = &sl_op_write_back,
};

/* Each thread's scratch is a multiple of this size, so that the next scratch is aligned for any type. */
#define ALIGNMENT ((uint64_t)64)

const char *sl_op_name(int32_t op) { return op >= 0 && op < SL_OP_COUNT ? OPS[op]->name : NULL; }

static int32_t check_taken(const sl_op *op, const char *what, sl_takes takes, bool given, sl_error *error) {
    if (takes == SL_TAKES_ANY || given == (takes == SL_NEEDS)) return SL_OK;
    return sl_fail(error, SL_E_ARGUMENT, -1, "the operation %s %s %s", op->name, given ? "takes no" : "needs", what);
}

static int32_t plan_job(const sl_job *job, int32_t tier, sl_plan *plan, sl_error *error) {
    memset(plan, 0, sizeof *plan);
    plan->tier = tier;
    if (sl_op_name(job->op) == NULL) return sl_fail(error, SL_E_ARGUMENT, -1, "unknown operation %d", job->op);
    const sl_op *op = OPS[job->op];
    int32_t status = check_taken(op, "a grid", op->grid, job->grid != NULL, error);
    if (status == SL_OK) status = check_taken(op, "channels", op->channels, job->channels != NULL, error);
    if (status == SL_OK) status = check_taken(op, "packed codes", op->packed, job->packed != NULL, error);
    if (status == SL_OK) status = check_taken(op, "a merge", op->merge, job->merge != NULL, error);
    if (status == SL_OK)
        status = check_taken(op, "codes", job->op == SL_OP_RESTORE ? SL_TAKES_ANY : SL_TAKES_NONE, job->codes != NULL,
                             error);
    if (status == SL_OK && job->packed != NULL) status = sl_packed_check(job, job->op == SL_OP_RESTORE, error);
    if (status == SL_OK) status = op->plan(job, plan, error);
    if (status == SL_OK && job->packed != NULL) sl_packed_plan(job, plan);
    return status;
}

typedef struct run {
    const sl_job *jobs;
    uint64_t count;
    sl_plan *plans;        /* per job */
    uint64_t *first_chunk; /* per job; the last element is the number of chunks */
    uint64_t scratch_size; /* bytes per thread */
    uint8_t *scratch;
    uint8_t *room; /* SL_DIRECT_ROOM bytes for each of the first `rooms` threads */
    uint64_t rooms;
    int32_t threads;
} run;

/* Returns the job of a chunk. */
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

/* Reads a chunk past the page cache, and then processes it like memory. */
static int32_t run_direct(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *room, uint8_t *scratch,
                          sl_error *error) {
    uint64_t begin = sl_chunk_begin(job, plan, chunk), size = sl_chunk_size(job, plan, chunk);
    if (job->op == SL_OP_COPY) return sl_direct_copy(job, begin, size, room, (uint8_t *)job->memory + begin, error);
    const uint8_t *bytes;
    int32_t status = sl_direct_read(job, begin, size, room, &bytes, error);
    if (status != SL_OK) return status;
    sl_job own = *job;
    own.file = SL_MEMORY;
    own.offset = (uint64_t)(uintptr_t)bytes - begin;
    return OPS[job->op]->run(&own, plan, chunk, scratch, error);
}

static int32_t run_chunk(void *context, uint64_t chunk, void *scratch, sl_error *error) {
    const run *self = context;
    uint64_t i = job_of(self, chunk), thread = (uint64_t)((uint8_t *)scratch - self->scratch) / self->scratch_size;
    const sl_job *job = &self->jobs[i];
    const sl_plan *plan = &self->plans[i];
    chunk -= self->first_chunk[i];
    if (thread < self->rooms && sl_direct_can(job))
        return run_direct(job, plan, chunk, self->room + thread * SL_DIRECT_ROOM, scratch, error);
    return OPS[job->op]->run(job, plan, chunk, scratch, error);
}

/* Number of the jobs' bytes in the chunks before `chunk`. */
static uint64_t bytes_before(const run *self, uint64_t chunk) {
    uint64_t i = self->count > 0 ? job_of(self, chunk) : 0, bytes = 0;
    for (uint64_t k = 0; k < i; k++) bytes += self->jobs[k].size;
    return i < self->count ? bytes + sl_chunk_begin(&self->jobs[i], &self->plans[i], chunk - self->first_chunk[i])
                           : bytes;
}

static int32_t plan_all(run *self, int32_t tier, uint64_t *failed, sl_error *error) {
    self->first_chunk[0] = 0;
    for (uint64_t i = 0; i < self->count; i++) {
        sl_plan *plan = &self->plans[i];
        int32_t status = plan_job(&self->jobs[i], tier, plan, error);
        if (status != SL_OK) {
            *failed = i;
            return status;
        }
        self->first_chunk[i + 1] = self->first_chunk[i] + plan->chunks;
        if (plan->scratch > self->scratch_size) self->scratch_size = plan->scratch;
        if (self->jobs[i].op == SL_OP_APPEND) self->threads = 1; /* appends must stay in order */
    }
    self->scratch_size = (self->scratch_size / ALIGNMENT + 1) * ALIGNMENT; /* never 0, because it separates threads */
    return SL_OK;
}

/* Reads of ranges that are no farther apart share a call to drop their pages. */
#define GAP ((uint64_t)64 << 10)

/* The number of bytes in the file that a job reads from, starting at its offset. */
static uint64_t stored_bytes(const sl_job *job) {
    if (job->packed != NULL) return job->packed->size;
    if (job->grid == NULL || job->grid->rows < 2) return job->size;
    return (job->grid->rows - 1) * (uint64_t)job->grid->source_row + job->size / job->grid->rows;
}

/* Drops the pages behind reads, once no thread reads: pages ahead, and those that a thread still needs, stay. Codes and
 * grids are not read in the order of their bytes, so their pages are dropped after their last chunk. */
static void drop_behind(const run *self, uint64_t first, uint64_t next) {
    const sl_job *last = NULL;
    uint64_t begin = 0, end = 0;
    sl_error ignored;
    for (uint64_t i = first < next ? job_of(self, first) : self->count; i < self->count; i++) {
        const sl_job *job = &self->jobs[i];
        uint64_t before = self->first_chunk[i], chunks = self->plans[i].chunks;
        if (before >= next) break;
        uint64_t from = first > before ? first - before : 0, to = sl_min_u64(next - before, chunks);
        if (job->pages == NULL || job->file == SL_MEMORY || sl_job_writes(job) || from >= to) continue;
        uint64_t some_begin = job->offset, some_end = job->offset + stored_bytes(job);
        if (job->packed == NULL && job->grid == NULL) {
            some_begin = job->offset + sl_chunk_begin(job, &self->plans[i], from);
            some_end = job->offset + sl_chunk_begin(job, &self->plans[i], to);
        } else if (to < chunks)
            continue;
        if (last == NULL || last->file != job->file || some_begin < begin || some_begin > end + GAP) {
            if (last != NULL) sl_file_drop(last->file, last->pages, begin, end - begin, &ignored);
            begin = some_begin;
            end = some_end;
        }
        last = job;
        if (some_end > end) end = some_end;
    }
    if (last != NULL) sl_file_drop(last->file, last->pages, begin, end - begin, &ignored);
}

int32_t sl_jobs_run(const sl_job *jobs, uint64_t count, int32_t tier, int32_t threads, int32_t slice_ms,
                    sl_cursor *cursor, sl_error *error) {
    if (sl_tier_name(tier) == NULL) return sl_fail(error, SL_E_ARGUMENT, -1, "unknown tier %d", tier);
    uint64_t memory = (count + 1) * (sizeof(uint64_t) + sizeof(sl_plan));
    run self = {.jobs = jobs, .count = count, .room = cursor->room, .threads = threads};
    self.rooms = cursor->room == NULL || cursor->rooms < 0 ? 0 : (uint64_t)cursor->rooms;
    self.plans = malloc((size_t)((count + 1) * sizeof(sl_plan)));
    self.first_chunk = malloc((size_t)((count + 1) * sizeof(uint64_t)));
    int32_t status = self.plans != NULL && self.first_chunk != NULL ? SL_OK : sl_fail_memory(error, memory);
    if (status == SL_OK) status = plan_all(&self, tier, &cursor->failed_job, error);
    if (status == SL_OK) {
        uint64_t total = self.first_chunk[count], next = cursor->chunks_done;
        self.threads = sl_parallel_threads(self.threads, next, total);
        uint64_t scratch;
        if (!sl_mul_u64(self.scratch_size, (uint64_t)self.threads, &scratch)) scratch = UINT64_MAX;
        self.scratch = scratch < SIZE_MAX ? malloc((size_t)scratch + 1) : NULL;
        status = self.scratch == NULL ? sl_fail_memory(error, scratch)
                                      : sl_parallel(run_chunk, &self, self.scratch, self.scratch_size, next, total,
                                                    self.threads, slice_ms, &next, error);
        if (status == SL_OK) {
            drop_behind(&self, cursor->chunks_done, next);
            cursor->chunks_done = next;
            cursor->finished = next == total;
            cursor->bytes_done = bytes_before(&self, next);
        } else
            cursor->failed_job = job_of(&self, next);
    }
    free(self.scratch);
    free(self.first_chunk);
    free(self.plans);
    return status;
}
