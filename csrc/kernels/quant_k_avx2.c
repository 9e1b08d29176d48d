/* Quantization to K-quants, types with tables, and types with importance with AVX2. */
#include "kernels/convert.h"
#include "kernels/isa.h"

#ifdef SL_X86

#define TARGET SL_AVX2
#define KERNEL(type) sl_f32_to_##type##_avx2
#define WEIGHTED(type) sl_weighted_##type##_avx2

#define lanes __m256
#define truths __m256
#define all_of(value) _mm256_set1_ps(value)
#define lanes_at(values) _mm256_loadu_ps(values)
#define put(out, values) _mm256_storeu_ps(out, values)
#define plus(a, b) _mm256_add_ps(a, b)
#define minus(a, b) _mm256_sub_ps(a, b)
#define times(a, b) _mm256_mul_ps(a, b)
#define over(a, b) _mm256_div_ps(a, b)
#define root(a) _mm256_sqrt_ps(a)
#define size_of(a) _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a)
#define below(a, b) _mm256_cmp_ps(a, b, _CMP_LT_OQ)
#define same(a, b) _mm256_cmp_ps(a, b, _CMP_EQ_OQ)
#define both(p, q) _mm256_and_ps(p, q)
#define choose(p, a, b) _mm256_blendv_ps(b, a, p)

TARGET static inline __m256 nearest(__m256 values) {
    __m256i bits = _mm256_castps_si256(_mm256_add_ps(values, _mm256_set1_ps(12582912.0f)));
    bits = _mm256_and_si256(bits, _mm256_set1_epi32(0x007fffff));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(bits, _mm256_set1_epi32(0x00400000)));
}

#include "kernels/quant_blocks.h"
#include "kernels/quant_k.h"

const sl_kernel sl_quant_k_kernels_avx2[] = {QUANT_K_KERNELS QUANT_BLOCK_KERNELS{-1, -1, NULL}};

const sl_weighted_kernel sl_weighted_avx2[] = {WEIGHTED_K_KERNELS WEIGHTED_BLOCK_KERNELS{-1, NULL}};

#endif
