/* The operations SL_OP_WRITE, SL_OP_WRITE_BACK and SL_OP_APPEND: memory to a file, at its offset or at the file's
 * current position. */
#include "jobs/op.h"
#include "platform/platform.h"

/* Bytes in a written chunk. Chunks are aligned to this size in the file, because the page cache takes memory in large
 * runs only for large aligned writes; smaller unaligned chunks can take several times as long. */
#define WRITE_CHUNK ((uint64_t)16 << 20)

/* Bytes that may be on their way to the disk while pages before them are dropped, which keeps the disk busy. */
#define IN_FLIGHT (2 * WRITE_CHUNK)

static int32_t plan_write(const sl_job *job, sl_plan *plan, sl_error *error) {
    if (job->file == SL_MEMORY) return sl_fail(error, SL_E_ARGUMENT, -1, "only a file can be written to");
    sl_plan_bytes(job, WRITE_CHUNK, job->offset % WRITE_CHUNK, plan);
    return SL_OK;
}

static int32_t run_write(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *scratch, sl_error *error) {
    (void)scratch;
    uint64_t begin = sl_chunk_begin(job, plan, chunk), size = sl_chunk_size(job, plan, chunk);
    bool append = job->op == SL_OP_APPEND;
    return sl_platform_write(job->file, append, job->offset + begin, (const uint8_t *)job->memory + begin, size, error);
}

static int32_t run_write_back(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *scratch,
                              sl_error *error) {
    int32_t status = run_write(job, plan, chunk, scratch, error);
    if (status != SL_OK) return status;
    /* A chunk of a small job rarely completes the 16 MiB, so many small jobs cost few system calls. */
    uint64_t begin = job->offset + sl_chunk_begin(job, plan, chunk), end = begin + sl_chunk_size(job, plan, chunk);
    uint64_t complete = end - end % WRITE_CHUNK;
    if (complete <= begin) return SL_OK;
    sl_platform_write_back(job->file, complete - WRITE_CHUNK, WRITE_CHUNK);
    if (job->pages != NULL && complete > IN_FLIGHT) {
        uint64_t written = complete - IN_FLIGHT - WRITE_CHUNK;
        sl_error ignored;
        sl_platform_wait_back(job->file, written, WRITE_CHUNK);
        sl_file_drop(job->file, job->pages, written, WRITE_CHUNK, &ignored);
    }
    return SL_OK;
}

const sl_op sl_op_write = {"write", SL_TAKES_NONE, SL_TAKES_NONE, SL_TAKES_NONE, SL_TAKES_NONE, plan_write, run_write};
const sl_op sl_op_append = {"append",      SL_TAKES_NONE, SL_TAKES_NONE, SL_TAKES_NONE,
                            SL_TAKES_NONE, plan_write,    run_write};
const sl_op sl_op_write_back = {"write back",  SL_TAKES_NONE, SL_TAKES_NONE, SL_TAKES_NONE,
                                SL_TAKES_NONE, plan_write,    run_write_back};
