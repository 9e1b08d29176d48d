/* Shared by the block quantizers of AVX2 and AVX-512: the scales of four blocks from their largest elements. Included
 * only by these files, hence no prefix. */
#ifndef SL_QUANT_X86_H
#define SL_QUANT_X86_H

#include "kernels/isa.h"
#include "kernels/quant.h"

#ifdef SL_X86

/* Bytes of f32 in a block. */
#define BLOCK (4 * SL_QK)
/* Number of blocks that share reductions and divisions. Smaller rests go to the scalar kernel. */
#define GROUP ((size_t)4)
/* Number of blocks for which scales are computed before any codes: a scale has a long latency from load to inverse,
 * which only other scales can hide. 4 KiB of f32 stay in the first-level cache. */
#define BATCH ((size_t)32)

/* Prefetches the block two batches ahead, if it exists: nothing is read while the codes of a batch are computed, and
 * the hardware prefetcher falls behind. */
static inline void fetch_ahead(const uint8_t *x) {
    const char *line = (const char *)((uintptr_t)x + 2 * BLOCK * BATCH); /* no effect past the end */
    _mm_prefetch(line, _MM_HINT_T0);
    _mm_prefetch(line + 64, _MM_HINT_T0);
}

static inline size_t batch(size_t blocks) { return blocks < BATCH ? blocks / GROUP * GROUP : BATCH; }

/* Returns whether all four largest |x| are finite. */
SL_AVX2 static inline bool all_finite(__m128i absmax) {
    return _mm_movemask_epi8(_mm_cmpgt_epi32(absmax, _mm_set1_epi32((int)SL_F32_INFINITY - 1))) == 0;
}

/* Returns a mask of lanes with invertible scales; `d` is the magnitude of the scale. */
SL_AVX2 static inline __m128 invertible(__m128 d) {
    return _mm_cmp_ps(d, _mm_set1_ps(SL_SCALE_WITHOUT_INVERSE), _CMP_GT_OQ);
}

SL_AVX2 static inline void store_inverses(float *inverses, __m128 d, __m128 invertible_lanes) {
    _mm_storeu_ps(inverses, _mm_and_ps(invertible_lanes, _mm_div_ps(_mm_set1_ps(1.0f), d)));
}

SL_AVX2 static inline void store_f16(uint8_t *out, size_t block_bytes, __m128 d) {
    uint16_t halves[8];
    _mm_storeu_si128((__m128i *)halves, _mm_cvtps_ph(d, _MM_FROUND_TO_NEAREST_INT));
    memcpy(out, &halves[0], sizeof *halves);
    memcpy(out + block_bytes, &halves[1], sizeof *halves);
    memcpy(out + 2 * block_bytes, &halves[2], sizeof *halves);
    memcpy(out + 3 * block_bytes, &halves[3], sizeof *halves);
}

/* Computes the scales of four blocks and their inverses from the bits of their largest |x|. Returns false if the scalar
 * kernel must take the blocks, because an element is NaN or infinite. */
SL_AVX2 static inline bool scales_absmax(__m128i absmax, sl_q4_0 *out, float *inverses) {
    __m128 d = _mm_div_ps(_mm_castsi128_ps(absmax), _mm_set1_ps(7.0f)), invertible_lanes = invertible(d);
    store_inverses(inverses, d, invertible_lanes);
    store_f16(out->d, sizeof *out, _mm_and_ps(invertible_lanes, d));
    return all_finite(absmax);
}

SL_AVX2 static inline bool scales_q8_0(__m128i absmax, sl_q8_0 *out, float *inverses) {
    __m128 d = _mm_div_ps(_mm_castsi128_ps(absmax), _mm_set1_ps(127.0f));
    store_inverses(inverses, d, invertible(d));
    store_f16(out->d, sizeof *out, d);
    return all_finite(absmax);
}

/* Returns the sign bit of the first element with these bits of |x|. */
static inline uint32_t sign_of_first(const uint8_t *in, uint32_t absmax) {
    uint32_t bits;
    do {
        memcpy(&bits, in, sizeof bits);
        in += sizeof bits;
    } while ((bits & 0x7fffffff) != absmax);
    return bits & 0x80000000;
}

/* Returns the largest |x| of each of four blocks with the sign of its first occurrence; +0 for zeros. `most` holds the
 * largest bits as i32, which are the largest positive element if there is one; `lowest` the largest bits as u32, which
 * are the most negative element if there is one. The order of elements matters only if both have equal magnitudes. */
SL_AVX2 static inline __m128i signed_max(__m128i most, __m128i lowest, const uint8_t *in) {
    const __m128i zero = _mm_setzero_si128(), sign = _mm_set1_epi32((int)0x80000000u);
    __m128i positive = _mm_max_epi32(most, zero);
    __m128i negative = _mm_andnot_si128(sign, _mm_and_si128(lowest, _mm_srai_epi32(lowest, 31)));
    __m128i absmax = _mm_max_epi32(negative, positive);
    __m128i signs = _mm_and_si128(_mm_cmpgt_epi32(negative, positive), sign);
    __m128i tie = _mm_andnot_si128(_mm_cmpeq_epi32(absmax, zero), _mm_cmpeq_epi32(negative, positive));
    if (_mm_movemask_epi8(tie) != 0) {
        uint32_t each[4], both[4];
        _mm_storeu_si128((__m128i *)each, absmax);
        _mm_storeu_si128((__m128i *)both, signs);
        for (size_t b = 0; b < GROUP; b++)
            if (each[b] != 0) both[b] = sign_of_first(in + BLOCK * b, each[b]);
        signs = _mm_loadu_si128((const __m128i *)both);
    }
    return _mm_or_si128(absmax, signs);
}

/* Like scales_absmax, from signed_max and the factor for a scale. The scalar kernel also takes nonzero scales without
 * an inverse. */
SL_AVX2 static inline bool scales_signed(__m128i max, float factor, uint8_t *out, size_t block_bytes, float *inverses) {
    const __m128i magnitude = _mm_set1_epi32(0x7fffffff);
    __m128 d = _mm_mul_ps(_mm_castsi128_ps(max), _mm_set1_ps(factor));
    __m128 invertible_lanes = invertible(_mm_and_ps(d, _mm_castsi128_ps(magnitude)));
    __m128 zero = _mm_cmp_ps(d, _mm_setzero_ps(), _CMP_EQ_OQ);
    store_inverses(inverses, d, invertible_lanes);
    store_f16(out, block_bytes, d);
    return all_finite(_mm_and_si128(max, magnitude)) && _mm_movemask_ps(_mm_or_ps(invertible_lanes, zero)) == 15;
}

SL_AVX2 static inline bool scales_ggml(__m128i max, sl_q4_0 *out, float *inverses) {
    return scales_signed(max, -0.125f, out->d, sizeof *out, inverses);
}

SL_AVX2 static inline bool scales_q5_0(__m128i max, sl_q5_0 *out, float *inverses) {
    return scales_signed(max, -0.0625f, out->d, sizeof *out, inverses);
}

/* Stores the codes of five bits of a block: the first 16, and the last 16. */
SL_AVX2 static inline void store_fives(uint8_t *high, uint8_t *nibbles, __m128i first, __m128i last) {
    const __m128i low = _mm_set1_epi8(15);
    uint32_t fifth = (uint32_t)_mm_movemask_epi8(_mm_slli_epi16(first, 3)) |
                     (uint32_t)_mm_movemask_epi8(_mm_slli_epi16(last, 3)) << 16;
    __m128i shifted = _mm_slli_epi16(_mm_and_si128(last, low), 4);
    memcpy(high, &fifth, sizeof fifth);
    _mm_storeu_si128((__m128i *)nibbles, _mm_or_si128(_mm_and_si128(first, low), shifted));
}

/* ---- blocks with a minimum ---- */

/* The range of each of four blocks, and the bits of the largest |x|. Of zeros with both signs either may be `least`. */
typedef struct four_ranges {
    __m128 least, most;
    __m128i absmax;
} four_ranges;

/* Returns the least elements, where those that are zeros have the sign of the first zero. */
SL_AVX2 static inline __m128 first_zeros(__m128 least, const uint8_t *in) {
    int zeros = _mm_movemask_ps(_mm_cmp_ps(least, _mm_setzero_ps(), _CMP_EQ_OQ));
    if (zeros == 0) return least;
    uint32_t bits[4];
    _mm_storeu_si128((__m128i *)bits, _mm_castps_si128(least));
    for (size_t b = 0; b < GROUP; b++)
        if ((zeros >> b & 1) != 0) bits[b] = sign_of_first(in + BLOCK * b, 0);
    return _mm_castsi128_ps(_mm_loadu_si128((const __m128i *)bits));
}

/* Computes scales and minima of four blocks for codes from 0 to `most`, like scales_absmax. The scalar kernel also
 * takes infinite scales. */
SL_AVX2 static inline bool scales_range(four_ranges ranges, const uint8_t *in, float most, uint8_t *out,
                                        size_t block_bytes, float *inverses, float *least) {
    const __m128 infinity = _mm_castsi128_ps(_mm_set1_epi32((int)SL_F32_INFINITY));
    __m128 minimum = first_zeros(ranges.least, in), sign = _mm_set1_ps(-0.0f);
    __m128 difference = _mm_andnot_ps(sign, _mm_sub_ps(ranges.most, minimum)); /* of zeros, +0 */
    __m128 scale = _mm_div_ps(difference, _mm_set1_ps(most));
    store_inverses(inverses, scale, invertible(scale));
    _mm_storeu_ps(least, minimum);
    store_f16(out, block_bytes, scale);
    store_f16(out + 2, block_bytes, minimum);
    return all_finite(ranges.absmax) && _mm_movemask_ps(_mm_cmp_ps(scale, infinity, _CMP_LT_OQ)) == 15;
}

SL_AVX2 static inline bool scales_q4_1(four_ranges ranges, const uint8_t *in, sl_q4_1 *out, float *inverses,
                                       float *least) {
    return scales_range(ranges, in, 15.0f, out->d, sizeof *out, inverses, least);
}

SL_AVX2 static inline bool scales_q5_1(four_ranges ranges, const uint8_t *in, sl_q5_1 *out, float *inverses,
                                       float *least) {
    return scales_range(ranges, in, 31.0f, out->d, sizeof *out, inverses, least);
}

/* Defines a kernel from f32 to blocks. In the including file, TARGET marks functions of its instruction set and SPLAT
 * fills a register; `reduce` prepares four blocks for `scales`, and `store` writes the codes of a block. Batches for
 * which `scales` returns false, and the last blocks, go to the scalar kernel. */
#define BLOCK_QUANTIZER(name, block, dtype, reduce, scales, store)                                                  \
    TARGET static void name(const void *source, void *destination, size_t count) {                                  \
        const uint8_t *in = source;                                                                                 \
        block *out = destination;                                                                                   \
        float inverses[BATCH];                                                                                      \
        size_t blocks = count / SL_QK;                                                                              \
        for (size_t some; (some = batch(blocks)) > 0; blocks -= some, in += BLOCK * some, out += some) {            \
            bool good = true;                                                                                       \
            for (size_t b = 0; b < some; b += GROUP) good &= scales(reduce(in + BLOCK * b), out + b, inverses + b); \
            if (!good) {                                                                                            \
                sl_convert_rest(SL_F32, dtype, in, out, SL_QK * some);                                              \
                continue;                                                                                           \
            }                                                                                                       \
            for (size_t b = 0; b < some; b++) {                                                                     \
                const uint8_t *x = in + BLOCK * b;                                                                  \
                fetch_ahead(x);                                                                                     \
                store(out + b, x, SPLAT(inverses[b]));                                                              \
            }                                                                                                       \
        }                                                                                                           \
        sl_convert_rest(SL_F32, dtype, in, out, SL_QK * blocks);                                                    \
    }

/* Like BLOCK_QUANTIZER for blocks with a minimum. */
#define RANGE_QUANTIZER(name, block, dtype, scales, store)                                               \
    TARGET static void name(const void *source, void *destination, size_t count) {                       \
        const uint8_t *in = source;                                                                      \
        block *out = destination;                                                                        \
        float inverses[BATCH], least[BATCH];                                                             \
        size_t blocks = count / SL_QK;                                                                   \
        for (size_t some; (some = batch(blocks)) > 0; blocks -= some, in += BLOCK * some, out += some) { \
            bool good = true;                                                                            \
            for (size_t b = 0; b < some; b += GROUP) {                                                   \
                const uint8_t *x = in + BLOCK * b;                                                       \
                good &= scales(ranges_of_blocks(x), x, out + b, inverses + b, least + b);                \
            }                                                                                            \
            if (!good) {                                                                                 \
                sl_convert_rest(SL_F32, dtype, in, out, SL_QK * some);                                   \
                continue;                                                                                \
            }                                                                                            \
            for (size_t b = 0; b < some; b++) {                                                          \
                const uint8_t *x = in + BLOCK * b;                                                       \
                fetch_ahead(x);                                                                          \
                store(out + b, x, SPLAT(least[b]), SPLAT(inverses[b]));                                  \
            }                                                                                            \
        }                                                                                                \
        sl_convert_rest(SL_F32, dtype, in, out, SL_QK * blocks);                                         \
    }

#endif
#endif
