/* The operation SL_OP_COPY: bytes unchanged from a file or memory to memory, in chunks of SL_CHUNK.
 *
 * A plain loop on a few threads reads uncached files as fast as readahead(2), WILLNEED in windows, or more threads.
 * Only WILLNEED for a whole file can be faster, but it is a single call of seconds: no signal interrupts it, and it
 * evicts other cached files. */
#include "jobs/direct.h"
#include "jobs/op.h"

static int32_t plan_copy(const sl_job *job, sl_plan *plan, sl_error *error) {
    if (job->from != job->to)
        return sl_fail(error, SL_E_ARGUMENT, -1, "copying cannot turn dtype %d into dtype %d", job->from, job->to);
    /* Chunks read past the page cache begin at a page, and all but the last end at a page. */
    sl_plan_bytes(job, SL_CHUNK, sl_direct_can(job) ? job->offset % SL_DIRECT_PAGE : 0, plan);
    return SL_OK;
}

static int32_t run_copy(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *scratch, sl_error *error) {
    uint64_t begin = sl_chunk_begin(job, plan, chunk), size = sl_chunk_size(job, plan, chunk);
    uint8_t *memory = (uint8_t *)job->memory + begin;
    (void)scratch;
    if (job->file != SL_MEMORY) return sl_file_read(job->file, job->offset + begin, memory, size, error);
    memcpy(memory, sl_job_memory(job) + begin, (size_t)size);
    return SL_OK;
}

const sl_op sl_op_copy = {"copy", SL_TAKES_NONE, SL_TAKES_NONE, SL_TAKES_NONE, SL_TAKES_NONE, plan_copy, run_copy};
