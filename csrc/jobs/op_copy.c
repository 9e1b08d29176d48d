/* The operation SL_OP_COPY: bytes unchanged from a file or memory to memory, in chunks of SL_CHUNK.
 *
 * Reading a file that is not in the page cache: 2.5 GiB on a virtual disk (ext4, Linux 6.18, read_ahead_kb 8192 and
 * 128), medians of 5 to 8 shuffled rounds of four series, GiB/s: this loop 1.2 1.9, 1.2 2.1; WILLNEED for the whole
 * file first 1.5 2.3, 1.7 2.6; WILLNEED in windows of 64 MiB 1.5, 1.1; readahead(2) 24 MiB ahead 1.7, 1.5; one thread
 * 0.9 1.0, 1.1; fio's best direct read 1.6 1.7, 1.2 1.3. The disk itself varies from 0.9 to 3.3 between samples. Only
 * WILLNEED for a whole file might be faster, but it is a single call of seconds that no signal interrupts and that
 * evicts other cached files. */
#include "jobs/direct.h"
#include "jobs/op.h"

static int32_t plan_copy(const sl_job *job, sl_plan *plan, sl_error *error) {
    if (job->from != job->to)
        return sl_fail(error, SL_E_ARGUMENT, -1, "copying cannot turn dtype %d into dtype %d", job->from, job->to);
    /* Chunks that are read past the page cache begin at a page, and most of them end at one. */
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

const sl_op sl_op_copy = {"copy", SL_TAKES_NONE, SL_TAKES_NONE, SL_TAKES_NONE, plan_copy, run_copy};
