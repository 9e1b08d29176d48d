/* The plan of a job, which is shared by all parts that execute it, and access to the job's bytes. */
#ifndef SL_PLAN_H
#define SL_PLAN_H

#include "base/error.h"
#include "kernels/convert.h"
#include "kernels/restore.h"
#include "platform/platform.h"

/* Bytes in a chunk: large enough to make a system call, a counter and a clock cheap, and small enough that threads
 * finish at about the same time and a slice of 50 ms ends on time even on a disk of 200 MB/s. A multiple of 3, so that
 * chunks of 6-bit elements are whole blocks of 4.
 *
 * Uncached files are read by the same plain loop: two threads keep two reads in flight, and the kernel's readahead does
 * the rest (see op_copy.c). Reads past the page cache are faster still (see direct.c). */
#define SL_CHUNK ((uint64_t)3 << 20)

/* Bytes of a thread's staging buffer. A file's bytes are read into it and converted while they are in the second-level
 * cache, so that only the result goes to memory. Also a multiple of 3. */
#define SL_STAGING ((uint64_t)192 << 10)

/* Number of values converted to f32 at a time for checks or scaling: 8 KiB stay in the first-level cache. A whole
 * number of blocks of every type. */
#define SL_VALUES ((uint64_t)2048)

/* The execution of a job, determined once by its operation's `plan`. */
typedef struct sl_plan {
    uint64_t chunks;    /* shared by the threads */
    uint64_t step;      /* bytes of a chunk at the source; approximate for a grid */
    uint64_t shortfall; /* bytes missing from the first chunk */
    uint64_t piece;     /* bytes fetched at a time, at most SL_STAGING */
    uint64_t unit;      /* smallest number of elements with whole blocks on both sides */
    uint64_t unit_bytes;
    uint64_t scratch;         /* bytes per thread, with the staging buffer first */
    uint64_t packed;          /* offset of a packed job's part of the scratch */
    uint64_t rows, columns;   /* of a grid's chunk, or of a chunk of codes dequantized tile by tile */
    sl_conversion conversion; /* first == NULL: none */
    sl_restore restore;       /* of a packed job */
    sl_convert_fn numbers;    /* of its codes; NULL if they have a table */
    sl_convert_fn grids[3];   /* of its stored scales and biases; NULL: none */
    int32_t tier;
    bool streams; /* the results are stored past the cache */
} sl_plan;

/* The start of a job's source in memory. */
static inline const uint8_t *sl_job_memory(const sl_job *job) { return (const uint8_t *)(uintptr_t)job->offset; }

/* Sets *source to `size` stored bytes from `begin` on: in place if the job's source is memory, or read into `staging`
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
