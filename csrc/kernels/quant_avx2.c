/* Quantization with AVX2: the largest |x|, int8, blocks. */
#include "kernels/quant_x86.h"

#ifdef SL_X86

#define TARGET SL_AVX2
#define SPLAT _mm256_set1_ps

/* 32 elements: four registers of f32, a register of int8, a block. */
#define STEP ((size_t)32)

/* Register k of 32 f32. */
TARGET static __m256 load_f32(const uint8_t *source, int k) {
    return _mm256_loadu_ps((const float *)(source + 32 * k));
}

TARGET static __m256i load_bits(const uint8_t *source, int k) {
    return _mm256_loadu_si256((const __m256i *)(source + 32 * k));
}

/* ---- the largest |x| ---- */

TARGET static __m256i bits_of_abs(__m256i bits) { return _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)); }

TARGET static uint32_t sl_absmax_f32_avx2(const void *source, size_t count) {
    const uint8_t *in = source;
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    size_t i = 0;
    for (; i + STEP <= count; i += STEP) {
        a = _mm256_max_epi32(a, bits_of_abs(load_bits(in + 4 * i, 0)));
        b = _mm256_max_epi32(b, bits_of_abs(load_bits(in + 4 * i, 1)));
        c = _mm256_max_epi32(c, bits_of_abs(load_bits(in + 4 * i, 2)));
        d = _mm256_max_epi32(d, bits_of_abs(load_bits(in + 4 * i, 3)));
    }
    __m256i all = _mm256_max_epi32(_mm256_max_epi32(a, b), _mm256_max_epi32(c, d));
    uint32_t lanes[8], absmax = sl_quant_scalar.absmax_f32(in + 4 * i, count - i);
    _mm256_storeu_si256((__m256i *)lanes, all);
    for (int k = 0; k < 8; k++) absmax = absmax > lanes[k] ? absmax : lanes[k];
    return absmax;
}

/* Returns the largest of the first count / 64 * 64 16-bit floats, ignoring signs. */
TARGET static uint16_t absmax_half(const uint8_t *in, size_t count) {
    const __m256i magnitude = _mm256_set1_epi16(0x7fff);
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (size_t i = 0; i + 2 * STEP <= count; i += 2 * STEP) {
        a = _mm256_max_epi16(a, _mm256_and_si256(load_bits(in + 2 * i, 0), magnitude));
        b = _mm256_max_epi16(b, _mm256_and_si256(load_bits(in + 2 * i, 1), magnitude));
        c = _mm256_max_epi16(c, _mm256_and_si256(load_bits(in + 2 * i, 2), magnitude));
        d = _mm256_max_epi16(d, _mm256_and_si256(load_bits(in + 2 * i, 3), magnitude));
    }
    __m256i all = _mm256_max_epi16(_mm256_max_epi16(a, b), _mm256_max_epi16(c, d));
    uint16_t lanes[16], absmax = 0;
    _mm256_storeu_si256((__m256i *)lanes, all);
    for (int k = 0; k < 16; k++) absmax = absmax > lanes[k] ? absmax : lanes[k];
    return absmax;
}

TARGET static uint32_t sl_absmax_bf16_avx2(const void *source, size_t count) {
    const uint8_t *in = source;
    size_t done = count / (2 * STEP) * (2 * STEP);
    uint32_t absmax = (uint32_t)absmax_half(in, count) << 16,
             rest = sl_quant_scalar.absmax_bf16(in + 2 * done, count - done);
    return absmax > rest ? absmax : rest;
}

TARGET static uint32_t sl_absmax_f16_avx2(const void *source, size_t count) {
    const uint8_t *in = source;
    size_t done = count / (2 * STEP) * (2 * STEP);
    uint16_t half = absmax_half(in, count);
    uint8_t bytes[2] = {(uint8_t)half, (uint8_t)(half >> 8)};
    uint32_t absmax = sl_quant_scalar.absmax_f16(bytes, 1),
             rest = sl_quant_scalar.absmax_f16(in + 2 * done, count - done);
    return absmax > rest ? absmax : rest;
}

TARGET static void sl_absmax_each_avx2(const void *source, uint32_t *absmax, size_t count) {
    const uint8_t *in = source;
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256i *most = (__m256i *)(absmax + i);
        _mm256_storeu_si256(most, _mm256_max_epu32(_mm256_loadu_si256(most), bits_of_abs(load_bits(in + 4 * i, 0))));
    }
    sl_quant_scalar.absmax_each(in + 4 * i, absmax + i, count - i);
}

/* ---- int8 ---- */

/* Rounds half away from zero; values out of range, of either sign, become 0x80000000. */
TARGET static __m256i round_away(__m256 value) {
    __m256 sign = _mm256_and_ps(value, _mm256_set1_ps(-0.0f));
    return _mm256_cvttps_epi32(_mm256_add_ps(value, _mm256_or_ps(sign, _mm256_set1_ps(SL_BELOW_HALF))));
}

/* The minimum with a NaN is the second argument, 127; values far below -128 become 0x80000000, which packs saturates.
 */
TARGET static __m256i int8_codes(__m256 value) { return round_away(_mm256_min_ps(value, _mm256_set1_ps(127.0f))); }

/* Packs 32 values with saturation. packs works within 128-bit lanes; the permutation restores the order of the eighths.
 */
TARGET static __m256i pack_int8(__m256i a, __m256i b, __m256i c, __m256i d) {
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

TARGET static __m256i codes_of_32(const uint8_t *in, __m256 a, __m256 b, __m256 c, __m256 d) {
    return pack_int8(int8_codes(_mm256_mul_ps(load_f32(in, 0), a)), int8_codes(_mm256_mul_ps(load_f32(in, 1), b)),
                     int8_codes(_mm256_mul_ps(load_f32(in, 2), c)), int8_codes(_mm256_mul_ps(load_f32(in, 3), d)));
}

TARGET static void sl_f32_to_int8_avx2(const void *source, int8_t *destination, size_t count, float factor) {
    const uint8_t *in = source;
    __m256 all = _mm256_set1_ps(factor);
    size_t i = 0;
    for (; i + STEP <= count; i += STEP)
        _mm256_storeu_si256((__m256i *)(destination + i), codes_of_32(in + 4 * i, all, all, all, all));
    sl_quant_scalar.to_int8(in + 4 * i, destination + i, count - i, factor);
}

TARGET static void sl_f32_to_int8_each_avx2(const void *source, int8_t *destination, size_t count,
                                            const float *factors) {
    const uint8_t *in = source;
    size_t i = 0;
    for (; i + STEP <= count; i += STEP) {
        const float *f = factors + i;
        __m256i codes = codes_of_32(in + 4 * i, _mm256_loadu_ps(f), _mm256_loadu_ps(f + 8), _mm256_loadu_ps(f + 16),
                                    _mm256_loadu_ps(f + 24));
        _mm256_storeu_si256((__m256i *)(destination + i), codes);
    }
    sl_quant_scalar.to_int8_each(in + 4 * i, destination + i, count - i, factors + i);
}

const sl_quant sl_quant_avx2 = {
    .absmax_f32 = sl_absmax_f32_avx2,
    .absmax_bf16 = sl_absmax_bf16_avx2,
    .absmax_f16 = sl_absmax_f16_avx2,
    .absmax_each = sl_absmax_each_avx2,
    .to_int8 = sl_f32_to_int8_avx2,
    .to_int8_each = sl_f32_to_int8_each_avx2,
};

/* ---- f32 to blocks ---- */

/* Lane k of the result is the largest lane of argument k. */
TARGET static __m128i largest_of_each(__m256i v0, __m256i v1, __m256i v2, __m256i v3) {
    __m256i a = _mm256_max_epi32(_mm256_unpacklo_epi32(v0, v1), _mm256_unpackhi_epi32(v0, v1));
    __m256i b = _mm256_max_epi32(_mm256_unpacklo_epi32(v2, v3), _mm256_unpackhi_epi32(v2, v3));
    __m256i c = _mm256_max_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    return _mm_max_epi32(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
}

TARGET static __m128i largest_of_each_unsigned(__m256i v0, __m256i v1, __m256i v2, __m256i v3) {
    __m256i a = _mm256_max_epu32(_mm256_unpacklo_epi32(v0, v1), _mm256_unpackhi_epi32(v0, v1));
    __m256i b = _mm256_max_epu32(_mm256_unpacklo_epi32(v2, v3), _mm256_unpackhi_epi32(v2, v3));
    __m256i c = _mm256_max_epu32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    return _mm_max_epu32(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
}

TARGET static __m256i absmax_lanes(const uint8_t *x) {
    __m256i a = _mm256_max_epi32(bits_of_abs(load_bits(x, 0)), bits_of_abs(load_bits(x, 1)));
    __m256i b = _mm256_max_epi32(bits_of_abs(load_bits(x, 2)), bits_of_abs(load_bits(x, 3)));
    return _mm256_max_epi32(a, b);
}

/* Returns the bits of the largest |x| of each of four blocks. */
TARGET static __m128i absmax_of_blocks(const uint8_t *in) {
    return largest_of_each(absmax_lanes(in), absmax_lanes(in + BLOCK), absmax_lanes(in + 2 * BLOCK),
                           absmax_lanes(in + 3 * BLOCK));
}

/* Returns the low bytes of 16 words in [0, 255], which packs leaves in the order 0-3, 8-11 | 4-7, 12-15. */
TARGET static __m128i bytes_of_words(__m256i words) {
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    return _mm_shuffle_epi32(bytes, 0xd8);
}

TARGET static __m256i scaled(const uint8_t *in, int k, __m256 inverse) {
    return round_away(_mm256_mul_ps(load_f32(in, k), inverse));
}

/* |x * inverse| < 7.5 in every block that gets here, so clamping is not needed. */
TARGET static __m128i nibbles_absmax(const uint8_t *in, __m256 inverse) {
    __m256i low = _mm256_packs_epi32(scaled(in, 0, inverse), scaled(in, 1, inverse));
    __m256i high = _mm256_packs_epi32(scaled(in, 2, inverse), scaled(in, 3, inverse));
    __m256i both = _mm256_add_epi16(low, _mm256_slli_epi16(high, 4));
    return bytes_of_words(_mm256_add_epi16(both, _mm256_set1_epi16(8 + 8 * 16)));
}

TARGET static void store_absmax(uint8_t *codes, const uint8_t *in, __m256 inverse) {
    _mm_storeu_si128((__m128i *)codes, nibbles_absmax(in, inverse));
}

BLOCK_QUANTIZER(sl_f32_to_q4_0_absmax_avx2, sl_q4_0, SL_Q4_0_ABSMAX, absmax_of_blocks, scales_absmax, store_absmax)

TARGET static __m256i most_positive(const uint8_t *x) {
    return _mm256_max_epi32(_mm256_max_epi32(load_bits(x, 0), load_bits(x, 1)),
                            _mm256_max_epi32(load_bits(x, 2), load_bits(x, 3)));
}

TARGET static __m256i most_negative(const uint8_t *x) {
    return _mm256_max_epu32(_mm256_max_epu32(load_bits(x, 0), load_bits(x, 1)),
                            _mm256_max_epu32(load_bits(x, 2), load_bits(x, 3)));
}

TARGET static __m128i signed_max_of_blocks(const uint8_t *in) {
    __m128i most = largest_of_each(most_positive(in), most_positive(in + BLOCK), most_positive(in + 2 * BLOCK),
                                   most_positive(in + 3 * BLOCK));
    __m128i lowest = largest_of_each_unsigned(most_negative(in), most_negative(in + BLOCK),
                                              most_negative(in + 2 * BLOCK), most_negative(in + 3 * BLOCK));
    return signed_max(most, lowest, in);
}

/* Returns truncated codes, from 0 to 16. */
TARGET static __m256i truncated(const uint8_t *in, int k, __m256 inverse) {
    return _mm256_cvttps_epi32(_mm256_add_ps(_mm256_mul_ps(load_f32(in, k), inverse), _mm256_set1_ps(8.5f)));
}

TARGET static __m128i nibbles_ggml(const uint8_t *in, __m256 inverse) {
    const __m256i most = _mm256_set1_epi16(15);
    __m256i low = _mm256_packs_epi32(truncated(in, 0, inverse), truncated(in, 1, inverse));
    __m256i high = _mm256_packs_epi32(truncated(in, 2, inverse), truncated(in, 3, inverse));
    low = _mm256_min_epi16(low, most);
    high = _mm256_min_epi16(high, most);
    return bytes_of_words(_mm256_or_si256(low, _mm256_slli_epi16(high, 4)));
}

TARGET static void store_ggml(uint8_t *codes, const uint8_t *in, __m256 inverse) {
    _mm_storeu_si128((__m128i *)codes, nibbles_ggml(in, inverse));
}

BLOCK_QUANTIZER(sl_f32_to_q4_0_avx2, sl_q4_0, SL_Q4_0, signed_max_of_blocks, scales_ggml, store_ggml)

TARGET static void store_q8_0(int8_t *codes, const uint8_t *in, __m256 inverse) {
    __m256i packed = pack_int8(scaled(in, 0, inverse), scaled(in, 1, inverse), scaled(in, 2, inverse),
                               scaled(in, 3, inverse));
    _mm256_storeu_si256((__m256i *)codes, packed);
}

BLOCK_QUANTIZER(sl_f32_to_q8_0_avx2, sl_q8_0, SL_Q8_0, absmax_of_blocks, scales_q8_0, store_q8_0)

const sl_kernel sl_quant_kernels_avx2[] = {
    {SL_F32, SL_Q4_0_ABSMAX, sl_f32_to_q4_0_absmax_avx2},
    {SL_F32, SL_Q4_0, sl_f32_to_q4_0_avx2},
    {SL_F32, SL_Q8_0, sl_f32_to_q8_0_avx2},
    {-1, -1, NULL},
};

#endif
