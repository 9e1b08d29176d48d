/* Quantization with AVX2: the largest |x|, int8, blocks. */
#include "kernels/blocks.h"
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

TARGET static void store_absmax(sl_q4_0 *block, const uint8_t *in, __m256 inverse) {
    _mm_storeu_si128((__m128i *)block->codes, nibbles_absmax(in, inverse));
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

/* Returns truncated codes, from 0 to twice zero. */
TARGET static __m256i truncated(const uint8_t *in, int k, __m256 inverse, float zero) {
    return _mm256_cvttps_epi32(_mm256_add_ps(_mm256_mul_ps(load_f32(in, k), inverse), _mm256_set1_ps(zero)));
}

/* Returns the codes of registers k and k + 1, of which there are twice `zero` - 0.5. */
TARGET static __m256i signed_words(const uint8_t *in, int k, __m256 inverse, float zero) {
    __m256i words = _mm256_packs_epi32(truncated(in, k, inverse, zero), truncated(in, k + 1, inverse, zero));
    return _mm256_min_epi16(words, _mm256_set1_epi16((int16_t)(2.0f * zero - 2.0f)));
}

TARGET static __m128i nibbles_ggml(const uint8_t *in, __m256 inverse) {
    __m256i low = signed_words(in, 0, inverse, 8.5f), high = signed_words(in, 2, inverse, 8.5f);
    return bytes_of_words(_mm256_or_si256(low, _mm256_slli_epi16(high, 4)));
}

TARGET static void store_ggml(sl_q4_0 *block, const uint8_t *in, __m256 inverse) {
    _mm_storeu_si128((__m128i *)block->codes, nibbles_ggml(in, inverse));
}

BLOCK_QUANTIZER(sl_f32_to_q4_0_avx2, sl_q4_0, SL_Q4_0, signed_max_of_blocks, scales_ggml, store_ggml)

TARGET static void store_q8_0(sl_q8_0 *block, const uint8_t *in, __m256 inverse) {
    __m256i packed = pack_int8(scaled(in, 0, inverse), scaled(in, 1, inverse), scaled(in, 2, inverse),
                               scaled(in, 3, inverse));
    _mm256_storeu_si256((__m256i *)block->codes, packed);
}

BLOCK_QUANTIZER(sl_f32_to_q8_0_avx2, sl_q8_0, SL_Q8_0, absmax_of_blocks, scales_q8_0, store_q8_0)

TARGET static void store_q5_0(sl_q5_0 *block, const uint8_t *in, __m256 inverse) {
    __m256i first = signed_words(in, 0, inverse, 16.5f), last = signed_words(in, 2, inverse, 16.5f);
    store_fives(block->high, block->codes, bytes_of_words(first), bytes_of_words(last));
}

BLOCK_QUANTIZER(sl_f32_to_q5_0_avx2, sl_q5_0, SL_Q5_0, signed_max_of_blocks, scales_q5_0, store_q5_0)

TARGET static __m256 least_lanes(const uint8_t *x) {
    return _mm256_min_ps(_mm256_min_ps(load_f32(x, 0), load_f32(x, 1)), _mm256_min_ps(load_f32(x, 2), load_f32(x, 3)));
}

TARGET static __m256 most_lanes(const uint8_t *x) {
    return _mm256_max_ps(_mm256_max_ps(load_f32(x, 0), load_f32(x, 1)), _mm256_max_ps(load_f32(x, 2), load_f32(x, 3)));
}

/* Lane k of the result is the least lane of argument k. */
TARGET static __m128 least_of_each(__m256 v0, __m256 v1, __m256 v2, __m256 v3) {
    __m256 a = _mm256_min_ps(_mm256_unpacklo_ps(v0, v1), _mm256_unpackhi_ps(v0, v1));
    __m256 b = _mm256_min_ps(_mm256_unpacklo_ps(v2, v3), _mm256_unpackhi_ps(v2, v3));
    __m256 c = _mm256_min_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
    return _mm_min_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1));
}

TARGET static __m128 most_of_each(__m256 v0, __m256 v1, __m256 v2, __m256 v3) {
    __m256 a = _mm256_max_ps(_mm256_unpacklo_ps(v0, v1), _mm256_unpackhi_ps(v0, v1));
    __m256 b = _mm256_max_ps(_mm256_unpacklo_ps(v2, v3), _mm256_unpackhi_ps(v2, v3));
    __m256 c = _mm256_max_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
    return _mm_max_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1));
}

TARGET static four_ranges ranges_of_blocks(const uint8_t *in) {
    four_ranges out = {
        least_of_each(least_lanes(in), least_lanes(in + BLOCK), least_lanes(in + 2 * BLOCK),
                      least_lanes(in + 3 * BLOCK)),
        most_of_each(most_lanes(in), most_lanes(in + BLOCK), most_lanes(in + 2 * BLOCK), most_lanes(in + 3 * BLOCK)),
        absmax_of_blocks(in)};
    return out;
}

/* Returns the codes of registers k and k + 1. */
TARGET static __m256i range_words(const uint8_t *in, int k, __m256 least, __m256 inverse) {
    const __m256 half = _mm256_set1_ps(0.5f);
    __m256 low = _mm256_mul_ps(_mm256_sub_ps(load_f32(in, k), least), inverse);
    __m256 high = _mm256_mul_ps(_mm256_sub_ps(load_f32(in, k + 1), least), inverse);
    return _mm256_packs_epi32(_mm256_cvttps_epi32(_mm256_add_ps(low, half)),
                              _mm256_cvttps_epi32(_mm256_add_ps(high, half)));
}

TARGET static void store_q4_1(sl_q4_1 *block, const uint8_t *in, __m256 least, __m256 inverse) {
    const __m256i most = _mm256_set1_epi16(15);
    __m256i low = _mm256_min_epi16(range_words(in, 0, least, inverse), most);
    __m256i high = _mm256_min_epi16(range_words(in, 2, least, inverse), most);
    __m256i both = _mm256_or_si256(low, _mm256_slli_epi16(high, 4));
    _mm_storeu_si128((__m128i *)block->codes, bytes_of_words(both));
}

RANGE_QUANTIZER(sl_f32_to_q4_1_avx2, sl_q4_1, SL_Q4_1, scales_q4_1, store_q4_1)

TARGET static void store_q5_1(sl_q5_1 *block, const uint8_t *in, __m256 least, __m256 inverse) {
    __m256i first = range_words(in, 0, least, inverse), last = range_words(in, 2, least, inverse);
    store_fives(block->high, block->codes, bytes_of_words(first), bytes_of_words(last));
}

RANGE_QUANTIZER(sl_f32_to_q5_1_avx2, sl_q5_1, SL_Q5_1, scales_q5_1, store_q5_1)

/* ---- ternary ---- */

/* Sets the scale of a super-block and its inverse, 0 if there is none. Returns false if an element is not finite. */
TARGET static bool ternary_scale(const uint8_t *x, uint8_t *d, __m256 *inverse) {
    uint32_t absmax = sl_absmax_f32_avx2(x, SL_SUPER);
    __m128 scale = _mm_castsi128_ps(_mm_cvtsi32_si128((int)absmax));
    float inverses[4];
    uint16_t half = (uint16_t)_mm_cvtsi128_si32(_mm_cvtps_ph(scale, _MM_FROUND_TO_NEAREST_INT));
    memcpy(d, &half, sizeof half);
    store_inverses(inverses, scale, invertible(scale));
    *inverse = _mm256_set1_ps(inverses[0]);
    return absmax < SL_F32_INFINITY;
}

/* Returns the codes of 32 elements. */
TARGET static __m256i ternary_codes(const uint8_t *x, size_t k, __m256 inverse) {
    const uint8_t *in = x + BLOCK * k;
    __m256i codes = pack_int8(scaled(in, 0, inverse), scaled(in, 1, inverse), scaled(in, 2, inverse),
                              scaled(in, 3, inverse));
    return _mm256_add_epi8(codes, _mm256_set1_epi8(1));
}

TARGET static void sl_f32_to_tq2_0_avx2(const void *source, void *destination, size_t count) {
    sl_tq2_0 *block = destination;
    for (size_t b = 0; b < count / SL_SUPER; b++, block++) {
        const uint8_t *x = (const uint8_t *)source + 4 * SL_SUPER * b;
        __m256 inverse;
        if (!ternary_scale(x, block->d, &inverse)) {
            sl_convert_rest(SL_F32, SL_TQ2_0, x, block, SL_SUPER);
            continue;
        }
        for (size_t half = 0; half < 2; half++) {
            __m256i bytes = ternary_codes(x, 4 * half + 3, inverse);
            for (size_t k = 3; k-- > 0;)
                bytes = _mm256_or_si256(_mm256_slli_epi16(bytes, 2), ternary_codes(x, 4 * half + k, inverse));
            _mm256_storeu_si256((__m256i *)(block->codes + 32 * half), bytes);
        }
    }
}

/* Returns 3 * number + code, at most 242. */
TARGET static __m256i with_digit(__m256i number, __m256i code) {
    return _mm256_add_epi8(_mm256_add_epi8(number, number), _mm256_add_epi8(number, code));
}

/* Returns words of number / 243 * 256, rounded up: (256 * number + 242) / 243. 34522 is 2^23 / 243, rounded up. */
TARGET static __m256i ternary_words(__m256i numbers) {
    __m256i above = _mm256_add_epi16(_mm256_mullo_epi16(numbers, _mm256_set1_epi16(13)), _mm256_set1_epi16(242));
    __m256i quotient = _mm256_srli_epi16(_mm256_mulhi_epu16(above, _mm256_set1_epi16((int16_t)34522)), 7);
    return _mm256_add_epi16(numbers, quotient);
}

TARGET static __m256i ternary_bytes(__m256i numbers) {
    const __m256i zero = _mm256_setzero_si256();
    return _mm256_packus_epi16(ternary_words(_mm256_unpacklo_epi8(numbers, zero)),
                               ternary_words(_mm256_unpackhi_epi8(numbers, zero)));
}

TARGET static void sl_f32_to_tq1_0_avx2(const void *source, void *destination, size_t count) {
    sl_tq1_0 *block = destination;
    for (size_t b = 0; b < count / SL_SUPER; b++, block++) {
        const uint8_t *x = (const uint8_t *)source + 4 * SL_SUPER * b;
        __m256 inverse;
        if (!ternary_scale(x, block->d, &inverse)) {
            sl_convert_rest(SL_F32, SL_TQ1_0, x, block, SL_SUPER);
            continue;
        }
        __m256i number = ternary_codes(x, 0, inverse), codes[3];
        for (size_t k = 1; k < 5; k++) number = with_digit(number, ternary_codes(x, k, inverse));
        _mm256_storeu_si256((__m256i *)block->codes, ternary_bytes(number));
        for (size_t k = 0; k < 3; k++) codes[k] = ternary_codes(x, 5 + k, inverse);
        /* In the low half the elements from 160 on, 16 apart; in the high half the last 16. */
        number = _mm256_permute2x128_si256(codes[0], codes[2], 0x30);
        __m256i second = _mm256_permute2x128_si256(codes[0], codes[2], 0x31);
        number = _mm256_blend_epi32(number, _mm256_shuffle_epi32(second, 0x00), 0xf0);
        number = with_digit(number, _mm256_blend_epi32(_mm256_permute2x128_si256(codes[0], codes[0], 0x11),
                                                       _mm256_shuffle_epi32(second, 0x55), 0xf0));
        number = with_digit(number, _mm256_blend_epi32(codes[1], _mm256_shuffle_epi32(second, 0xaa), 0xf0));
        number = with_digit(number, _mm256_blend_epi32(_mm256_permute2x128_si256(codes[1], codes[1], 0x11),
                                                       _mm256_shuffle_epi32(second, 0xff), 0xf0));
        number = with_digit(number, _mm256_blend_epi32(codes[2], _mm256_setzero_si256(), 0xf0));
        __m256i bytes = ternary_bytes(number);
        _mm_storeu_si128((__m128i *)(block->codes + 32), _mm256_castsi256_si128(bytes));
        int32_t last = _mm_cvtsi128_si32(_mm256_extracti128_si256(bytes, 1));
        memcpy(block->last, &last, sizeof last);
    }
}

const sl_kernel sl_quant_kernels_avx2[] = {
    {SL_F32, SL_Q4_0_ABSMAX, sl_f32_to_q4_0_absmax_avx2},
    {SL_F32, SL_Q4_0, sl_f32_to_q4_0_avx2},
    {SL_F32, SL_Q8_0, sl_f32_to_q8_0_avx2},
    {SL_F32, SL_Q4_1, sl_f32_to_q4_1_avx2},
    {SL_F32, SL_Q5_0, sl_f32_to_q5_0_avx2},
    {SL_F32, SL_Q5_1, sl_f32_to_q5_1_avx2},
    {SL_F32, SL_TQ1_0, sl_f32_to_tq1_0_avx2},
    {SL_F32, SL_TQ2_0, sl_f32_to_tq2_0_avx2},
    {-1, -1, NULL},
};

#endif
