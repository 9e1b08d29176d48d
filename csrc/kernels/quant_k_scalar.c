/* Quantization to K-quants, types with tables, and types with importance in scalar C: the reference for all tiers. */
#include "base/base.h"
#include "kernels/scalar.h"

#define TARGET
#define KERNEL(type) sl_f32_to_##type##_scalar
#define WEIGHTED(type) sl_weighted_##type##_scalar

#define LANES 8

typedef struct lanes {
    float of[LANES];
} lanes;

typedef struct truths {
    bool of[LANES];
} truths;

SL_INLINE lanes all_of(float value) {
    lanes out;
    for (size_t k = 0; k < LANES; k++) out.of[k] = value;
    return out;
}

SL_INLINE lanes lanes_at(const float *values) {
    lanes out;
    memcpy(out.of, values, sizeof out.of);
    return out;
}

SL_INLINE void put(float *out, lanes values) { memcpy(out, values.of, sizeof values.of); }

SL_INLINE void put_bytes(uint8_t *out, lanes values) {
    for (size_t k = 0; k < LANES; k++) out[k] = (uint8_t)(int32_t)values.of[k];
}

#define EACH(type, name, result, ...)                          \
    SL_INLINE type name(__VA_ARGS__) {                         \
        type out;                                              \
        for (size_t k = 0; k < LANES; k++) out.of[k] = result; \
        return out;                                            \
    }

/* Correctly rounded square root (IEEE 754), without the system's library. `value` must not be negative. */
SL_INLINE float root_of(float value) {
    double wide = (double)value; /* never subnormal */
    uint64_t bits;
    memcpy(&bits, &wide, sizeof bits);
    int32_t exponent = (int32_t)(bits >> 52) - 1023;
    if (bits == 0 || exponent > 127) return value;                              /* 0, infinity, NaN */
    uint64_t mantissa = (bits & UINT64_C(0xfffffffffffff)) | UINT64_C(1) << 52; /* at most 24 significant bits */
    mantissa = mantissa >> 29 << (exponent & 1 ? 26 : 25);
    uint64_t found = 0; /* the square root, with 25 bits: one more than f32 has */
    for (uint64_t bit = UINT64_C(1) << 25; bit != 0; bit >>= 1)
        if ((found | bit) * (found | bit) <= mantissa) found |= bit;
    if (found * found != mantissa) found += found & 1; /* more than half of the last place, so not to even */
    return (float)found * float_of((uint32_t)((exponent - (exponent & 1)) / 2 - 24 + 127) << 23);
}

EACH(lanes, plus, a.of[k] + b.of[k], lanes a, lanes b)
EACH(lanes, minus, a.of[k] - b.of[k], lanes a, lanes b)
EACH(lanes, times, a.of[k] * b.of[k], lanes a, lanes b)
EACH(lanes, over, a.of[k] / b.of[k], lanes a, lanes b)
EACH(lanes, root, root_of(a.of[k]), lanes a)
EACH(lanes, size_of, a.of[k] < 0.0f ? -a.of[k] : a.of[k], lanes a)
EACH(lanes, least_of, a.of[k] < b.of[k] ? a.of[k] : b.of[k], lanes a, lanes b)
EACH(lanes, most_of, a.of[k] > b.of[k] ? a.of[k] : b.of[k], lanes a, lanes b)
EACH(truths, below, a.of[k] < b.of[k], lanes a, lanes b)
EACH(truths, same, a.of[k] == b.of[k], lanes a, lanes b)
EACH(truths, both, a.of[k] && b.of[k], truths a, truths b)
EACH(truths, either, a.of[k] || b.of[k], truths a, truths b)
EACH(lanes, choose, p.of[k] ? a.of[k] : b.of[k], truths p, lanes a, lanes b)

SL_INLINE bool all_true(truths p) {
    bool all = true;
    for (size_t k = 0; k < LANES; k++) all = all && p.of[k];
    return all;
}

SL_INLINE bool any_true(truths p) {
    bool any = false;
    for (size_t k = 0; k < LANES; k++) any = any || p.of[k];
    return any;
}

EACH(lanes, nearest, (float)nearest_int(a.of[k]), lanes a)

#include "kernels/quant_blocks.h"
#include "kernels/quant_k.h"

const sl_kernel sl_quant_k_kernels_scalar[] = {QUANT_K_KERNELS QUANT_BLOCK_KERNELS{-1, -1, NULL}};

const sl_weighted_kernel sl_weighted_scalar[] = {WEIGHTED_K_KERNELS WEIGHTED_BLOCK_KERNELS{-1, NULL}};
