/* Conversions with AVX-512, only if it is clearly faster than AVX2 with the data in cache; otherwise memory limits
 * both. */
#include "kernels/convert_lanes.h"
#include "kernels/isa.h"

#ifdef SL_X86

#define TARGET SL_AVX512

/* 32 elements: two registers of results. */
#define STEP ((size_t)32)

TARGET static __m512i bf16_lanes(const uint8_t *source) {
    __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)source)), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(bits), _mm512_castsi512_ps(bits), _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(bits, nan, bits, _mm512_set1_epi32(0x00400000));
}

TARGET SL_INLINE void bf16_to_f32(const uint8_t *in, uint8_t *out) {
    _mm512_storeu_si512(out, bf16_lanes(in));
    _mm512_storeu_si512(out + 64, bf16_lanes(in + 32));
}

CONVERSION(sl_bf16_to_f32_avx512, bf16_to_f32, STEP, SL_BF16, 2, SL_F32, 4)

TARGET SL_INLINE void f16_to_f32(const uint8_t *in, uint8_t *out) {
    _mm512_storeu_ps(out, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)in)));
    _mm512_storeu_ps(out + 64, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(in + 32))));
}

CONVERSION(sl_f16_to_f32_avx512, f16_to_f32, STEP, SL_F16, 2, SL_F32, 4)

TARGET static __m256i f16_lanes(const uint8_t *source) {
    return _mm512_cvtps_ph(_mm512_loadu_ps(source), _MM_FROUND_TO_NEAREST_INT);
}

TARGET SL_INLINE void f32_to_f16(const uint8_t *in, uint8_t *out) {
    _mm256_storeu_si256((__m256i *)out, f16_lanes(in));
    _mm256_storeu_si256((__m256i *)(out + 32), f16_lanes(in + 64));
}

CONVERSION(sl_f32_to_f16_avx512, f32_to_f16, STEP, SL_F32, 4, SL_F16, 2)

TARGET static __m256i round_to_bf16(const uint8_t *source) {
    __m512i bits = _mm512_loadu_si512(source);
    __mmask16 nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(bits), _mm512_castsi512_ps(bits), _CMP_UNORD_Q);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m512i sign = _mm512_and_si512(bits, _mm512_set1_epi32((int)0x80000000u));
    rounded = _mm512_mask_or_epi32(rounded, nan, sign, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

TARGET SL_INLINE void f32_to_bf16(const uint8_t *in, uint8_t *out) {
    _mm256_storeu_si256((__m256i *)out, round_to_bf16(in));
    _mm256_storeu_si256((__m256i *)(out + 32), round_to_bf16(in + 64));
}

CONVERSION(sl_f32_to_bf16_avx512, f32_to_bf16, STEP, SL_F32, 4, SL_BF16, 2)

const sl_kernel sl_kernels_avx512[] = {
    {SL_BF16, SL_F32, sl_bf16_to_f32_avx512},
    {SL_F16, SL_F32, sl_f16_to_f32_avx512},
    {SL_F32, SL_F16, sl_f32_to_f16_avx512},
    {SL_F32, SL_BF16, sl_f32_to_bf16_avx512},
    {-1, -1, NULL},
};

#endif
