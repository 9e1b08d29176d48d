/* Quantization to K-quants, types with tables, and types with importance with AVX-512. */
#include "kernels/convert.h"
#include "kernels/isa.h"

#ifdef SL_X86

#define TARGET SL_AVX512
#define KERNEL(type) sl_f32_to_##type##_avx512
#define WEIGHTED(type) sl_weighted_##type##_avx512

#define LANES 16
#define lanes __m512
#define truths __mmask16
#define all_of(value) _mm512_set1_ps(value)
#define lanes_at(values) _mm512_loadu_ps(values)
#define put(out, values) _mm512_storeu_ps(out, values)
#define plus(a, b) _mm512_add_ps(a, b)
#define minus(a, b) _mm512_sub_ps(a, b)
#define times(a, b) _mm512_mul_ps(a, b)
#define over(a, b) _mm512_div_ps(a, b)
#define root(a) _mm512_sqrt_ps(a)
#define least_of(a, b) _mm512_min_ps(a, b)
#define most_of(a, b) _mm512_max_ps(a, b)
#define size_of(a) _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a)
#define below(a, b) _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ)
#define same(a, b) _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ)
#define both(p, q) ((__mmask16)((p) & (q)))
#define either(p, q) ((__mmask16)((p) | (q)))
#define all_true(p) ((p) == 0xffff)
#define any_true(p) ((p) != 0)
#define choose(p, a, b) _mm512_mask_blend_ps(p, b, a)

TARGET static inline __m512 nearest(__m512 values) {
    __m512i bits = _mm512_castps_si512(_mm512_add_ps(values, _mm512_set1_ps(12582912.0f)));
    bits = _mm512_and_si512(bits, _mm512_set1_epi32(0x007fffff));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(bits, _mm512_set1_epi32(0x00400000)));
}

TARGET static inline void put_bytes(uint8_t *out, __m512 values) {
    _mm_storeu_si128((__m128i *)(void *)out, _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(values)));
}

#define OWN_TRANSPOSED

/* Transposes 16 x 16 elements: register k of the result has element k of each run. */
TARGET static inline void transpose_sixteen(const uint8_t *x, size_t length, __m512 *out) {
    __m512 row[16], pair[16];
    for (size_t k = 0; k < 16; k++) row[k] = _mm512_loadu_ps(x + 4 * length * k);
    for (size_t k = 0; k < 16; k += 2) {
        pair[k] = _mm512_unpacklo_ps(row[k], row[k + 1]);
        pair[k + 1] = _mm512_unpackhi_ps(row[k], row[k + 1]);
    }
    /* Register k + i has elements i, i + 4, i + 8 and i + 12 of four runs. */
    for (size_t k = 0; k < 16; k += 4)
        for (size_t i = 0; i < 2; i++) {
            row[k + 2 * i] = _mm512_shuffle_ps(pair[k + i], pair[k + i + 2], 0x44);
            row[k + 2 * i + 1] = _mm512_shuffle_ps(pair[k + i], pair[k + i + 2], 0xee);
        }
    for (size_t i = 0; i < 4; i++) {
        __m512 low = _mm512_shuffle_f32x4(row[i], row[i + 4], 0x88),
               high = _mm512_shuffle_f32x4(row[i], row[i + 4], 0xdd);
        __m512 last_low = _mm512_shuffle_f32x4(row[i + 8], row[i + 12], 0x88);
        __m512 last_high = _mm512_shuffle_f32x4(row[i + 8], row[i + 12], 0xdd);
        out[i] = _mm512_shuffle_f32x4(low, last_low, 0x88);
        out[i + 8] = _mm512_shuffle_f32x4(low, last_low, 0xdd);
        out[i + 4] = _mm512_shuffle_f32x4(high, last_high, 0x88);
        out[i + 12] = _mm512_shuffle_f32x4(high, last_high, 0xdd);
    }
}

TARGET static inline void transposed(const uint8_t *x, size_t length, __m512 *runs) {
    for (size_t i = 0; i < length; i += 16) transpose_sixteen(x + 4 * i, length, runs + i);
}

#include "kernels/quant_blocks.h"
#include "kernels/quant_k.h"

const sl_kernel sl_quant_k_kernels_avx512[] = {QUANT_K_KERNELS QUANT_BLOCK_KERNELS{-1, -1, NULL}};

const sl_weighted_kernel sl_weighted_avx512[] = {WEIGHTED_K_KERNELS WEIGHTED_BLOCK_KERNELS{-1, NULL}};

#endif
