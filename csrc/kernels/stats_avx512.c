/* Statistics with AVX-512, for f32 and 16-bit elements: 16 lanes in two registers are much faster than AVX2. f64 is
 * already limited by memory with AVX2. */
#include "kernels/isa.h"
#include "kernels/stats_lanes.h"

#ifdef SL_X86

#define TARGET SL_AVX512

typedef struct sums {
    __m512d low, high, low_squares, high_squares; /* lanes 0 to 7 and 8 to 15 */
    __m512 min, max;
    __m512i zeros;
} sums;

TARGET static inline void start(sums *all) {
    all->low = all->high = all->low_squares = all->high_squares = _mm512_setzero_pd();
    all->min = _mm512_set1_ps(SL_F32_MAX);
    all->max = _mm512_set1_ps(-SL_F32_MAX);
    all->zeros = _mm512_setzero_si512();
}

/* Fused multiply-adds are safe here (see stats_avx2.c). */
TARGET static inline void add_16(sums *all, __m512 values) {
    all->min = _mm512_min_ps(values, all->min);
    all->max = _mm512_max_ps(values, all->max);
    __mmask16 zero = _mm512_cmp_ps_mask(values, _mm512_setzero_ps(), _CMP_EQ_OQ);
    all->zeros = _mm512_mask_add_epi32(all->zeros, zero, all->zeros, _mm512_set1_epi32(1));
    __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(values)),
            high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(values, 1));
    all->low = _mm512_add_pd(all->low, low);
    all->high = _mm512_add_pd(all->high, high);
    all->low_squares = _mm512_fmadd_pd(low, low, all->low_squares);
    all->high_squares = _mm512_fmadd_pd(high, high, all->high_squares);
}

TARGET static void finish(const sums *all, sl_lanes *lanes) {
    _mm512_storeu_pd(lanes->sums, all->low);
    _mm512_storeu_pd(lanes->sums + 8, all->high);
    _mm512_storeu_pd(lanes->squares, all->low_squares);
    _mm512_storeu_pd(lanes->squares + 8, all->high_squares);
    lanes->min = (double)_mm512_reduce_min_ps(all->min);
    lanes->max = (double)_mm512_reduce_max_ps(all->max);
    lanes->zeros = (uint64_t)(uint32_t)_mm512_reduce_add_epi32(all->zeros);
}

TARGET SL_INLINE void add_f32(sums *all, const uint8_t *in) { add_16(all, _mm512_loadu_ps(in)); }

LANES_OF(sl_lanes_f32_avx512, add_f32, SL_F32, 4)

TARGET SL_INLINE void add_bf16(sums *all, const uint8_t *in) {
    __m512i halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)in));
    add_16(all, _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16)));
}

LANES_OF(sl_lanes_bf16_avx512, add_bf16, SL_BF16, 2)

TARGET SL_INLINE void add_f16(sums *all, const uint8_t *in) {
    add_16(all, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)in)));
}

LANES_OF(sl_lanes_f16_avx512, add_f16, SL_F16, 2)

const sl_lanes_kernel sl_lanes_avx512[] = {
    {SL_F32, sl_lanes_f32_avx512},
    {SL_BF16, sl_lanes_bf16_avx512},
    {SL_F16, sl_lanes_f16_avx512},
    {-1, NULL},
};

#endif
