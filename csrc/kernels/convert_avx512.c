/* Conversions with AVX-512, only if it is clearly faster than AVX2 with the data in cache; otherwise memory limits
 * both. */
#include "kernels/convert.h"
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

TARGET static void sl_bf16_to_f32_avx512(const void *source, void *destination, size_t count) {
    const uint8_t *in = source;
    uint8_t *out = destination;
    size_t i = 0;
    for (; i + STEP <= count; i += STEP) {
        _mm512_storeu_si512(out + 4 * i, bf16_lanes(in + 2 * i));
        _mm512_storeu_si512(out + 4 * i + 64, bf16_lanes(in + 2 * i + 32));
    }
    sl_convert_rest(SL_BF16, SL_F32, in + 2 * i, out + 4 * i, count - i);
}

TARGET static void sl_f16_to_f32_avx512(const void *source, void *destination, size_t count) {
    const uint8_t *in = source;
    uint8_t *out = destination;
    size_t i = 0;
    for (; i + STEP <= count; i += STEP) {
        _mm512_storeu_ps(out + 4 * i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(in + 2 * i))));
        _mm512_storeu_ps(out + 4 * i + 64, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(in + 2 * i + 32))));
    }
    sl_convert_rest(SL_F16, SL_F32, in + 2 * i, out + 4 * i, count - i);
}

TARGET static __m256i f16_lanes(const uint8_t *source) {
    return _mm512_cvtps_ph(_mm512_loadu_ps(source), _MM_FROUND_TO_NEAREST_INT);
}

TARGET static void sl_f32_to_f16_avx512(const void *source, void *destination, size_t count) {
    const uint8_t *in = source;
    uint8_t *out = destination;
    size_t i = 0;
    for (; i + STEP <= count; i += STEP) {
        _mm256_storeu_si256((__m256i *)(out + 2 * i), f16_lanes(in + 4 * i));
        _mm256_storeu_si256((__m256i *)(out + 2 * i + 32), f16_lanes(in + 4 * i + 64));
    }
    sl_convert_rest(SL_F32, SL_F16, in + 4 * i, out + 2 * i, count - i);
}

TARGET static __m256i round_to_bf16(const uint8_t *source) {
    __m512i bits = _mm512_loadu_si512(source);
    __mmask16 nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(bits), _mm512_castsi512_ps(bits), _CMP_UNORD_Q);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m512i sign = _mm512_and_si512(bits, _mm512_set1_epi32((int)0x80000000u));
    rounded = _mm512_mask_or_epi32(rounded, nan, sign, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

TARGET static void sl_f32_to_bf16_avx512(const void *source, void *destination, size_t count) {
    const uint8_t *in = source;
    uint8_t *out = destination;
    size_t i = 0;
    for (; i + STEP <= count; i += STEP) {
        _mm256_storeu_si256((__m256i *)(out + 2 * i), round_to_bf16(in + 4 * i));
        _mm256_storeu_si256((__m256i *)(out + 2 * i + 32), round_to_bf16(in + 4 * i + 64));
    }
    sl_convert_rest(SL_F32, SL_BF16, in + 4 * i, out + 2 * i, count - i);
}

const sl_kernel sl_kernels_avx512[] = {
    {SL_BF16, SL_F32, sl_bf16_to_f32_avx512},
    {SL_F16, SL_F32, sl_f16_to_f32_avx512},
    {SL_F32, SL_F16, sl_f32_to_f16_avx512},
    {SL_F32, SL_BF16, sl_f32_to_bf16_avx512},
    {-1, -1, NULL},
};

#endif
