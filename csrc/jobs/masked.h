/* Values whose places are in a mask (SL_LAYOUT_MASKED): checks of their description, and runs of a row. */
#ifndef SL_MASKED_H
#define SL_MASKED_H

#include "jobs/plan.h"

/* Consecutive values of a job, and the stored ones among them. */
typedef struct sl_masked {
    uint64_t first, end;  /* indices of the stored values */
    uint64_t next;        /* the first that is not used */
    const uint8_t *bytes; /* of value `first` */
} sl_masked;

/* Checks the fields that other layouts do not have, and that none is set that only they have. */
int32_t sl_masked_check(const sl_packed *packed, sl_error *error);

/* Checks the mask of a job that has values, and counts that do not fit in 64 bits. */
int32_t sl_masked_check_mask(const sl_packed *packed, sl_error *error);

/* Finds the stored values among `count` values from value `element` of the job on, and reads them: at most SL_STAGING
 * bytes, for which *count is lowered. */
int32_t sl_masked_fetch(const sl_job *job, uint64_t element, uint64_t *count, uint8_t *staging, sl_masked *self,
                        sl_error *error);

/* Number of values from value `element` on, at most `count`, that sl_masked_expand takes at a time: of one row, and of
 * what shares an element of packed->starts. */
uint64_t sl_masked_run(const sl_packed *packed, uint64_t element, uint64_t count);

/* The next `count` values, of which the first is value `element`, as f32. `room` is for SL_VALUES of them. SL_E_FORMAT
 * where the mask has not as many values as packed->starts says. */
int32_t sl_masked_expand(const sl_job *job, const sl_plan *plan, sl_masked *self, uint64_t element, uint64_t count,
                         void *room, void *values, sl_error *error);

#endif
