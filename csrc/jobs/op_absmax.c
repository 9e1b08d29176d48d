/* The operation SL_OP_ABSMAX: the largest |x| of each channel. */
#include "jobs/channels.h"
#include "jobs/op.h"
#include "kernels/tier.h"
#include "platform/platform.h"

/* Number of maxima in a chunk if adjacent elements belong to different channels, else 0. */
static uint64_t chunk_maxima(const sl_job *job, uint64_t elements) {
    return sl_channels_alternate(job->channels) ? sl_min_u64(job->channels->count, elements) : 0;
}

static int32_t plan_absmax(const sl_job *job, sl_plan *plan, sl_error *error) {
    int32_t status = sl_plan_floats(job, plan, error);
    if (status != SL_OK) return status;
    status = sl_channels_check(job->channels, (uint64_t)sl_dtype_get(job->from)->block, false, error);
    if (status == SL_OK) status = sl_plan_values(job, plan, error);
    if (status != SL_OK) return status;
    plan->scratch += chunk_maxima(job, sl_element_at(plan, plan->step)) * sizeof(uint32_t);
    return SL_OK;
}

typedef struct work {
    const sl_job *job;
    const sl_plan *plan;
    sl_quant kernels;
    uint32_t (*direct)(const void *, size_t); /* takes the source's bytes; NULL: convert to f32 first */
    float *values;                            /* SL_VALUES values */
    uint32_t *maxima; /* per channel of this chunk if adjacent elements belong to different channels, else NULL */
    uint64_t maxima_count;
    uint64_t first; /* first element of the chunk */
} work;

static uint32_t (*direct_kernel(const sl_quant *kernels, int32_t from))(const void *, size_t) {
    switch (from) {
    case SL_F32: return kernels->absmax_f32;
    case SL_F16: return kernels->absmax_f16;
    case SL_BF16: return kernels->absmax_bf16;
    default: return NULL;
    }
}

/* Processes adjacent elements of different channels: maxima[k] covers the elements first + k + n * maxima_count.
 * Returns the number of elements processed. */
static uint64_t raise_each(const work *self, const uint8_t *source, uint64_t element, uint64_t count) {
    uint64_t at = (element - self->first) % self->maxima_count;
    uint64_t some = sl_min_u64(sl_min_u64(count, SL_VALUES), self->maxima_count - at);
    self->kernels.absmax_each(sl_floats(self->plan, source, some, self->values), self->maxima + at, (size_t)some);
    return some;
}

/* Processes elements of a single channel. Returns the number of elements processed. */
static uint64_t raise_one(const work *self, const uint8_t *source, uint64_t element, uint64_t count) {
    const sl_channels *channels = self->job->channels;
    uint64_t some = sl_channel_run(channels, element, count);
    uint32_t bits;
    if (self->direct != NULL)
        bits = self->direct(source, (size_t)some);
    else {
        some = sl_min_u64(some, SL_VALUES);
        bits = self->kernels.absmax_f32(sl_floats(self->plan, source, some, self->values), (size_t)some);
    }
    sl_atomic_raise_u32((uint32_t *)self->job->memory + sl_channel_of(channels, element), bits);
    return some;
}

static int32_t absmax(void *context, const uint8_t *source, uint64_t element, uint64_t count, sl_error *error) {
    const work *self = context;
    const sl_dtype_info *from = sl_dtype_get(self->job->from);
    (void)error;
    for (uint64_t end = element + count, some; element < end; element += some, source += sl_dtype_bytes(from, some))
        some = (self->maxima != NULL ? raise_each : raise_one)(self, source, element, end - element);
    return SL_OK;
}

static int32_t run_absmax(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *scratch, sl_error *error) {
    sl_quant kernels = sl_tier_quant(plan->tier);
    work self = {job,  plan, kernels, direct_kernel(&kernels, job->from), (float *)(void *)(scratch + SL_STAGING),
                 NULL, 0,    0};
    self.first = sl_element_at(plan, sl_chunk_begin(job, plan, chunk));
    self.maxima_count = chunk_maxima(job, sl_element_at(plan, sl_chunk_size(job, plan, chunk)));
    if (self.maxima_count > 0) {
        self.maxima = (uint32_t *)(void *)(scratch + SL_STAGING + SL_VALUES * sizeof(float));
        memset(self.maxima, 0, (size_t)self.maxima_count * sizeof(uint32_t));
    }
    int32_t status = sl_each_piece(job, plan, chunk, scratch, absmax, &self, error);
    if (status != SL_OK) return status;
    for (uint64_t i = 0; i < self.maxima_count; i++)
        sl_atomic_raise_u32((uint32_t *)job->memory + (self.first + i) % job->channels->count, self.maxima[i]);
    return SL_OK;
}

const sl_op sl_op_absmax = {"absmax", SL_TAKES_NONE, SL_NEEDS, SL_TAKES_ANY, SL_TAKES_NONE, plan_absmax, run_absmax};
