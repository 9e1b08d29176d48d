/* Packed codes as the source of a job: checks of their description, and dequantization of ranges. */
#ifndef SL_PACKED_H
#define SL_PACKED_H

#include "jobs/plan.h"

/* Checks every product, index and pointer of job->packed, and that the job's size matches its values. `tiles`: also
 * accept codes in another order than the values. */
int32_t sl_packed_check(const sl_job *job, bool tiles, sl_error *error);

/* Whether values and codes are in different orders, so that values are dequantized tile by tile. */
bool sl_packed_in_tiles(const sl_packed *packed);

/* Whether groups and factors belong to rows instead of columns. */
bool sl_packed_by_row(const sl_packed *packed);

/* The grids of a packed tensor. */
enum { SL_GRID_SCALES, SL_GRID_ZEROS, SL_GRID_BIASES, SL_GRIDS };

/* Whether there are scales. */
bool sl_packed_scaled(const sl_packed *packed);

/* Whether a grid is converted when it is used. */
bool sl_packed_stores(const sl_packed *packed);

/* A place in the grids. */
typedef struct sl_packed_place {
    uint64_t matrix, row, column;
} sl_packed_place;

/* Returns at most SL_VALUES elements of a row of a grid: in place, or converted to `out`; NULL without such a grid. */
const float *sl_packed_grid(const sl_packed *packed, const sl_plan *plan, int grid, sl_packed_place place,
                            uint64_t count, float *out);

/* Smallest number of values that a job dequantizes at a time: a block. */
uint64_t sl_packed_unit(const sl_job *job);

/* Sets the kernels, and reserves scratch for sl_packed_restore at plan->packed. */
void sl_packed_plan(const sl_job *job, sl_plan *plan);

/* Dequantizes `count` values in the order of their codes, starting with the job's value `element`. `scratch` is the
 * thread's scratch at plan->packed. */
int32_t sl_packed_restore(const sl_job *job, const sl_plan *plan, uint64_t element, uint64_t count, void *values,
                          uint8_t *scratch, sl_error *error);

/* Looks up the numbers of `count` codes of ROWS, or at most SL_VALUES codes of WORDS, from `column` on in the row at
 * `bytes`; scales them unless `scaling` is NULL. */
void sl_packed_look_up(const sl_packed *packed, const sl_plan *plan, const uint8_t *bytes, uint64_t column,
                       uint64_t count, const sl_scaling *scaling, void *values);

#endif
