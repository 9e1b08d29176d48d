/* Dequantization of ggml blocks with AVX2: eight values per register. */
#include "kernels/convert.h"
#include "kernels/isa.h"

#ifdef SL_X86

#define TARGET SL_AVX2
#define KERNEL(type) sl_##type##_to_f32_avx2

#include "kernels/dequant_x86.h"

TARGET SL_INLINE codes spread(uint16_t bits, int8_t weight) {
    const __m128i byte = _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m128i bit = _mm_set1_epi64x((int64_t)0x8040201008040201);
    __m128i own = _mm_and_si128(_mm_shuffle_epi8(_mm_cvtsi32_si128(bits), byte), bit);
    return _mm_and_si128(_mm_cmpeq_epi8(own, bit), _mm_set1_epi8(weight));
}

/* Multiplies the first eight codes by a scale. */
TARGET SL_INLINE __m256 products(codes all, __m256 scale) {
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(all)), scale);
}

TARGET SL_INLINE void put(uint8_t *out, codes all, float scale) {
    __m256 factor = _mm256_set1_ps(scale);
    _mm256_storeu_ps((float *)(void *)out, products(all, factor));
    _mm256_storeu_ps((float *)(void *)(out + 32), products(_mm_srli_si128(all, 8), factor));
}

TARGET SL_INLINE void put_plus(uint8_t *out, codes all, float scale, float more) {
    __m256 factor = _mm256_set1_ps(scale), constant = _mm256_set1_ps(more);
    _mm256_storeu_ps((float *)(void *)out, _mm256_add_ps(products(all, factor), constant));
    _mm256_storeu_ps((float *)(void *)(out + 32), _mm256_add_ps(products(_mm_srli_si128(all, 8), factor), constant));
}

TARGET SL_INLINE void put_nibbles(uint8_t *out, codes all, int8_t bias, float scale) {
    put(out, less(all, bias), scale);
}

TARGET SL_INLINE void put_from(uint8_t *out, const int8_t table[16], codes all, float scale) {
    put(out, _mm_shuffle_epi8(codes_at(table), all), scale);
}

TARGET SL_INLINE void scales_of(float floats[16], codes all, float factor) { put((uint8_t *)floats, all, factor); }

#include "kernels/dequant.h"

const sl_kernel sl_dequant_kernels_avx2[] = {DEQUANT_KERNELS{-1, -1, NULL}};

#endif
