/* Jobs, the base of all operations: their chunks and pieces, and their values as f32. */
#ifndef SL_JOB_H
#define SL_JOB_H

#include "jobs/plan.h"

/* Divides a job into chunks of a multiple of `chunk` elements, and each chunk into pieces of a multiple of `piece`
 * elements. Both are multiples of `unit`; the job must be a whole number of units. */
int32_t sl_plan_pieces(const sl_job *job, uint64_t unit, uint64_t piece, uint64_t chunk, sl_plan *plan,
                       sl_error *error);

/* Divides a job into pieces of whole blocks, with SL_VALUES floats behind the staging buffer. */
int32_t sl_plan_values(const sl_job *job, sl_plan *plan, sl_error *error);

/* Divides a job without elements into chunks of `step` bytes; the first chunk is shorter by `shortfall`. */
void sl_plan_bytes(const sl_job *job, uint64_t step, uint64_t shortfall, sl_plan *plan);

/* The job's byte at which a chunk begins; the job's size for the chunk after the last. */
uint64_t sl_chunk_begin(const sl_job *job, const sl_plan *plan, uint64_t chunk);

static inline uint64_t sl_chunk_size(const sl_job *job, const sl_plan *plan, uint64_t chunk) {
    return sl_chunk_begin(job, plan, chunk + 1) - sl_chunk_begin(job, plan, chunk);
}

static inline bool sl_job_writes(const sl_job *job) {
    return job->op == SL_OP_WRITE || job->op == SL_OP_WRITE_BACK || job->op == SL_OP_APPEND;
}

/* The job's element at a byte, which must be a whole number of units. */
static inline uint64_t sl_element_at(const sl_plan *plan, uint64_t byte) {
    return byte / plan->unit_bytes * plan->unit;
}

/* Processes a piece: `count` elements at `source`, starting with the job's element `element`. */
typedef int32_t (*sl_piece_fn)(void *context, const uint8_t *source, uint64_t element, uint64_t count, sl_error *error);

/* Fetches a chunk piece by piece and calls `work` on each: memory in place, files through `staging`, packed codes as
 * their values. Stops at the first failure. `staging` is the start of the thread's scratch. */
int32_t sl_each_piece(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *staging, sl_piece_fn work,
                      void *context, sl_error *error);

/* Sets plan->conversion from a job's source dtype to f32; f32 itself needs none. */
int32_t sl_plan_floats(const sl_job *job, sl_plan *plan, sl_error *error);

/* Returns `count` elements, at most SL_VALUES, as f32 in file byte order: in place, or converted into `values`. */
const void *sl_floats(const sl_plan *plan, const uint8_t *source, uint64_t count, float *values);

/* Returns SL_E_RANGE at the first of `count` elements at `source` that does not fit into its block of dtype `to`, which
 * shows in the block's scale. `source` is the job's element `index`, and `blocks` the result of the conversion. */
int32_t sl_check_blocks(const sl_conversion *conversion, int32_t to, const uint8_t *source, const uint8_t *blocks,
                        uint64_t count, uint64_t index, sl_error *error);

/* Returns SL_E_RANGE at the first NaN or infinity among `count` f32 in file byte order. `index` is the number of the
 * first element. */
int32_t sl_check_finite(const void *values, uint64_t count, uint64_t index, sl_error *error);

#endif
