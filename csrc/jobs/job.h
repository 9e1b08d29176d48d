/* Jobs, what all operations stand on: the plan of a job, its chunks and their pieces, its bytes wherever they are, its
 * values as f32. */
#ifndef SL_JOB_H
#define SL_JOB_H

#include "base/error.h"
#include "kernels/convert.h"

/* Bytes in a chunk: large enough that a system call, a counter and a clock are noise (3 MiB take about 1 ms), small
 * enough that threads end together and a slice of 50 ms keeps its time even on a disk of 200 MB/s. A multiple of 3, so
 * that chunks of 6-bit elements are whole blocks of 4.
 *
 * A file that is not in the page cache is read by the same plain loop: two threads keep two reads of 3 MiB in flight,
 * and the kernel's readahead does the rest. WILLNEED, readahead(2) and more threads were no faster: the comment on
 * SL_CHUNK in op_copy.c has the numbers. */
#define SL_CHUNK ((uint64_t)3 << 20)

/* Bytes of a thread's staging buffer: a file's bytes are read into it and converted while they are in the second-level
 * cache, so that memory sees only the result. Likewise a multiple of 3. */
#define SL_STAGING ((uint64_t)192 << 10)

/* Values that are converted to f32 to be looked at or scaled: 8 KiB stay in the first-level cache. Whole blocks of
 * every type. */
#define SL_VALUES ((uint64_t)2048)

/* How a job is done, worked out once by its operation's `plan`. */
typedef struct sl_plan {
    uint64_t chunks;    /* of the job; threads share them */
    uint64_t step;      /* bytes of a chunk at the source; of a grid's: about */
    uint64_t shortfall; /* bytes by which the first chunk is shorter */
    uint64_t piece;     /* bytes that are fetched at a time, at most SL_STAGING */
    uint64_t unit;      /* elements that are whole blocks on both sides */
    uint64_t unit_bytes;
    uint64_t scratch;         /* bytes that each thread needs, the staging buffer first */
    uint64_t rows, columns;   /* of a grid's chunk */
    sl_conversion conversion; /* first == NULL: there is none */
    int32_t tier;
} sl_plan;

/* Cuts a job into chunks of whole `chunk` elements, these into pieces of whole `piece` elements. Each is a multiple of
 * `unit`; the job must be a whole number of units. */
int32_t sl_plan_pieces(const sl_job *job, uint64_t unit, uint64_t piece, uint64_t chunk, sl_plan *plan,
                       sl_error *error);

/* Cuts a job that has no elements into chunks of `step` bytes, the first one shorter. */
void sl_plan_bytes(const sl_job *job, uint64_t step, uint64_t shortfall, sl_plan *plan);

/* The byte of the job where a chunk begins; the job's size for the chunk after its last. */
uint64_t sl_chunk_begin(const sl_job *job, const sl_plan *plan, uint64_t chunk);

static inline uint64_t sl_chunk_size(const sl_job *job, const sl_plan *plan, uint64_t chunk) {
    return sl_chunk_begin(job, plan, chunk + 1) - sl_chunk_begin(job, plan, chunk);
}

/* The element of the job that begins at a byte, a whole number of units. */
static inline uint64_t sl_element_at(const sl_plan *plan, uint64_t byte) {
    return byte / plan->unit_bytes * plan->unit;
}

/* Where a job's source begins when it is memory. */
static inline const uint8_t *sl_job_memory(const sl_job *job) { return (const uint8_t *)(uintptr_t)job->offset; }

/* Does one piece: `count` elements at `source`, the first of which is number `element` of the job. */
typedef int32_t (*sl_piece_fn)(void *context, const uint8_t *source, uint64_t element, uint64_t count, sl_error *error);

/* Fetches a chunk piece by piece, memory where it is, a file through `staging`, and does each; stops at a failure. */
int32_t sl_each_piece(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *staging, sl_piece_fn work,
                      void *context, sl_error *error);

/* Sets plan->conversion to the one from a job's source dtype to f32; none for f32 itself. */
int32_t sl_plan_floats(const sl_job *job, sl_plan *plan, sl_error *error);

/* `count` elements, at most SL_VALUES, as f32 in the byte order of files: where they are, or converted into `values`.
 */
const void *sl_floats(const sl_plan *plan, const uint8_t *source, uint64_t count, float *values);

/* SL_E_RANGE at the first of `count` f32 in the byte order of files that is NaN or infinite. `index` is the element
 * number of the first. */
int32_t sl_check_finite(const void *values, uint64_t count, uint64_t index, sl_error *error);

#endif
