/* Inputs of the kernels, in the byte order of files: all codes where there are at most 65,536, else edges and random
 * values. */
#ifndef INPUTS_H
#define INPUTS_H

#include "harness.h"

/* A value whose exponent is near those where narrower formats end, often with a tie below their last bit. */
static inline uint64_t near_the_limits(uint64_t random, int mantissa_bits, uint64_t bias) {
    uint64_t mantissa = random & (((uint64_t)1 << mantissa_bits) - 1), exponent = bias + 20 - (random >> 52 & 63);
    mantissa &= ~(uint64_t)0 << (random >> 58) % (uint64_t)mantissa_bits;
    return exponent << mantissa_bits | mantissa;
}

static inline uint64_t f32_input(size_t i, uint64_t random) {
    static const uint32_t SPECIALS[] = {
        0,          1,          2,          0x007fffff, 0x00800000, 0x00800001, /* zero, subnormals, the smallest
                                                                                   normals */
        0x33000000, 0x33000001, 0x33800000, 0x387fc000,                         /* around the subnormals of f16 */
        0x477fe000, 0x477fefff, 0x477ff000, 0x47800000,                         /* around its largest */
        0x43e00000, 0x43e7ffff, 0x43e80000, 0x43f00000,                         /* of e4m3fn */
        0x47600000, 0x476fffff, 0x47700000,                                     /* of e5m2 */
        0x3effffff, 0x3f000000, 0x3f800000, 0x7f7f7fff, 0x7f7f8000, 0x7f7fffff, 0x7f800000,
        0x7f800001, 0x7fa00000, 0x7fc00000, 0x7fffffff, /* infinity and NaNs */
    };
    const size_t specials = sizeof SPECIALS / sizeof SPECIALS[0];
    if (i < 2 * specials) return SPECIALS[i / 2] | (i % 2 != 0 ? 0x80000000u : 0);
    if (i % 2 != 0) return random >> 32;
    return near_the_limits(random, 23, 127) | (random & UINT64_C(1) << 57) >> 26;
}

static inline uint64_t f64_input(size_t i, uint64_t random) {
    static const uint64_t SPECIALS[] = {
        0,
        1,
        UINT64_C(0x000fffffffffffff),
        UINT64_C(0x0010000000000000),
        UINT64_C(0x3690000000000000),
        UINT64_C(0x36a0000000000000),
        UINT64_C(0x380fffffe0000000), /* subnormals of f32 */
        UINT64_C(0x47efffffe0000000),
        UINT64_C(0x47efffffefffffff),
        UINT64_C(0x47effffff0000000), /* its largest */
        UINT64_C(0x40effdffffffffff),
        UINT64_C(0x40effe0000000000), /* that of f16 */
        UINT64_C(0x7fefffffffffffff),
        UINT64_C(0x7ff0000000000000),
        UINT64_C(0x7ff0000000000001),
        UINT64_C(0x7ff8000000000000),
        UINT64_C(0x7fffffffffffffff),
    };
    const size_t specials = sizeof SPECIALS / sizeof SPECIALS[0];
    if (i < 2 * specials) return SPECIALS[i / 2] | (i % 2 != 0 ? UINT64_C(1) << 63 : 0);
    if (i % 2 != 0) return random;
    return near_the_limits(random, 52, 1023) | (random & UINT64_C(1) << 57) << 6;
}

static inline uint64_t integer_input(size_t i, uint64_t random) {
    static const uint64_t EDGES[] = {
        0,
        1,
        0xffffff,
        0x1000000,
        0x1000001,
        0x7fffffff,
        0x80000000u,
        0xffffffff, /* 2^24 is where f32 begins to round */
        UINT64_C(0x20000000000001),
        UINT64_C(0x7fffffffffffffff),
        UINT64_C(0x8000000000000000),
        UINT64_C(0xffffffffffffffff),
    };
    if (i < sizeof EDGES / sizeof EDGES[0]) return EDGES[i];
    return random >> (random & 63);
}

/* f32 for quantizers, in blocks of 32 of about the same size: all sizes, and each 16th block one of those that kernels
 * treat apart: zeros, no inverse of the scale, a scale that f16 cannot hold, ties of the largest, halves, infinity,
 * NaN. */
static inline uint32_t f32_of_block(size_t i, uint64_t random) {
    size_t block = i / 32, lane = i % 32;
    uint32_t sign = (uint32_t)(random >> 32 & 0x80000000u), mantissa = (uint32_t)random & 0x7fffff;
    if (block % 16 != 0) {
        uint32_t exponent = 127 + 16 - (uint32_t)(block % 48) - (uint32_t)(random >> 40) % 6;
        return sign | exponent << 23 | mantissa;
    }
    switch (block / 16 % 8) {
    case 0: return sign;
    case 1: return sign | mantissa;                                                      /* subnormals */
    case 2: return sign | (0x7e000000 + mantissa);                                       /* scales past f16 */
    case 3: return sign | (lane % 5 == 0 ? 0x3f800000 : 0x3f000000 | mantissa);          /* several of the largest */
    case 4: return sign | (lane == 7 ? 0x40e00000 : 0x40000000 | (mantissa & 0x600000)); /* absmax 7: halves are ties */
    case 5: return sign | (lane == 9 ? 0x7f800000 : mantissa);
    case 6: return sign | (lane == 31 ? 0x7fc00000 : 0x3f800000 + mantissa);
    default: return sign | ((uint32_t)(block / 128 % 8 + 1) << 23 | mantissa); /* at the end of the inverses */
    }
}

/* `count` elements of `dtype`, whole blocks; of f32 for quantizers if `blocks`. */
static inline void fill(uint8_t *memory, int32_t dtype, size_t count, bool blocks) {
    const sl_dtype_info *info = sl_dtype_get(dtype);
    uint64_t state = (uint64_t)dtype;
    size_t size = count / (size_t)info->block * (size_t)info->block_bytes;
    if (info->block > 1) {
        for (size_t i = 0; i < size; i++) memory[i] = (uint8_t)(random_u64(&state) >> 56);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        uint64_t random = random_u64(&state), value;
        switch (dtype) {
        case SL_F32: value = blocks ? f32_of_block(i, random) : f32_input(i, random); break;
        case SL_F64: value = f64_input(i, random); break;
        case SL_BOOL: value = i & 1; break;
        default: value = info->bits <= 16 && !blocks ? i : integer_input(i, random); break;
        }
        for (int32_t k = 0; k < info->block_bytes; k++) *memory++ = (uint8_t)(value >> 8 * k);
    }
}

#endif
