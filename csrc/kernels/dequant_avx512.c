/* Blocks of ggml to f32 with AVX-512: sixteen values in a register. */
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

TARGET SL_INLINE void scales_of(float floats[16], codes all, float factor) { put((uint8_t *)floats, all, factor); }

#include "kernels/dequant.h"

const sl_kernel sl_dequant_kernels_avx512[] = {DEQUANT_KERNELS{-1, -1, NULL}};

#endif
