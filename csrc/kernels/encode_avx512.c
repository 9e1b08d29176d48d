/* The steps of quantization for other engines with AVX-512; packing is left to AVX2. */
#include "kernels/encode.h"
#include "kernels/isa.h"

#ifdef SL_X86

#define TARGET SL_AVX512
#define NAME(stem) stem##_avx512

typedef __m512 lanes;
#define load(values) _mm512_loadu_ps(values)
#define store(values, all) _mm512_storeu_ps(values, all)
#define same _mm512_set1_ps
#define minus _mm512_sub_ps
#define times _mm512_mul_ps
#define plus _mm512_add_ps
#define over _mm512_div_ps
#define smaller _mm512_min_ps
#define larger _mm512_max_ps

TARGET SL_INLINE lanes to_bf16(lanes values) {
    __m512i bits = _mm512_castps_si512(values);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32((int)0xffff0000)));
}

#define to_f16(values) _mm512_cvtph_ps(_mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT))

typedef __m512i sizes;
#define sizes_of(values) _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(0x7fffffff))
#define larger_size _mm512_max_epu32
#define lowest _mm512_reduce_min_ps
#define highest _mm512_reduce_max_ps

TARGET SL_INLINE float highest_size(sizes all) {
    uint32_t bits = _mm512_reduce_max_epu32(all);
    float size;
    memcpy(&size, &bits, sizeof size);
    return size;
}

TARGET SL_INLINE void put_bytes(uint8_t *codes, __m512i numbers) {
    _mm_storeu_si128((__m128i *)codes, _mm512_cvtepi32_epi8(numbers));
}

TARGET SL_INLINE void put_integers(uint8_t *codes, lanes values, int32_t offset) {
    __m512i numbers = _mm512_castps_si512(plus(values, same(12582912.0f)));
    put_bytes(codes, _mm512_add_epi32(numbers, _mm512_set1_epi32(offset)));
}

/* Bounds for each step of a binary search, by the rank so far. */
typedef struct table {
    __m512 first, second, third, fourth;
    __m128i map;
} table;

TARGET SL_INLINE table load_table(const float bounds[15], const uint8_t map[16]) {
    float all[32] = {0};
    memcpy(all, bounds, 15 * sizeof *bounds);
    return (table){same(all[7]), load(all + 3), load(all + 1), load(all), _mm_loadu_si128((const __m128i *)map)};
}

TARGET SL_INLINE void put_ranks(uint8_t *codes, lanes values, const table *all) {
#define ABOVE(bounds) _mm512_cmp_ps_mask(values, bounds, _CMP_GT_OQ)
#define AT_RANK(bounds) _mm512_permutexvar_ps(rank, bounds)
#define ADD(number, mask) _mm512_mask_add_epi32(rank, mask, rank, _mm512_set1_epi32(number))
    __m512i rank = _mm512_maskz_set1_epi32(ABOVE(all->first), 8);
    rank = ADD(4, ABOVE(AT_RANK(all->second)));
    rank = ADD(2, ABOVE(AT_RANK(all->third)));
    rank = ADD(1, ABOVE(AT_RANK(all->fourth)));
    _mm_storeu_si128((__m128i *)codes, _mm_shuffle_epi8(all->map, _mm512_cvtepi32_epi8(rank)));
}

TARGET SL_INLINE void put_e4m3(uint8_t *codes, lanes values) {
    __m512i bits = _mm512_castps_si512(values), size = sizes_of(values);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(size, 20), _mm512_set1_epi32(1));
    __m512i code = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(size, _mm512_set1_epi32(0x7ffff)), odd), 20);
    code = _mm512_sub_epi32(code, _mm512_set1_epi32(120 << 3));
    __m512i sum = _mm512_castps_si512(plus(_mm512_castsi512_ps(size), same(0x1p14f)));
    __mmask16 subnormal = _mm512_cmplt_epu32_mask(size, _mm512_set1_epi32(0x3c800000));
    code = _mm512_mask_sub_epi32(code, subnormal, sum, _mm512_set1_epi32(0x46800000));
    put_bytes(codes, _mm512_or_si512(code, _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80))));
}

#include "kernels/encode_lanes.h"

const sl_encode_steps sl_encode_avx512 = {extremes_avx512, quotients_avx512, integers_avx512,
                                          ranks_avx512,    e4m3_avx512,      NULL};

#endif
