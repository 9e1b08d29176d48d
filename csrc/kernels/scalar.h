/* Loads, stores and 16-bit floats for the scalar kernels, element by element. Included only by these kernels, hence no
 * prefix. */
#ifndef SL_SCALAR_H
#define SL_SCALAR_H

#include "base/base.h"

/* ---- loads and stores at any alignment, in file byte order ---- */

static inline uint16_t load16(const void *source, size_t i) {
    const uint8_t *b = (const uint8_t *)source + 2 * i;
    return (uint16_t)(b[0] | b[1] << 8);
}

static inline uint32_t load32(const void *source, size_t i) {
    const uint8_t *b = (const uint8_t *)source + 4 * i;
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

static inline uint64_t load64(const void *source, size_t i) { return sl_load_le64((const uint8_t *)source + 8 * i); }

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline double double_of(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline void store16(void *destination, size_t i, uint16_t bits) {
    uint8_t *b = (uint8_t *)destination + 2 * i;
    b[0] = (uint8_t)bits;
    b[1] = (uint8_t)(bits >> 8);
}

static inline void store32(void *destination, size_t i, uint32_t bits) {
    uint8_t *b = (uint8_t *)destination + 4 * i;
    b[0] = (uint8_t)bits;
    b[1] = (uint8_t)(bits >> 8);
    b[2] = (uint8_t)(bits >> 16);
    b[3] = (uint8_t)(bits >> 24);
}

static inline void store_float(void *destination, size_t i, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    store32(destination, i, bits);
}

static inline void store_double(void *destination, size_t i, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    sl_store_le64((uint8_t *)destination + 8 * i, bits);
}

/* ---- 16-bit floats ---- */

static inline uint32_t bf16_to_f32(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? bits | 0x00400000 : bits;
}

static inline uint32_t f16_to_f32(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 0x1f, mantissa = half & 0x3ff;
    if (exponent == 0x1f) return sign | 0x7f800000 | mantissa << 13 | (mantissa != 0 ? 0x00400000 : 0);
    if (exponent != 0) return sign | (exponent + 112) << 23 | mantissa << 13;
    /* Subnormal: mantissa * 2^-24, which is a normal f32. */
    uint32_t bits;
    float value = (float)mantissa * 0x1p-24f;
    memcpy(&bits, &value, sizeof bits);
    return sign | bits;
}

/* value >> shift, rounded to nearest, ties to even; shift must be >= 1. */
static inline uint64_t round_shift(uint64_t value, int shift) {
    if (shift > 63) return 0;
    uint64_t kept = value >> shift, rest = value & (((uint64_t)1 << shift) - 1), half = (uint64_t)1 << (shift - 1);
    return kept + (rest > half || (rest == half && (kept & 1) != 0));
}

/* Narrows a finite positive float, given as its bits without sign, and returns exponent and mantissa, so that a rounded
 * mantissa carries into the exponent. The result may exceed the target's largest code. */
static inline uint64_t narrow(uint64_t bits, int from_mantissa, int from_bias, int to_mantissa, int to_bias) {
    int exponent = (int)(bits >> from_mantissa), shift = from_mantissa - to_mantissa;
    int target = exponent - from_bias + to_bias; /* the exponent field if the result is normal */
    if (target >= 1) return round_shift(bits, shift) + ((uint64_t)((int64_t)to_bias - from_bias) << to_mantissa);
    uint64_t mantissa = bits & (((uint64_t)1 << from_mantissa) - 1);
    if (exponent > 0)
        mantissa |= (uint64_t)1 << from_mantissa;
    else
        target++; /* subnormals have the exponent of the smallest normal */
    return round_shift(mantissa, shift + 1 - target);
}

static inline uint16_t f32_to_f16(uint32_t bits) {
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00 | (uint16_t)(bits >> 13 & 0x3ff);
    uint64_t code = narrow(bits, 23, 127, 10, 15);
    return sign | (uint16_t)(code > 0x7c00 ? 0x7c00 : code);
}

static inline float load_half(const void *source, size_t i) { return float_of(f16_to_f32(load16(source, i))); }

static inline void store_half(void *destination, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    store16(destination, 0, f32_to_f16(bits));
}

/* Rounds a float like ggml, half to even. From 2^22 on the result is some integer, as in ggml. */
static inline int32_t nearest_int(float value) {
    float sum = value + 12582912.0f;
    uint32_t bits;
    memcpy(&bits, &sum, sizeof bits);
    return (int32_t)(bits & 0x007fffff) - 0x00400000;
}

#endif
