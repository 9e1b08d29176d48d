/* Values at positions given by a mask (SL_LAYOUT_MASKED): checks of their description, and runs of a row. */
#ifndef SL_MASKED_H
#define SL_MASKED_H

#include "jobs/plan.h"

/* The stored values among consecutive values of a job. */
typedef struct sl_masked {
    uint64_t first, end;  /* indices of the stored values */
    uint64_t next;        /* first unused index */
    const uint8_t *bytes; /* at value `first` */
} sl_masked;

/* Checks the fields of this layout, and refuses fields of other layouts. */
int32_t sl_masked_check(const sl_packed *packed, sl_error *error);

/* Checks the mask of a job with values, and refuses counts that do not fit in 64 bits. */
int32_t sl_masked_check_mask(const sl_packed *packed, sl_error *error);

/* Finds and reads the stored values among `count` values, starting with the job's value `element`. At most SL_STAGING
 * bytes are read; *count is lowered to fit. */
int32_t sl_masked_fetch(const sl_job *job, uint64_t element, uint64_t *count, uint8_t *staging, sl_masked *self,
                        sl_error *error);

/* Number of values, at most `count`, that sl_masked_expand takes at a time, starting with `element`: values of a single
 * row with a common element of packed->starts. */
uint64_t sl_masked_run(const sl_packed *packed, uint64_t element, uint64_t count);

/* Expands the next `count` values to f32, starting with `element`. `room` holds SL_VALUES values. Returns SL_E_FORMAT
 * if the mask has another number of values than packed->starts says. */
int32_t sl_masked_expand(const sl_job *job, const sl_plan *plan, sl_masked *self, uint64_t element, uint64_t count,
                         void *room, void *values, sl_error *error);

#endif
