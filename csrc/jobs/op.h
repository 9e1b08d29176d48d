/* Operations of jobs: each is a row of the table in run.c. To add an operation, write op_NAME.c and add its row. */
#ifndef SL_OP_H
#define SL_OP_H

#include "jobs/job.h"

/* Whether an operation takes a grid, channels, packed codes or a merge. */
typedef enum sl_takes { SL_TAKES_NONE, SL_TAKES_ANY, SL_NEEDS } sl_takes;

typedef struct sl_op {
    const char *name; /* for messages */
    sl_takes grid, channels, packed, merge;
    /* Checks the job and fills in the plan, which is zero except for the tier. */
    int32_t (*plan)(const sl_job *job, sl_plan *plan, sl_error *error);
    /* Processes a chunk. `scratch` belongs to the thread: plan->scratch bytes, aligned for any type. */
    int32_t (*run)(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *scratch, sl_error *error);
} sl_op;

extern const sl_op sl_op_copy;
extern const sl_op sl_op_convert;
extern const sl_op sl_op_grid;
extern const sl_op sl_op_write;
extern const sl_op sl_op_write_back;
extern const sl_op sl_op_append;
extern const sl_op sl_op_int8;
extern const sl_op sl_op_absmax;
extern const sl_op sl_op_finite;
extern const sl_op sl_op_stats;
extern const sl_op sl_op_histogram;
extern const sl_op sl_op_restore;
extern const sl_op sl_op_weighted;
extern const sl_op sl_op_merge;

#endif
