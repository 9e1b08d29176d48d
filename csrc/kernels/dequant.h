/* Dequantization of ggml blocks: a single implementation per type for all tiers, in terms of 16 codes at a time. All
 * layouts are from https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Products and sums are rounded
 * separately, in the order of ggml and gguf-py.
 *
 * A type consists of the struct of a block, a function that dequantizes it, and its row at the end. Values are computed
 * in runs of 16: 8-bit codes become f32, are multiplied by a scale, and in some types a constant is added.
 *
 * Included only by the files of the tiers, hence no prefix. The including file must define:
 *
 *   TARGET                                marks functions of its instruction set
 *   KERNEL(type)                          the name of a kernel
 *   codes                                 16 integers of 8 bits
 *   codes_at(bytes)                       loads from memory, at any alignment
 *   codes_of(low, high)                   takes two 64-bit words
 *   take(codes, shift, mask)              (code >> shift) & mask, where a negative shift goes to the left; constants.
 *                                         `mask` excludes all bits of neighbouring codes
 *   spread(bits, weight)                  weight if the bit is set, otherwise 0; bit k of 16 belongs to code k
 *   either(a, b)                          a | b
 *   less(codes, bias)                     code - bias
 *   thrice(codes)                         the low 8 bits of 3 * code
 *   top_digit(codes)                      3 * code >> 8 of unsigned codes: 0, 1 or 2
 *   scales_of(floats, codes, factor)      code * factor, in this machine's byte order
 *   put(out, codes, scale)                code * scale, in file byte order
 *   put_plus(out, codes, scale, more)     code * scale + more
 *   put_nibbles(out, codes, bias, scale)  (code - bias) * scale; codes are below 16
 *   put_from(out, table, codes, scale)    table[code] * scale, with 16 numbers of 8 bits; codes are below 16
 *   half_at(bytes)                        an f16 as f32
 *
 * Codes that become f32 are signed. */
#ifndef SL_DEQUANT_H
#define SL_DEQUANT_H

#include "kernels/blocks.h"
#include "kernels/quant.h"
#include "kernels/scalar.h"

/* Elements of a super-block (QK_K). */
#define SUPER 256

/* Bytes of a run of 16 f32. */
#define RUN 64

/* A scale and a constant to add. If either is a NaN, both become NaN: the result is a NaN in any case, but the NaN of a
 * sum of two NaNs depends on the order of the operands, which compilers choose. */
typedef struct affine {
    float scale, more;
} affine;

TARGET SL_INLINE affine affine_of(float scale, float more) {
    affine both = {scale, more};
    if (SL_LIKELY(scale == scale && more == more)) return both;
    both.scale = both.more = scale != scale ? scale : more;
    return both;
}

/* ---- blocks of 32: the first 16 elements are in the low nibbles (quant.h) ---- */

TARGET SL_INLINE void restore_q4_0(const sl_q4_0 *block, uint8_t *out) {
    float d = half_at(block->d);
    codes bytes = codes_at(block->codes);
    put_nibbles(out, take(bytes, 0, 15), 8, d);
    put_nibbles(out + RUN, take(bytes, 4, 15), 8, d);
}

TARGET SL_INLINE void restore_q4_1(const sl_q4_1 *block, uint8_t *out) {
    affine by = affine_of(half_at(block->d), half_at(block->m));
    codes bytes = codes_at(block->codes);
    put_plus(out, take(bytes, 0, 15), by.scale, by.more);
    put_plus(out + RUN, take(bytes, 4, 15), by.scale, by.more);
}

TARGET SL_INLINE void restore_q5_0(const sl_q5_0 *block, uint8_t *out) {
    float d = half_at(block->d);
    codes bytes = codes_at(block->codes);
    codes low = either(take(bytes, 0, 15), spread(load16(block->high, 0), 16));
    codes high = either(take(bytes, 4, 15), spread(load16(block->high, 1), 16));
    put(out, less(low, 16), d);
    put(out + RUN, less(high, 16), d);
}

TARGET SL_INLINE void restore_q5_1(const sl_q5_1 *block, uint8_t *out) {
    affine by = affine_of(half_at(block->d), half_at(block->m));
    codes bytes = codes_at(block->codes);
    put_plus(out, either(take(bytes, 0, 15), spread(load16(block->high, 0), 16)), by.scale, by.more);
    put_plus(out + RUN, either(take(bytes, 4, 15), spread(load16(block->high, 1), 16)), by.scale, by.more);
}

TARGET SL_INLINE void restore_q8_0(const sl_q8_0 *block, uint8_t *out) {
    float d = half_at(block->d);
    put(out, codes_at(block->codes), d);
    put(out + RUN, codes_at(block->codes + 16), d);
}

/* Dequantizes codes that are indices into a table. */
TARGET SL_INLINE void restore_table(const uint8_t nibbles[16], const int8_t table[16], float d, uint8_t *out) {
    codes bytes = codes_at(nibbles);
    put_from(out, table, take(bytes, 0, 15), d);
    put_from(out + RUN, table, take(bytes, 4, 15), d);
}

TARGET SL_INLINE void restore_iq4_nl(const sl_iq4_nl *block, uint8_t *out) {
    restore_table(block->codes, IQ4_TABLE, half_at(block->d), out);
}

TARGET SL_INLINE void restore_mxfp4(const sl_mxfp4 *block, uint8_t *out) {
    uint32_t exponent = block->exponent; /* 0 and 1 are subnormal scales */
    float d = float_of(exponent < 2 ? (uint32_t)0x00200000 << exponent : (exponent - 1) << 23);
    restore_table(block->codes, E2M1_TABLE, d, out);
}

/* ---- blocks of 64: four runs of 16 ---- */

#define LOW_NIBBLES UINT64_C(0x0f0f0f0f0f0f0f0f)

TARGET SL_INLINE void restore_nvfp4(const sl_nvfp4 *block, uint8_t *out) {
    for (size_t run = 0; run < 4; run++, out += RUN) {
        uint64_t eight = load64(block->codes, run);
        put_from(out, E2M1_TABLE, codes_of(eight & LOW_NIBBLES, eight >> 4 & LOW_NIBBLES),
                 half_ue4m3(block->scales[run]));
    }
}

/* ---- super-blocks of 256: an f16 scale of scales, and small integers as scales of runs of 16 or 32 ---- */

/* Dequantizes two runs. */
TARGET SL_INLINE void q2_k_runs(uint8_t *out, const uint8_t bytes[32], int shift, const float scales[2],
                                const float minima[2]) {
    put_plus(out, take(codes_at(bytes), shift, 3), scales[0], minima[0]);
    put_plus(out + RUN, take(codes_at(bytes + 16), shift, 3), scales[1], minima[1]);
}

TARGET SL_INLINE void restore_q2_k(const sl_q2_k *block, uint8_t *out) {
    codes both = codes_at(block->scales);
    float scales[16], minima[16];
    affine by = affine_of(half_at(block->d), -half_at(block->dmin));
    scales_of(scales, take(both, 0, 15), by.scale);
    scales_of(minima, take(both, 4, 15), by.more);
    for (size_t run = 0; run < 16; run += 8, out += 8 * RUN) {
        const uint8_t *bytes = block->codes + 4 * run;
        q2_k_runs(out, bytes, 0, scales + run, minima + run);
        q2_k_runs(out + 2 * RUN, bytes, 2, scales + run + 2, minima + run + 2);
        q2_k_runs(out + 4 * RUN, bytes, 4, scales + run + 4, minima + run + 4);
        q2_k_runs(out + 6 * RUN, bytes, 6, scales + run + 6, minima + run + 6);
    }
}

/* Moves bits 0 and 1 of the bytes of two words to bits 4 and 5 of eight bytes. */
SL_INLINE uint64_t top_bits(uint32_t first, uint32_t second) {
    return ((uint64_t)(second & 0x03030303) << 32 | (first & 0x03030303)) << 4;
}

TARGET SL_INLINE codes q3_k_scales(const uint8_t scales[12]) {
    uint64_t low = load64(scales, 0);
    uint32_t top = load32(scales, 2);
    codes six = codes_of((low & LOW_NIBBLES) | top_bits(top, top >> 2),
                         (low >> 4 & LOW_NIBBLES) | top_bits(top >> 4, top >> 6));
    return less(six, 32);
}

/* Dequantizes runs `run`, which is even, and run + 1. */
TARGET SL_INLINE void q3_k_runs(uint8_t *out, const uint8_t bytes[32], int shift, const uint8_t high[32], int run,
                                const float scales[2]) {
    codes first = either(take(codes_at(bytes), shift, 3), take(codes_at(high), run / 2 - 2, 4));
    codes second = either(take(codes_at(bytes + 16), shift, 3), take(codes_at(high + 16), run / 2 - 2, 4));
    put_nibbles(out, first, 4, scales[0]);
    put_nibbles(out + RUN, second, 4, scales[1]);
}

TARGET SL_INLINE void restore_q3_k(const sl_q3_k *block, uint8_t *out) {
    float scales[16];
    scales_of(scales, q3_k_scales(block->scales), half_at(block->d));
    q3_k_runs(out, block->codes, 0, block->high, 0, scales);
    q3_k_runs(out + 2 * RUN, block->codes, 2, block->high, 2, scales + 2);
    q3_k_runs(out + 4 * RUN, block->codes, 4, block->high, 4, scales + 4);
    q3_k_runs(out + 6 * RUN, block->codes, 6, block->high, 6, scales + 6);
    q3_k_runs(out + 8 * RUN, block->codes + 32, 0, block->high, 8, scales + 8);
    q3_k_runs(out + 10 * RUN, block->codes + 32, 2, block->high, 10, scales + 10);
    q3_k_runs(out + 12 * RUN, block->codes + 32, 4, block->high, 12, scales + 12);
    q3_k_runs(out + 14 * RUN, block->codes + 32, 6, block->high, 14, scales + 14);
}

/* Scale and minimum of run k of 8, 6 bits each. For runs 0 to 3 they are the low bits of bytes k and k + 4; for other
 * runs, byte k + 4 holds the low 4 bits, and the top bits of the bytes of runs 0 to 3 hold the high 2. */
typedef struct scaling {
    float scales[16], minima[16]; /* scales[k] and minima[8 + k] of run k; minima are negative */
} scaling;

TARGET SL_INLINE void scaling_of(scaling *self, const uint8_t stored[12], const uint8_t d[2], const uint8_t dmin[2]) {
    uint32_t first = load32(stored, 0), second = load32(stored, 1), last = load32(stored, 2);
    uint64_t scales = (uint64_t)(last & 0x0f0f0f0f) << 32 | (first & 0x3f3f3f3f);
    uint64_t minima = (uint64_t)(last >> 4 & 0x0f0f0f0f) << 32 | (second & 0x3f3f3f3f);
    codes six = codes_of(scales | top_bits(0, first >> 6), minima | top_bits(0, second >> 6));
    affine by = affine_of(half_at(d), -half_at(dmin));
    scales_of(self->scales, six, by.scale);
    scales_of(self->minima, six, by.more);
}

/* Dequantizes runs `run` and run + 1; `high` holds the fifth bits of the codes, or is NULL. */
TARGET SL_INLINE void q4_k_runs(uint8_t *out, const uint8_t bytes[32], const uint8_t *high, int run,
                                const scaling *by) {
    codes a = codes_at(bytes), b = codes_at(bytes + 16);
    codes first[2] = {take(a, 0, 15), take(b, 0, 15)}, second[2] = {take(a, 4, 15), take(b, 4, 15)};
    for (int half = 0; high != NULL && half < 2; half++) {
        codes fifth = codes_at(high + 16 * half);
        first[half] = either(first[half], take(fifth, run - 4, 16));
        second[half] = either(second[half], take(fifth, run - 3, 16));
    }
    put_plus(out, first[0], by->scales[run], by->minima[8 + run]);
    put_plus(out + RUN, first[1], by->scales[run], by->minima[8 + run]);
    put_plus(out + 2 * RUN, second[0], by->scales[run + 1], by->minima[9 + run]);
    put_plus(out + 3 * RUN, second[1], by->scales[run + 1], by->minima[9 + run]);
}

TARGET SL_INLINE void restore_q4_k(const sl_q4_k *block, uint8_t *out) {
    scaling by;
    scaling_of(&by, block->scales, block->d, block->dmin);
    q4_k_runs(out, block->codes, NULL, 0, &by);
    q4_k_runs(out + 4 * RUN, block->codes + 32, NULL, 2, &by);
    q4_k_runs(out + 8 * RUN, block->codes + 64, NULL, 4, &by);
    q4_k_runs(out + 12 * RUN, block->codes + 96, NULL, 6, &by);
}

TARGET SL_INLINE void restore_q5_k(const sl_q5_k *block, uint8_t *out) {
    scaling by;
    scaling_of(&by, block->scales, block->d, block->dmin);
    q4_k_runs(out, block->codes, block->high, 0, &by);
    q4_k_runs(out + 4 * RUN, block->codes + 32, block->high, 2, &by);
    q4_k_runs(out + 8 * RUN, block->codes + 64, block->high, 4, &by);
    q4_k_runs(out + 12 * RUN, block->codes + 96, block->high, 6, &by);
}

/* Dequantizes two runs. */
TARGET SL_INLINE void q6_k_runs(uint8_t *out, const uint8_t low[32], int low_shift, const uint8_t high[32],
                                int high_shift, const float scales[2]) {
    codes first = either(take(codes_at(low), low_shift, 15), take(codes_at(high), high_shift - 4, 48));
    codes second = either(take(codes_at(low + 16), low_shift, 15), take(codes_at(high + 16), high_shift - 4, 48));
    put(out, less(first, 32), scales[0]);
    put(out + RUN, less(second, 32), scales[1]);
}

TARGET SL_INLINE void restore_q6_k(const sl_q6_k *block, uint8_t *out) {
    float scales[16];
    scales_of(scales, codes_at(block->scales), half_at(block->d));
    for (size_t run = 0; run < 16; run += 8, out += 8 * RUN) {
        const uint8_t *low = block->low + 8 * run, *high = block->high + 4 * run;
        q6_k_runs(out, low, 0, high, 0, scales + run);
        q6_k_runs(out + 2 * RUN, low + 32, 0, high, 2, scales + run + 2);
        q6_k_runs(out + 4 * RUN, low, 4, high, 4, scales + run + 4);
        q6_k_runs(out + 6 * RUN, low + 32, 4, high, 6, scales + run + 6);
    }
}

/* Spreads the nibbles of a word, or its pairs of bits, over bytes. */
SL_INLINE uint64_t nibbles_apart(uint32_t word) {
    uint64_t apart = word;
    apart = (apart | apart << 16) & UINT64_C(0x0000ffff0000ffff);
    apart = (apart | apart << 8) & UINT64_C(0x00ff00ff00ff00ff);
    return (apart | apart << 4) & LOW_NIBBLES;
}

SL_INLINE uint64_t pairs_apart(uint16_t half) {
    uint64_t apart = half;
    apart = (apart | apart << 24) & UINT64_C(0x000000ff000000ff);
    apart = (apart | apart << 12) & UINT64_C(0x000f000f000f000f);
    return (apart | apart << 6) & UINT64_C(0x0303030303030303);
}

TARGET SL_INLINE void restore_iq4_xs(const sl_iq4_xs *block, uint8_t *out) {
    float scales[16]; /* 8 are used */
    uint64_t six = nibbles_apart(load32(block->low, 0)) | pairs_apart(load16(block->high, 0)) << 4;
    scales_of(scales, less(codes_of(six, 0), 32), half_at(block->d));
    for (size_t run = 0; run < 8; run++, out += 2 * RUN)
        restore_table(block->codes + 16 * run, IQ4_TABLE, scales[run], out);
}

/* ---- types in headers of their own, which use the functions above ---- */

#include "kernels/dequant_iq.h"
#include "kernels/dequant_ternary.h"

/* ---- kernels ---- */

#define EACH_TYPE(ROW)            \
    ROW(SL_Q4_0, q4_0, SL_QK)     \
    ROW(SL_Q4_1, q4_1, SL_QK)     \
    ROW(SL_Q5_0, q5_0, SL_QK)     \
    ROW(SL_Q5_1, q5_1, SL_QK)     \
    ROW(SL_Q8_0, q8_0, SL_QK)     \
    ROW(SL_Q2_K, q2_k, SUPER)     \
    ROW(SL_Q3_K, q3_k, SUPER)     \
    ROW(SL_Q4_K, q4_k, SUPER)     \
    ROW(SL_Q5_K, q5_k, SUPER)     \
    ROW(SL_Q6_K, q6_k, SUPER)     \
    ROW(SL_MXFP4, mxfp4, SL_QK)   \
    ROW(SL_IQ4_NL, iq4_nl, SL_QK) \
    ROW(SL_IQ4_XS, iq4_xs, SUPER) \
    ROW(SL_TQ1_0, tq1_0, SUPER)   \
    ROW(SL_TQ2_0, tq2_0, SUPER)   \
    ROW(SL_NVFP4, nvfp4, 64)      \
    ROW(SL_Q1_0, q1_0, 128)       \
    ROW(SL_Q2_0, q2_0, 64)        \
    ROW(SL_I2_S, i2_s, 128)       \
    EACH_IQ_TYPE(ROW)

#define DEFINE(dtype, type, elements)                                                            \
    TARGET static void KERNEL(type)(const void *source, void *destination, size_t count) {       \
        const sl_##type *block = source;                                                         \
        uint8_t *out = destination;                                                              \
        for (size_t i = 0; i < count; i += (elements), block++, out += 4 * (size_t)(elements)) { \
            sl_prefetch_results(out, 4 * (elements));                                            \
            restore_##type(block, out);                                                          \
        }                                                                                        \
    }

#define ENTRY(dtype, type, elements) {dtype, SL_F32, KERNEL(type)},

EACH_TYPE(DEFINE)

/* The rows of a tier, without its end. */
#define DEQUANT_KERNELS EACH_TYPE(ENTRY)

#endif
