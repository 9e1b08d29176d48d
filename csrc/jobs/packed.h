/* Packed codes as the source of a job: checks of their description, and ranges of the values that they stand for. */
#ifndef SL_PACKED_H
#define SL_PACKED_H

#include "jobs/plan.h"

/* Checks every product, index and pointer of job->packed, whatever its maker checked, and that the job's size is that
 * of its values. `tiles`: codes whose order is not that of the values are taken too. */
int32_t sl_packed_check(const sl_job *job, bool tiles, sl_error *error);

/* Whether values are not in the order of their codes, so that they are restored tile by tile. */
bool sl_packed_in_tiles(const sl_packed *packed);

/* Whether groups and factors belong to rows, not to columns. */
bool sl_packed_by_row(const sl_packed *packed);

/* Smallest number of values that a job restores at a time: of a block. */
uint64_t sl_packed_unit(const sl_job *job);

/* Sets the kernels, and adds what sl_packed_restore needs to a thread's scratch, at plan->packed. */
void sl_packed_plan(const sl_job *job, sl_plan *plan);

/* Restores `count` values in the order of their codes, the first of which is value `element` of the job. `scratch` is
 * the thread's, at plan->packed. */
int32_t sl_packed_restore(const sl_job *job, const sl_plan *plan, uint64_t element, uint64_t count, void *values,
                          uint8_t *scratch, sl_error *error);

/* The numbers of the table for `count` codes of ROWS, or at most SL_VALUES of WORDS, from `column` of the row that
 * begins at `bytes` on, scaled where `scaling` is not NULL. */
void sl_packed_look_up(const sl_packed *packed, const sl_plan *plan, const uint8_t *bytes, uint64_t column,
                       uint64_t count, const sl_scaling *scaling, void *values);

#endif
