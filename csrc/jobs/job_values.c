#include "jobs/job.h"
#include "platform/platform.h"

/* f32 values that are looked at or scaled at a time: 8 KiB stay in the first-level cache. */
#define BLOCK ((uint64_t)2048)

bool sl_values_wanted(const sl_job *job) {
    return job->channels != NULL || job->to == SL_ABSMAX || job->to == SL_FINITE;
}

static bool restores(const sl_job *job) { return job->from == SL_I8 && job->to != SL_ABSMAX && job->to != SL_FINITE; }

int32_t sl_values_cut(const sl_job *job, sl_cut *cut, sl_error *error) {
    const sl_channels *channels = job->channels;
    const sl_dtype_info *from = sl_dtype_get(job->from);
    bool scaled = job->to == SL_I8 || restores(job);
    if (from == NULL || (channels == NULL) != (job->to == SL_FINITE) || (job->to != SL_FINITE && job->to != SL_ABSMAX && !scaled) ||
        (channels != NULL && (channels->count == 0 || channels->inner == 0)))
        return sl_fail(error, SL_E_ARGUMENT, -1, "dtype %d is not scaled to dtype %d", job->from, job->to);
    int32_t other = restores(job) ? job->to : job->from;
    if (other != SL_F32 && !sl_conversion_find(cut->tier, restores(job) ? SL_F32 : other, restores(job) ? other : SL_F32, &cut->conversion))
        return sl_fail(error, SL_E_ARGUMENT, -1, "no conversion between dtype %d and f32", other);
    uint64_t unit_bytes = (uint64_t)from->block_bytes, elements;
    if (job->size % unit_bytes != 0)
        return sl_fail(error, SL_E_ARGUMENT, -1, "%llu bytes are no whole number of blocks of %llu",
                       (unsigned long long)job->size, (unsigned long long)unit_bytes);
    cut->step = SL_CHUNK - SL_CHUNK % unit_bytes;
    cut->chunks = job->size > 0 ? (job->size - 1) / cut->step + 1 : 0;
    elements = cut->step / unit_bytes * (uint64_t)from->block;
    cut->scratch = SL_PASSAGE + BLOCK * sizeof(float);
    if (job->to == SL_ABSMAX && channels->inner == 1) cut->scratch += sl_min_u64(channels->count, elements) * sizeof(uint32_t);
    return SL_OK;
}

/* Part of a job on one thread. */
typedef struct part {
    const sl_job *job;
    const sl_cut *cut;
    const sl_quant *kernels;
    uint64_t first;    /* element of the job where the chunk begins */
    float *values;     /* BLOCK of them */
    uint32_t *maxima;  /* of the chunk, by element modulo their number; where each element has a channel of its own */
    uint64_t maxima_count;
} part;

/* `count` elements as f32 in the byte order of files, at most BLOCK. */
static const void *floats(const part *self, const uint8_t *source, uint64_t count) {
    if (self->job->from == SL_F32) return source;
    sl_conversion_run(&self->cut->conversion, source, self->values, (size_t)count);
    return self->values;
}

/* Bytes of `count` elements of the source. */
static uint64_t source_bytes(const part *self, uint64_t count) { return sl_dtype_bytes(sl_dtype_get(self->job->from), count); }

/* The kernel that takes the source's own bytes, NULL when they must become f32 first. */
static uint32_t (*absmax_kernel(const part *self))(const void *, size_t) {
    switch (self->job->from) {
    case SL_F32: return self->kernels->absmax_f32;
    case SL_F16: return self->kernels->absmax_f16;
    case SL_BF16: return self->kernels->absmax_bf16;
    default: return NULL;
    }
}

/* Elements from `element` on that belong to one channel. */
static uint64_t run_length(const sl_channels *channels, uint64_t element, uint64_t count) {
    return channels->count == 1 ? count : sl_min_u64(count, channels->inner - element % channels->inner);
}

static uint64_t channel_of(const sl_channels *channels, uint64_t element) {
    return channels->count == 1 ? 0 : element / channels->inner % channels->count;
}

static void absmax(const part *self, const uint8_t *source, uint64_t element, uint64_t count) {
    const sl_channels *channels = self->job->channels;
    uint32_t (*direct)(const void *, size_t) = absmax_kernel(self);
    for (uint64_t end = element + count, some; element < end; element += some, source += source_bytes(self, some)) {
        if (self->maxima != NULL) {
            uint64_t at = (element - self->first) % self->maxima_count;
            some = sl_min_u64(sl_min_u64(end - element, BLOCK), self->maxima_count - at);
            self->kernels->absmax_each(floats(self, source, some), self->maxima + at, (size_t)some);
            continue;
        }
        some = run_length(channels, element, end - element);
        uint32_t bits;
        if (direct != NULL)
            bits = direct(source, (size_t)some);
        else {
            some = sl_min_u64(some, BLOCK);
            bits = self->kernels->absmax_f32(floats(self, source, some), (size_t)some);
        }
        sl_atomic_raise_u32((uint32_t *)self->job->memory + channel_of(channels, element), bits);
    }
}

static void merge_maxima(const part *self, uint64_t count) {
    uint64_t channels = self->job->channels->count;
    for (uint64_t i = 0; i < sl_min_u64(count, self->maxima_count); i++)
        sl_atomic_raise_u32((uint32_t *)self->job->memory + (self->first + i) % channels, self->maxima[i]);
}

static void quantize(const part *self, const uint8_t *source, uint64_t element, uint64_t count) {
    const sl_channels *channels = self->job->channels;
    int8_t *out = (int8_t *)self->job->memory + element;
    for (uint64_t end = element + count, some; element < end; element += some, out += some) {
        uint64_t channel = channel_of(channels, element);
        bool each = channels->inner == 1 && channels->count > 1;
        some = sl_min_u64(BLOCK, each ? sl_min_u64(end - element, channels->count - channel) : run_length(channels, element, end - element));
        const void *values = floats(self, source, some);
        if (each)
            self->kernels->to_int8_each(values, out, (size_t)some, channels->factors + channel);
        else
            self->kernels->to_int8(values, out, (size_t)some, channels->factors[channel]);
        source += source_bytes(self, some);
    }
}

void sl_values_restore(const sl_job *job, const sl_quant *kernels, const uint8_t *codes, uint64_t element, uint64_t count,
                       void *values) {
    const sl_channels *channels = job->channels;
    bool each = channels->inner == 1 && channels->count > 1;
    uint8_t *out = values;
    for (uint64_t end = element + count, some; element < end; element += some, codes += some, out += some * sizeof(float)) {
        uint64_t channel = channel_of(channels, element), left = end - element;
        some = each ? sl_min_u64(left, channels->count - channel) : run_length(channels, element, left);
        if (each)
            kernels->from_int8_each((const int8_t *)codes, out, (size_t)some, channels->factors + channel);
        else
            kernels->from_int8((const int8_t *)codes, out, (size_t)some, channels->factors[channel]);
    }
}

static void restore(const part *self, const uint8_t *source, uint64_t element, uint64_t count) {
    uint64_t element_size = (uint64_t)sl_dtype_get(self->job->to)->block_bytes;
    for (uint64_t end = element + count, some; element < end; element += some, source += some) {
        uint8_t *out = (uint8_t *)self->job->memory + element * element_size;
        some = sl_min_u64(end - element, BLOCK);
        void *values = self->job->to == SL_F32 ? (void *)out : self->values;
        sl_values_restore(self->job, self->kernels, source, element, some, values);
        if (values != out) sl_conversion_run(&self->cut->conversion, values, out, (size_t)some);
    }
}

int32_t sl_values_refuse(const void *values, uint64_t count, uint64_t index, sl_error *error) {
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits = sl_load_le32((const uint8_t *)values + 4 * i), rest = bits & 0x7fffffff;
        if (rest < SL_F32_INFINITY) continue;
        const char *what = rest > SL_F32_INFINITY ? "nan" : rest == bits ? "infinity" : "minus infinity";
        return sl_fail(error, SL_E_RANGE, (int64_t)(index + i), "is %s: only finite numbers can be quantized", what);
    }
    return SL_OK;
}

static int32_t check_finite(const part *self, const uint8_t *source, uint64_t element, uint64_t count, sl_error *error) {
    for (uint64_t end = element + count, some; element < end; element += some, source += source_bytes(self, some)) {
        some = sl_min_u64(end - element, BLOCK);
        int32_t status = sl_values_refuse(floats(self, source, some), some, element, error);
        if (status != SL_OK) return status;
    }
    return SL_OK;
}

int32_t sl_values_run(const sl_job *job, const sl_cut *cut, uint64_t begin, uint64_t size, uint8_t *scratch,
                      sl_error *error) {
    const sl_dtype_info *from = sl_dtype_get(job->from);
    uint64_t block = (uint64_t)from->block, block_bytes = (uint64_t)from->block_bytes;
    uint64_t most = SL_PASSAGE - SL_PASSAGE % block_bytes;
    part self = {job, cut, sl_quant_get(cut->tier), begin / block_bytes * block, (float *)(void *)(scratch + SL_PASSAGE), NULL, 0};
    uint64_t elements = size / block_bytes * block;
    if (job->to == SL_ABSMAX && job->channels->inner == 1 && job->channels->count > 1) {
        self.maxima = (uint32_t *)(void *)(scratch + SL_PASSAGE + BLOCK * sizeof(float));
        self.maxima_count = sl_min_u64(job->channels->count, elements);
        memset(self.maxima, 0, (size_t)self.maxima_count * sizeof(uint32_t));
    }
    for (uint64_t end = begin + size, some; begin < end; begin += some) {
        some = sl_min_u64(end - begin, most);
        const uint8_t *source;
        int32_t status = sl_job_fetch(job, begin, some, scratch, &source, error);
        uint64_t element = begin / block_bytes * block, count = some / block_bytes * block;
        if (status == SL_OK && job->to == SL_FINITE) status = check_finite(&self, source, element, count, error);
        if (status != SL_OK) return status;
        if (job->to == SL_ABSMAX)
            absmax(&self, source, element, count);
        else if (restores(job))
            restore(&self, source, element, count);
        else if (job->to == SL_I8)
            quantize(&self, source, element, count);
    }
    if (self.maxima != NULL) merge_maxima(&self, elements);
    return SL_OK;
}
