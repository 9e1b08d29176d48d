/* Conversions with AVX2. The scalar kernel converts the remainder of a length. */
#include "kernels/convert_lanes.h"
#include "kernels/isa.h"

#ifdef SL_X86

#define TARGET SL_AVX2

/* 16 elements: two registers of results. */
#define STEP ((size_t)16)

TARGET static __m256i load8_u16(const uint8_t *source) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)source));
}

TARGET static __m256i quiet(__m256i bits) {
    __m256 value = _mm256_castsi256_ps(bits);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_or_si256(bits, _mm256_and_si256(nan, _mm256_set1_epi32(0x00400000)));
}

TARGET SL_INLINE void bf16_to_f32(const uint8_t *in, uint8_t *out) {
    __m256i low = _mm256_slli_epi32(load8_u16(in), 16);
    __m256i high = _mm256_slli_epi32(load8_u16(in + 16), 16);
    _mm256_storeu_si256((__m256i *)out, quiet(low));
    _mm256_storeu_si256((__m256i *)(out + 32), quiet(high));
}

CONVERSION(sl_bf16_to_f32_avx2, bf16_to_f32, STEP, SL_BF16, 2, SL_F32, 4)

TARGET SL_INLINE void f16_to_f32(const uint8_t *in, uint8_t *out) {
    _mm256_storeu_ps((float *)out, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)in)));
    _mm256_storeu_ps((float *)(out + 32), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + 16))));
}

CONVERSION(sl_f16_to_f32_avx2, f16_to_f32, STEP, SL_F16, 2, SL_F32, 4)

/* Replaces NaN lanes of `value` by the canonical NaN with the sign of `value`. */
TARGET static __m256 one_nan(__m256 value) {
    __m256 nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    __m256i sign = _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32((int)0x80000000u));
    return _mm256_blendv_ps(value, _mm256_castsi256_ps(_mm256_or_si256(sign, _mm256_set1_epi32(0x7fc00000))), nan);
}

/* e5m2 is the upper byte of an f16. */
TARGET SL_INLINE void f8_e5m2_to_f32(const uint8_t *in, uint8_t *out) {
    __m128i codes = _mm_loadu_si128((const __m128i *)in), zero = _mm_setzero_si128();
    __m256 low = _mm256_cvtph_ps(_mm_unpacklo_epi8(zero, codes)),
           high = _mm256_cvtph_ps(_mm_unpackhi_epi8(zero, codes));
    _mm256_storeu_ps((float *)out, one_nan(low));
    _mm256_storeu_ps((float *)(out + 32), one_nan(high));
}

CONVERSION(sl_f8_e5m2_to_f32_avx2, f8_e5m2_to_f32, STEP, SL_F8_E5M2, 1, SL_F32, 4)

/* e4m3 with its bits moved to their places in an f16 is exactly 2^-8 times the value, subnormals included (bias 15
 * instead of 7), except that the code of all ones is then not a NaN. */
TARGET static __m256 e4m3_from_words(__m128i words) {
    __m128i sign = _mm_and_si128(_mm_slli_epi16(words, 8), _mm_set1_epi16((short)0x8000));
    __m128i magnitude = _mm_and_si128(words, _mm_set1_epi16(0x7f));
    __m256 value = _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(sign, _mm_slli_epi16(magnitude, 7))),
                                 _mm256_set1_ps(256.0f));
    __m256i nan = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f)));
    __m256i bits = _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32((int)0x80000000u));
    bits = _mm256_or_si256(bits, _mm256_set1_epi32(0x7fc00000));
    return _mm256_blendv_ps(value, _mm256_castsi256_ps(bits), _mm256_castsi256_ps(nan));
}

TARGET SL_INLINE void f8_e4m3_to_f32(const uint8_t *in, uint8_t *out) {
    __m128i codes = _mm_loadu_si128((const __m128i *)in);
    _mm256_storeu_ps((float *)out, e4m3_from_words(_mm_cvtepu8_epi16(codes)));
    _mm256_storeu_ps((float *)(out + 32), e4m3_from_words(_mm_cvtepu8_epi16(_mm_srli_si128(codes, 8))));
}

CONVERSION(sl_f8_e4m3_to_f32_avx2, f8_e4m3_to_f32, STEP, SL_F8_E4M3, 1, SL_F32, 4)

TARGET static __m256i e8m0_lanes(__m128i codes) {
    const __m256i nan = _mm256_set1_epi32(0x7fc00000), least = _mm256_set1_epi32(0x00400000);
    __m256i own = _mm256_cvtepu8_epi32(codes), is_nan = _mm256_cmpeq_epi32(own, _mm256_set1_epi32(255));
    return _mm256_blendv_epi8(_mm256_max_epi32(_mm256_slli_epi32(own, 23), least), nan, is_nan);
}

TARGET SL_INLINE void f8_e8m0_to_f32(const uint8_t *in, uint8_t *out) {
    __m128i codes = _mm_loadu_si128((const __m128i *)in);
    _mm256_storeu_si256((__m256i *)out, e8m0_lanes(codes));
    _mm256_storeu_si256((__m256i *)(out + 32), e8m0_lanes(_mm_srli_si128(codes, 8)));
}

CONVERSION(sl_f8_e8m0_to_f32_avx2, f8_e8m0_to_f32, STEP, SL_F8_E8M0, 1, SL_F32, 4)

TARGET SL_INLINE void i8_to_f32(const uint8_t *in, uint8_t *out) {
    __m128i codes = _mm_loadu_si128((const __m128i *)in);
    _mm256_storeu_ps((float *)out, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)));
    _mm256_storeu_ps((float *)(out + 32), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8))));
}

CONVERSION(sl_i8_to_f32_avx2, i8_to_f32, STEP, SL_I8, 1, SL_F32, 4)

TARGET SL_INLINE void u8_to_f32(const uint8_t *in, uint8_t *out) {
    __m128i codes = _mm_loadu_si128((const __m128i *)in);
    _mm256_storeu_ps((float *)out, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes)));
    _mm256_storeu_ps((float *)(out + 32), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8))));
}

CONVERSION(sl_u8_to_f32_avx2, u8_to_f32, STEP, SL_U8, 1, SL_F32, 4)

TARGET SL_INLINE void f32_to_f16(const uint8_t *in, uint8_t *out) {
    __m128i low = _mm256_cvtps_ph(_mm256_loadu_ps((const float *)in), _MM_FROUND_TO_NEAREST_INT);
    __m128i high = _mm256_cvtps_ph(_mm256_loadu_ps((const float *)(in + 32)), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i *)out, low);
    _mm_storeu_si128((__m128i *)(out + 16), high);
}

CONVERSION(sl_f32_to_f16_avx2, f32_to_f16, STEP, SL_F32, 4, SL_F16, 2)

/* Eight results, in the low halves of the lanes. */
TARGET static __m256i round_to_bf16(__m256 value) {
    __m256i bits = _mm256_castps_si256(value);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi32((int)0x80000000u)),
                                  _mm256_set1_epi32(0x7fc00000));
    __m256 is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    __m256 chosen = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(nan), is_nan);
    return _mm256_srli_epi32(_mm256_castps_si256(chosen), 16);
}

TARGET SL_INLINE void f32_to_bf16(const uint8_t *in, uint8_t *out) {
    __m256i low = round_to_bf16(_mm256_loadu_ps((const float *)in));
    __m256i high = round_to_bf16(_mm256_loadu_ps((const float *)(in + 32)));
    /* packus works within 128-bit lanes; the permutation restores the order of the quarters. */
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    _mm256_storeu_si256((__m256i *)out, packed);
}

CONVERSION(sl_f32_to_bf16_avx2, f32_to_bf16, STEP, SL_F32, 4, SL_BF16, 2)

const sl_kernel sl_kernels_avx2[] = {
    {SL_BF16, SL_F32, sl_bf16_to_f32_avx2},       {SL_F16, SL_F32, sl_f16_to_f32_avx2},
    {SL_F8_E4M3, SL_F32, sl_f8_e4m3_to_f32_avx2}, {SL_F8_E5M2, SL_F32, sl_f8_e5m2_to_f32_avx2},
    {SL_F8_E8M0, SL_F32, sl_f8_e8m0_to_f32_avx2}, {SL_I8, SL_F32, sl_i8_to_f32_avx2},
    {SL_U8, SL_F32, sl_u8_to_f32_avx2},           {SL_F32, SL_F16, sl_f32_to_f16_avx2},
    {SL_F32, SL_BF16, sl_f32_to_bf16_avx2},       {-1, -1, NULL},
};

#endif
