/* Statistics with AVX2.
 *
 * For f32, a fused multiply-add has the same bits as a multiplication and an addition, because squares of f32 are exact
 * in f64. Squares of f64 are not exact, so their sums use no FMA. */
#include "kernels/isa.h"
#include "kernels/stats_lanes.h"

#ifdef SL_X86

#define TARGET SL_AVX2_FMA

/* The lanes of f32 and narrower elements. */
typedef struct sums {
    __m256d sums[4], squares[4];
    __m256 min, max;
    __m256i zeros;
} sums;

TARGET static inline void start(sums *all) {
    for (int k = 0; k < 4; k++) all->sums[k] = all->squares[k] = _mm256_setzero_pd();
    all->min = _mm256_set1_ps(SL_F32_MAX);
    all->max = _mm256_set1_ps(-SL_F32_MAX);
    all->zeros = _mm256_setzero_si256();
}

TARGET static inline void add_4(sums *all, int k, __m128 values) {
    __m256d x = _mm256_cvtps_pd(values);
    all->sums[k] = _mm256_add_pd(all->sums[k], x);
    all->squares[k] = _mm256_fmadd_pd(x, x, all->squares[k]);
}

/* Adds elements 0 to 7 or 8 to 15 of a step. */
TARGET static inline void add_8(sums *all, int k, __m256 values) {
    all->min = _mm256_min_ps(values, all->min);
    all->max = _mm256_max_ps(values, all->max);
    __m256 zero = _mm256_cmp_ps(values, _mm256_setzero_ps(), _CMP_EQ_OQ);
    all->zeros = _mm256_sub_epi32(all->zeros, _mm256_castps_si256(zero));
    add_4(all, k, _mm256_castps256_ps128(values));
    add_4(all, k + 1, _mm256_extractf128_ps(values, 1));
}

TARGET static void finish(const sums *all, sl_lanes *lanes) {
    float min[8], max[8];
    uint32_t zeros[8];
    for (int k = 0; k < 4; k++) {
        _mm256_storeu_pd(lanes->sums + 4 * k, all->sums[k]);
        _mm256_storeu_pd(lanes->squares + 4 * k, all->squares[k]);
    }
    _mm256_storeu_ps(min, all->min);
    _mm256_storeu_ps(max, all->max);
    _mm256_storeu_si256((__m256i *)zeros, all->zeros);
    lanes->zeros = zeros[0];
    for (int k = 1; k < 8; k++) {
        min[0] = min[k] < min[0] ? min[k] : min[0];
        max[0] = max[k] > max[0] ? max[k] : max[0];
        lanes->zeros += zeros[k];
    }
    lanes->min = (double)min[0];
    lanes->max = (double)max[0];
}

TARGET SL_INLINE void add_f32(sums *all, const uint8_t *in) {
    add_8(all, 0, _mm256_loadu_ps((const float *)in));
    add_8(all, 2, _mm256_loadu_ps((const float *)(in + 32)));
}

LANES_OF(sl_lanes_f32_avx2, add_f32, SL_F32, 4)

TARGET static inline __m256 bf16_values(const uint8_t *in) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)in)), 16));
}

TARGET SL_INLINE void add_bf16(sums *all, const uint8_t *in) {
    add_8(all, 0, bf16_values(in));
    add_8(all, 2, bf16_values(in + 16));
}

LANES_OF(sl_lanes_bf16_avx2, add_bf16, SL_BF16, 2)

TARGET static inline __m256 f16_values(const uint8_t *in) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)in));
}

TARGET SL_INLINE void add_f16(sums *all, const uint8_t *in) {
    add_8(all, 0, f16_values(in));
    add_8(all, 2, f16_values(in + 16));
}

LANES_OF(sl_lanes_f16_avx2, add_f16, SL_F16, 2)

/* Sixteen lanes in four registers. Multiplication and addition are separate, because squares of f64 are not exact. */
SL_AVX2 static void sl_lanes_f64_avx2(const void *source, size_t count, sl_lanes *lanes) {
    const uint8_t *in = source;
    __m256d sum[4], square[4], min = _mm256_set1_pd(SL_F64_MAX), max = _mm256_set1_pd(-SL_F64_MAX);
    __m256i zeros = _mm256_setzero_si256();
    size_t i = 0;
    for (int k = 0; k < 4; k++) sum[k] = square[k] = _mm256_setzero_pd();
    for (; i + SL_STATS_LANES <= count; i += SL_STATS_LANES)
        for (int k = 0; k < 4; k++) {
            __m256d x = _mm256_loadu_pd((const double *)(in + 8 * i + 32 * k));
            min = _mm256_min_pd(x, min);
            max = _mm256_max_pd(x, max);
            zeros = _mm256_sub_epi64(zeros, _mm256_castpd_si256(_mm256_cmp_pd(x, _mm256_setzero_pd(), _CMP_EQ_OQ)));
            sum[k] = _mm256_add_pd(sum[k], x);
            square[k] = _mm256_add_pd(square[k], _mm256_mul_pd(x, x));
        }
    double low[4], high[4];
    uint64_t zero[4];
    for (int k = 0; k < 4; k++) {
        _mm256_storeu_pd(lanes->sums + 4 * k, sum[k]);
        _mm256_storeu_pd(lanes->squares + 4 * k, square[k]);
    }
    _mm256_storeu_pd(low, min);
    _mm256_storeu_pd(high, max);
    _mm256_storeu_si256((__m256i *)zero, zeros);
    lanes->min = low[0];
    lanes->max = high[0];
    for (int k = 1; k < 4; k++) {
        lanes->min = low[k] < lanes->min ? low[k] : lanes->min;
        lanes->max = high[k] > lanes->max ? high[k] : lanes->max;
    }
    lanes->zeros = zero[0] + zero[1] + zero[2] + zero[3];
    sl_lanes_rest(SL_F64, in + 8 * i, count - i, lanes);
}

const sl_lanes_kernel sl_lanes_avx2[] = {
    {SL_F32, sl_lanes_f32_avx2},
    {SL_BF16, sl_lanes_bf16_avx2},
    {SL_F16, sl_lanes_f16_avx2},
    {SL_F64, sl_lanes_f64_avx2},
    {-1, NULL},
};

#endif
