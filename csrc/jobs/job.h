/* Jobs, the base of all operations: the plan of a job, its chunks and their pieces, its bytes from a file or memory,
 * its values as f32. */
#ifndef SL_JOB_H
#define SL_JOB_H

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

/* Partitions a job into chunks of a multiple of `chunk` elements, and these into pieces of a multiple of `piece`
 * elements. Both are multiples of `unit`; the job must be a whole number of units. */
int32_t sl_plan_pieces(const sl_job *job, uint64_t unit, uint64_t piece, uint64_t chunk, sl_plan *plan,
                       sl_error *error);

/* Partitions a job into pieces of whole blocks, with SL_VALUES floats behind the staging buffer. */
int32_t sl_plan_values(const sl_job *job, sl_plan *plan, sl_error *error);

/* Partitions a job without elements into chunks of `step` bytes, the first one shorter by `shortfall`. */
void sl_plan_bytes(const sl_job *job, uint64_t step, uint64_t shortfall, sl_plan *plan);

/* The byte of the job where a chunk begins; the job's size for the chunk after the last. */
uint64_t sl_chunk_begin(const sl_job *job, const sl_plan *plan, uint64_t chunk);

static inline uint64_t sl_chunk_size(const sl_job *job, const sl_plan *plan, uint64_t chunk) {
    return sl_chunk_begin(job, plan, chunk + 1) - sl_chunk_begin(job, plan, chunk);
}

/* The element of the job that begins at a byte, a whole number of units. */
static inline uint64_t sl_element_at(const sl_plan *plan, uint64_t byte) {
    return byte / plan->unit_bytes * plan->unit;
}

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

/* Processes one piece: `count` elements at `source`, of which the first is element `element` of the job. */
typedef int32_t (*sl_piece_fn)(void *context, const uint8_t *source, uint64_t element, uint64_t count, sl_error *error);

/* Fetches a chunk piece by piece, memory in place, a file through `staging`, packed codes as the values that they stand
 * for, and calls `work` on each; stops at a failure. `staging` is the start of the thread's scratch. */
int32_t sl_each_piece(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *staging, sl_piece_fn work,
                      void *context, sl_error *error);

/* Sets plan->conversion from a job's source dtype to f32; none for f32 itself. */
int32_t sl_plan_floats(const sl_job *job, sl_plan *plan, sl_error *error);

/* `count` elements, at most SL_VALUES, as f32 in the byte order of files: in place, or converted into `values`. */
const void *sl_floats(const sl_plan *plan, const uint8_t *source, uint64_t count, float *values);

/* SL_E_RANGE at the first of `count` elements at `source` that their blocks, of dtype `to`, could not hold, which the
 * blocks' scales reveal. `source` is element `index` of the job, and `blocks` what the conversion made of it. */
int32_t sl_check_blocks(const sl_conversion *conversion, int32_t to, const uint8_t *source, const uint8_t *blocks,
                        uint64_t count, uint64_t index, sl_error *error);

/* SL_E_RANGE at the first of `count` f32 in the byte order of files that is NaN or infinite. `index` is the element
 * number of the first. */
int32_t sl_check_finite(const void *values, uint64_t count, uint64_t index, sl_error *error);

#endif
