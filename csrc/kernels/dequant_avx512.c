/* Dequantization of ggml blocks with AVX-512: sixteen values per register. */
#include "kernels/convert.h"
#include "kernels/isa.h"

#ifdef SL_X86

#define TARGET SL_AVX512
#define KERNEL(type) sl_##type##_to_f32_avx512

#include "kernels/dequant_x86.h"

TARGET SL_INLINE codes spread(uint16_t bits, int8_t weight) { return _mm_maskz_set1_epi8(bits, weight); }

TARGET SL_INLINE __m512 products(codes all, float scale) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(all)), _mm512_set1_ps(scale));
}

TARGET SL_INLINE void put(uint8_t *out, codes all, float scale) { _mm512_storeu_ps(out, products(all, scale)); }

TARGET SL_INLINE void put_plus(uint8_t *out, codes all, float scale, float more) {
    _mm512_storeu_ps(out, _mm512_add_ps(products(all, scale), _mm512_set1_ps(more)));
}

/* A register holds the 16 values that a block can have. */
TARGET SL_INLINE void choose(uint8_t *out, codes all, __m512 values) {
    _mm512_storeu_ps(out, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(all), values));
}

TARGET SL_INLINE void put_nibbles(uint8_t *out, codes all, int8_t bias, float scale) {
    __m512 code = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    choose(out, all, _mm512_mul_ps(_mm512_sub_ps(code, _mm512_set1_ps(bias)), _mm512_set1_ps(scale)));
}

TARGET SL_INLINE void put_from(uint8_t *out, const int8_t table[16], codes all, float scale) {
    choose(out, all, products(codes_at(table), scale));
}

TARGET SL_INLINE void scales_of(float floats[16], codes all, float factor) { put((uint8_t *)floats, all, factor); }

#include "kernels/dequant.h"

const sl_kernel sl_dequant_kernels_avx512[] = {DEQUANT_KERNELS{-1, -1, NULL}};

#endif
