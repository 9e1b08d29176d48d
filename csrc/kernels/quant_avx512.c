/* Quantization with AVX-512, only if it is clearly faster than AVX2 with the data in cache; otherwise memory is the
 * limit. quant_avx2.c explains the rest. */
#include "kernels/quant_x86.h"

#ifdef SL_X86

#define TARGET SL_AVX512
#define SPLAT _mm512_set1_ps

/* Half of a block. */
TARGET static __m512 load_f32(const uint8_t *source, int k) { return _mm512_loadu_ps(source + 64 * k); }

TARGET static __m512i load_bits(const uint8_t *source, int k) { return _mm512_loadu_si512(source + 64 * k); }

/* ---- int8 ---- */

/* Rounds half away from zero; values out of range, of either sign, become 0x80000000. 0xf8: a | (b & c). */
TARGET static __m512i round_away(__m512 value) {
    __m512i half = _mm512_castps_si512(_mm512_set1_ps(SL_BELOW_HALF)), sign = _mm512_set1_epi32((int)0x80000000u);
    half = _mm512_ternarylogic_epi32(half, _mm512_castps_si512(value), sign, 0xf8);
    return _mm512_cvttps_epi32(_mm512_add_ps(value, _mm512_castsi512_ps(half)));
}

/* Like int8_codes in quant_avx2.c. */
TARGET static __m128i int8_codes(__m512 value) {
    return _mm512_cvtsepi32_epi8(round_away(_mm512_min_ps(value, _mm512_set1_ps(127.0f))));
}

TARGET static void sl_f32_to_int8_avx512(const void *source, int8_t *destination, size_t count, float factor) {
    const uint8_t *in = source;
    __m512 all = _mm512_set1_ps(factor);
    size_t i = 0;
    for (; i + 16 <= count; i += 16)
        _mm_storeu_si128((__m128i *)(destination + i), int8_codes(_mm512_mul_ps(load_f32(in + 4 * i, 0), all)));
    sl_quant_scalar.to_int8(in + 4 * i, destination + i, count - i, factor);
}

TARGET static void sl_f32_to_int8_each_avx512(const void *source, int8_t *destination, size_t count,
                                              const float *factors) {
    const uint8_t *in = source;
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m512 value = _mm512_mul_ps(load_f32(in + 4 * i, 0), _mm512_loadu_ps(factors + i));
        _mm_storeu_si128((__m128i *)(destination + i), int8_codes(value));
    }
    sl_quant_scalar.to_int8_each(in + 4 * i, destination + i, count - i, factors + i);
}

const sl_quant sl_quant_avx512 = {
    .to_int8 = sl_f32_to_int8_avx512,
    .to_int8_each = sl_f32_to_int8_each_avx512,
};

/* ---- f32 to blocks ---- */

/* Lane k of the result is the largest lane of argument k. */
TARGET static __m128i largest_of_each(__m512i v0, __m512i v1, __m512i v2, __m512i v3) {
    __m512i a = _mm512_max_epi32(_mm512_unpacklo_epi32(v0, v1), _mm512_unpackhi_epi32(v0, v1));
    __m512i b = _mm512_max_epi32(_mm512_unpacklo_epi32(v2, v3), _mm512_unpackhi_epi32(v2, v3));
    __m512i c = _mm512_max_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    __m256i d = _mm256_max_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
    return _mm_max_epi32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));
}

TARGET static __m128i largest_of_each_unsigned(__m512i v0, __m512i v1, __m512i v2, __m512i v3) {
    __m512i a = _mm512_max_epu32(_mm512_unpacklo_epi32(v0, v1), _mm512_unpackhi_epi32(v0, v1));
    __m512i b = _mm512_max_epu32(_mm512_unpacklo_epi32(v2, v3), _mm512_unpackhi_epi32(v2, v3));
    __m512i c = _mm512_max_epu32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    __m256i d = _mm256_max_epu32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
    return _mm_max_epu32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1));
}

TARGET static __m512i bits_of_abs(__m512i bits) { return _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)); }

TARGET static __m512i absmax_lanes(const uint8_t *x) {
    return _mm512_max_epi32(bits_of_abs(load_bits(x, 0)), bits_of_abs(load_bits(x, 1)));
}

TARGET static __m128i absmax_of_blocks(const uint8_t *in) {
    return largest_of_each(absmax_lanes(in), absmax_lanes(in + BLOCK), absmax_lanes(in + 2 * BLOCK),
                           absmax_lanes(in + 3 * BLOCK));
}

TARGET static __m512i scaled(const uint8_t *in, int k, __m512 inverse) {
    return round_away(_mm512_mul_ps(load_f32(in, k), inverse));
}

TARGET static __m128i nibbles_absmax(const uint8_t *in, __m512 inverse) {
    __m512i both = _mm512_add_epi32(scaled(in, 0, inverse), _mm512_slli_epi32(scaled(in, 1, inverse), 4));
    return _mm512_cvtepi32_epi8(_mm512_add_epi32(both, _mm512_set1_epi32(8 + 8 * 16)));
}

TARGET static void store_absmax(sl_q4_0 *block, const uint8_t *in, __m512 inverse) {
    _mm_storeu_si128((__m128i *)block->codes, nibbles_absmax(in, inverse));
}

BLOCK_QUANTIZER(sl_f32_to_q4_0_absmax_avx512, sl_q4_0, SL_Q4_0_ABSMAX, absmax_of_blocks, scales_absmax, store_absmax)

TARGET static __m512i most_positive(const uint8_t *x) { return _mm512_max_epi32(load_bits(x, 0), load_bits(x, 1)); }

TARGET static __m512i most_negative(const uint8_t *x) { return _mm512_max_epu32(load_bits(x, 0), load_bits(x, 1)); }

TARGET static __m128i signed_max_of_blocks(const uint8_t *in) {
    __m128i most = largest_of_each(most_positive(in), most_positive(in + BLOCK), most_positive(in + 2 * BLOCK),
                                   most_positive(in + 3 * BLOCK));
    __m128i lowest = largest_of_each_unsigned(most_negative(in), most_negative(in + BLOCK),
                                              most_negative(in + 2 * BLOCK), most_negative(in + 3 * BLOCK));
    return signed_max(most, lowest, in);
}

TARGET static __m512i truncated(const uint8_t *in, int k, __m512 inverse) {
    __m512 value = _mm512_add_ps(_mm512_mul_ps(load_f32(in, k), inverse), _mm512_set1_ps(8.5f));
    return _mm512_min_epi32(_mm512_cvttps_epi32(value), _mm512_set1_epi32(15));
}

TARGET static __m128i nibbles_ggml(const uint8_t *in, __m512 inverse) {
    __m512i high = _mm512_slli_epi32(truncated(in, 1, inverse), 4);
    return _mm512_cvtepi32_epi8(_mm512_or_si512(truncated(in, 0, inverse), high));
}

TARGET static void store_ggml(sl_q4_0 *block, const uint8_t *in, __m512 inverse) {
    _mm_storeu_si128((__m128i *)block->codes, nibbles_ggml(in, inverse));
}

BLOCK_QUANTIZER(sl_f32_to_q4_0_avx512, sl_q4_0, SL_Q4_0, signed_max_of_blocks, scales_ggml, store_ggml)

TARGET static void store_q8_0(sl_q8_0 *block, const uint8_t *in, __m512 inverse) {
    _mm_storeu_si128((__m128i *)block->codes, _mm512_cvtepi32_epi8(scaled(in, 0, inverse)));
    _mm_storeu_si128((__m128i *)(block->codes + 16), _mm512_cvtepi32_epi8(scaled(in, 1, inverse)));
}

BLOCK_QUANTIZER(sl_f32_to_q8_0_avx512, sl_q8_0, SL_Q8_0, absmax_of_blocks, scales_q8_0, store_q8_0)

const sl_kernel sl_quant_kernels_avx512[] = {
    {SL_F32, SL_Q4_0_ABSMAX, sl_f32_to_q4_0_absmax_avx512},
    {SL_F32, SL_Q4_0, sl_f32_to_q4_0_avx512},
    {SL_F32, SL_Q8_0, sl_f32_to_q8_0_avx512},
    {-1, -1, NULL},
};

#endif
