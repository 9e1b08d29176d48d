/* What each part of a job needs to know: how it is executed, and its bytes from a file or memory. */
#ifndef SL_PLAN_H
#define SL_PLAN_H

#include "base/error.h"
#include "kernels/convert.h"
#include "kernels/restore.h"
#include "platform/platform.h"

/* Bytes in a chunk: large enough that a system call, a counter and a clock are noise (3 MiB take about 1 ms), small
 * enough that threads finish together and a slice of 50 ms ends on time even on a disk of 200 MB/s. A multiple of 3, so
 * that chunks of 6-bit elements are whole blocks of 4.
 *
 * A file that is not in the page cache is read by the same plain loop: two threads keep two reads of 3 MiB in flight,
 * and the kernel's readahead does the rest. WILLNEED, readahead(2) and more threads were no faster; op_copy.c has the
 * numbers. Reads past the page cache, which are faster: direct.c. */
#define SL_CHUNK ((uint64_t)3 << 20)

/* Bytes of a thread's staging buffer: a file's bytes are read into it and converted while they are in the second-level
 * cache, so that only the result goes to memory. Also a multiple of 3. */
#define SL_STAGING ((uint64_t)192 << 10)

/* Number of values that are converted to f32 at a time to be checked or scaled: 8 KiB stay in the first-level cache. A
 * whole number of blocks of every type. */
#define SL_VALUES ((uint64_t)2048)

/* How a job is executed, determined once by its operation's `plan`. */
typedef struct sl_plan {
    uint64_t chunks;    /* of the job; threads share them */
    uint64_t step;      /* bytes of a chunk at the source; approximate for a grid */
    uint64_t shortfall; /* bytes missing from the first chunk */
    uint64_t piece;     /* bytes that are fetched at a time, at most SL_STAGING */
    uint64_t unit;      /* smallest number of elements that is whole blocks on both sides */
    uint64_t unit_bytes;
    uint64_t scratch;         /* bytes that each thread needs, the staging buffer first */
    uint64_t packed;          /* of a packed job: where its part of the scratch begins */
    uint64_t rows, columns;   /* of a grid's chunk; of a chunk of codes that are restored tile by tile */
    sl_conversion conversion; /* first == NULL: none */
    sl_restore restore;       /* of a packed job */
    sl_convert_fn numbers;    /* of its codes; NULL where they have a table */
    int32_t tier;
} sl_plan;

/* The start of a job's source that is memory. */
static inline const uint8_t *sl_job_memory(const sl_job *job) { return (const uint8_t *)(uintptr_t)job->offset; }

/* Sets *source to `size` stored bytes from `begin` on of a job's source: in place if it is memory, read into `staging`
 * if it is a file. */
static inline int32_t sl_fetch(const sl_job *job, uint64_t begin, uint64_t size, uint8_t *staging,
                               const uint8_t **source, sl_error *error) {
    if (job->file == SL_MEMORY) {
        *source = sl_job_memory(job) + begin;
        return SL_OK;
    }
    *source = staging;
    return sl_file_read(job->file, job->offset + begin, staging, size, error);
}

#endif
