/* Quantization to K-quants, types with tables, and types with importance with AVX2. */
#include "kernels/convert.h"
#include "kernels/isa.h"

#ifdef SL_X86

#define TARGET SL_AVX2
#define KERNEL(type) sl_f32_to_##type##_avx2
#define WEIGHTED(type) sl_weighted_##type##_avx2

#define LANES 8
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
#define least_of(a, b) _mm256_min_ps(a, b)
#define most_of(a, b) _mm256_max_ps(a, b)
#define size_of(a) _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a)
#define below(a, b) _mm256_cmp_ps(a, b, _CMP_LT_OQ)
#define same(a, b) _mm256_cmp_ps(a, b, _CMP_EQ_OQ)
#define both(p, q) _mm256_and_ps(p, q)
#define either(p, q) _mm256_or_ps(p, q)
#define all_true(p) (_mm256_movemask_ps(p) == 0xff)
#define any_true(p) (_mm256_movemask_ps(p) != 0)
#define choose(p, a, b) _mm256_blendv_ps(b, a, p)

TARGET static inline __m256 nearest(__m256 values) {
    __m256i bits = _mm256_castps_si256(_mm256_add_ps(values, _mm256_set1_ps(12582912.0f)));
    bits = _mm256_and_si256(bits, _mm256_set1_epi32(0x007fffff));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(bits, _mm256_set1_epi32(0x00400000)));
}

TARGET static inline void put_bytes(uint8_t *out, __m256 values) {
    __m256i words = _mm256_cvttps_epi32(values);
    __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64((__m128i *)(void *)out, _mm_packus_epi16(halves, halves));
}

#define OWN_TRANSPOSED

/* Transposes 8 x 8 elements: register k of the result has element k of each run. */
TARGET static inline void transpose_eight(const uint8_t *x, size_t length, __m256 *out) {
    __m256 row[8], pair[8];
    for (size_t k = 0; k < 8; k++) row[k] = _mm256_loadu_ps((const float *)(const void *)(x + 4 * length * k));
    for (size_t k = 0; k < 8; k += 2) {
        pair[k] = _mm256_unpacklo_ps(row[k], row[k + 1]);
        pair[k + 1] = _mm256_unpackhi_ps(row[k], row[k + 1]);
    }
    for (size_t k = 0; k < 8; k += 4)
        for (size_t i = 0; i < 2; i++) {
            row[k + 2 * i] = _mm256_shuffle_ps(pair[k + i], pair[k + i + 2], 0x44);
            row[k + 2 * i + 1] = _mm256_shuffle_ps(pair[k + i], pair[k + i + 2], 0xee);
        }
    for (size_t k = 0; k < 4; k++) {
        out[k] = _mm256_permute2f128_ps(row[k], row[k + 4], 0x20);
        out[k + 4] = _mm256_permute2f128_ps(row[k], row[k + 4], 0x31);
    }
}

TARGET static inline void transposed(const uint8_t *x, size_t length, __m256 *runs) {
    for (size_t i = 0; i < length; i += 8) transpose_eight(x + 4 * i, length, runs + i);
}

#include "kernels/quant_blocks.h"
#include "kernels/quant_k.h"

const sl_kernel sl_quant_k_kernels_avx2[] = {QUANT_K_KERNELS QUANT_BLOCK_KERNELS{-1, -1, NULL}};

const sl_weighted_kernel sl_weighted_avx2[] = {WEIGHTED_K_KERNELS WEIGHTED_BLOCK_KERNELS{-1, NULL}};

#endif
