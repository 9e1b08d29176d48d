/* The operation SL_OP_FINITE: finds the first NaN or infinite element. */
#include "jobs/op.h"

static int32_t plan_finite(const sl_job *job, sl_plan *plan, sl_error *error) {
    int32_t status = sl_plan_floats(job, plan, error);
    return status == SL_OK ? sl_plan_values(job, plan, error) : status;
}

typedef struct work {
    const sl_job *job;
    const sl_plan *plan;
    float *values; /* SL_VALUES values */
} work;

static int32_t look(void *context, const uint8_t *source, uint64_t element, uint64_t count, sl_error *error) {
    const work *self = context;
    const sl_dtype_info *from = sl_dtype_get(self->job->from);
    for (uint64_t end = element + count, some; element < end; element += some, source += sl_dtype_bytes(from, some)) {
        some = sl_min_u64(end - element, SL_VALUES);
        int32_t status = sl_check_finite(sl_floats(self->plan, source, some, self->values), some, element, error);
        if (status != SL_OK) return status;
    }
    return SL_OK;
}

static int32_t run_finite(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *scratch, sl_error *error) {
    work self = {job, plan, (float *)(void *)(scratch + SL_STAGING)};
    return sl_each_piece(job, plan, chunk, scratch, look, &self, error);
}

const sl_op sl_op_finite = {"finite",      SL_TAKES_NONE, SL_TAKES_NONE, SL_TAKES_ANY,
                            SL_TAKES_NONE, plan_finite,   run_finite};
