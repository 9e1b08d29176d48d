/* The steps of quantization for other engines with AVX2: 16 lanes are two registers. */
#include "kernels/encode.h"
#include "kernels/isa.h"

#ifdef SL_X86

#define TARGET SL_AVX2
#define NAME(stem) stem##_avx2

typedef struct lanes {
    __m256 low, high;
} lanes;

TARGET SL_INLINE lanes load(const float *values) {
    return (lanes){_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)};
}

TARGET SL_INLINE void store(float *values, lanes all) {
    _mm256_storeu_ps(values, all.low);
    _mm256_storeu_ps(values + 8, all.high);
}

TARGET SL_INLINE lanes same(float value) { return (lanes){_mm256_set1_ps(value), _mm256_set1_ps(value)}; }

#define OF_ONE(name, half) \
    TARGET SL_INLINE lanes name(lanes a) { return (lanes){half(a.low), half(a.high)}; }
#define OF_TWO(name, half) \
    TARGET SL_INLINE lanes name(lanes a, lanes b) { return (lanes){half(a.low, b.low), half(a.high, b.high)}; }

OF_TWO(minus, _mm256_sub_ps)
OF_TWO(times, _mm256_mul_ps)
OF_TWO(plus, _mm256_add_ps)
OF_TWO(over, _mm256_div_ps)
OF_TWO(smaller, _mm256_min_ps)
OF_TWO(larger, _mm256_max_ps)

TARGET SL_INLINE __m256 half_to_bf16(__m256 values) {
    __m256i bits = _mm256_castps_si256(values);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32((int)0xffff0000)));
}

TARGET SL_INLINE __m256 half_to_f16(__m256 values) {
    return _mm256_cvtph_ps(_mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

OF_ONE(to_bf16, half_to_bf16)
OF_ONE(to_f16, half_to_f16)

/* The magnitudes of both halves: only their maximum is of interest. */
typedef __m256i sizes;
#define larger_size _mm256_max_epu32

TARGET SL_INLINE sizes sizes_of(lanes values) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    return _mm256_max_epu32(_mm256_and_si256(_mm256_castps_si256(values.low), magnitude),
                            _mm256_and_si256(_mm256_castps_si256(values.high), magnitude));
}

TARGET SL_INLINE float highest_size(sizes all) {
    __m128i half = _mm_max_epu32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(half));
}

#define OF_ALL(name, less)                                                                        \
    TARGET SL_INLINE float name(lanes all) {                                                      \
        __m256 eight = _mm256_##less(all.low, all.high);                                          \
        __m128 four = _mm_##less(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)); \
        four = _mm_##less(four, _mm_movehl_ps(four, four));                                       \
        return _mm_cvtss_f32(_mm_##less(four, _mm_shuffle_ps(four, four, 0x55)));                 \
    }

OF_ALL(lowest, min_ps)
OF_ALL(highest, max_ps)

/* The low bytes of 16 integers. */
TARGET SL_INLINE __m128i bytes_of(__m256i low, __m256i high) {
    const __m256i byte = _mm256_set1_epi32(0xff);
    __m256i pairs = _mm256_packus_epi32(_mm256_and_si256(low, byte), _mm256_and_si256(high, byte));
    pairs = _mm256_permute4x64_epi64(pairs, 0xd8);
    return _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
}

TARGET SL_INLINE void put_integers(uint8_t *codes, lanes values, int32_t offset) {
    values = plus(values, same(12582912.0f));
    __m128i bytes = bytes_of(_mm256_castps_si256(values.low), _mm256_castps_si256(values.high));
    _mm_storeu_si128((__m128i *)codes, _mm_add_epi8(bytes, _mm_set1_epi8((char)offset)));
}

/* Bounds for each step of a binary search, by the rank so far. */
typedef struct table {
    __m256 first, second[2], third, fourth;
    __m128i map;
} table;

TARGET SL_INLINE table load_table(const float bounds[15], const uint8_t map[16]) {
    float third[8] = {0}, fourth[8];
    for (int k = 0; k < 4; k++) third[k] = bounds[4 * k + 1];
    for (int k = 0; k < 8; k++) fourth[k] = bounds[2 * k];
    return (table){_mm256_set1_ps(bounds[7]),
                   {_mm256_set1_ps(bounds[3]), _mm256_set1_ps(bounds[11])},
                   _mm256_loadu_ps(third),
                   _mm256_loadu_ps(fourth),
                   _mm_loadu_si128((const __m128i *)map)};
}

/* A bound above is -1. */
TARGET SL_INLINE __m256i ranks_of(__m256 values, const table *all) {
#define ABOVE(bounds) _mm256_castps_si256(_mm256_cmp_ps(values, bounds, _CMP_GT_OQ))
    __m256i above = ABOVE(all->first);
    __m256 bounds = _mm256_blendv_ps(all->second[0], all->second[1], _mm256_castsi256_ps(above));
    __m256i rank = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_add_epi32(above, above));
    rank = _mm256_sub_epi32(rank, ABOVE(bounds));
    above = ABOVE(_mm256_permutevar8x32_ps(all->third, rank));
    rank = _mm256_sub_epi32(_mm256_add_epi32(rank, rank), above);
    above = ABOVE(_mm256_permutevar8x32_ps(all->fourth, rank));
    return _mm256_sub_epi32(_mm256_add_epi32(rank, rank), above);
#undef ABOVE
}

TARGET SL_INLINE void put_ranks(uint8_t *codes, lanes values, const table *all) {
    __m128i ranks = bytes_of(ranks_of(values.low, all), ranks_of(values.high, all));
    _mm_storeu_si128((__m128i *)codes, _mm_shuffle_epi8(all->map, ranks));
}

TARGET SL_INLINE __m256i half_e4m3(__m256 values) {
    __m256i bits = _mm256_castps_si256(values), size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(size, 20), _mm256_set1_epi32(1));
    __m256i code = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(size, _mm256_set1_epi32(0x7ffff)), odd), 20);
    code = _mm256_sub_epi32(code, _mm256_set1_epi32(120 << 3));
    __m256 sum = _mm256_add_ps(_mm256_castsi256_ps(size), _mm256_set1_ps(0x1p14f));
    __m256i subnormal = _mm256_sub_epi32(_mm256_castps_si256(sum), _mm256_set1_epi32(0x46800000));
    code = _mm256_blendv_epi8(code, subnormal, _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3c800000), size));
    return _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80)));
}

TARGET SL_INLINE void put_e4m3(uint8_t *codes, lanes values) {
    _mm_storeu_si128((__m128i *)codes, bytes_of(half_e4m3(values.low), half_e4m3(values.high)));
}

#include "kernels/encode_lanes.h"

/* 32 codes become 16 bytes. */
TARGET static size_t pack_nibbles(const uint8_t *codes, size_t count, bool high_first, uint8_t *bytes) {
    const __m256i pair = _mm256_set1_epi16(high_first ? 0x0110 : 0x1001);
    size_t done = 0;
    for (; done + 32 <= count; done += 32) {
        __m256i all = _mm256_maddubs_epi16(_mm256_loadu_si256((const __m256i *)(codes + done)), pair);
        all = _mm256_permute4x64_epi64(_mm256_packus_epi16(all, all), 0x08);
        _mm_storeu_si128((__m128i *)(bytes + done / 2), _mm256_castsi256_si128(all));
    }
    return done;
}

/* 16 codes become 2 * bits bytes in each half of a register, and are stored with zeros behind them, which the next
 * bytes overwrite: the last bytes are left to scalar C. */
TARGET static size_t pack_any(const uint8_t *codes, size_t count, uint32_t bits, uint8_t *bytes) {
    const __m256i pair = _mm256_set1_epi16((short)(1 | 1 << (8 + bits)));
    const __m256i four = _mm256_set1_epi32(1 | 1 << (16 + 2 * bits));
    const __m256i low = _mm256_set1_epi64x(0xffffffff);
    const __m128i up = _mm_cvtsi32_si128((int)(32 - 4 * bits));
    uint8_t order[16];
    for (uint8_t k = 0; k < 16; k++) order[k] = (uint8_t)(k < bits ? k : k < 2 * bits ? 8 + k - bits : 0x80);
    const __m256i together = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)order));
    size_t half = 2 * (size_t)bits, done = 0;
    for (; (count - done) / 8 * bits >= half + 16; done += 32, bytes += 2 * half) {
        __m256i all = _mm256_maddubs_epi16(_mm256_loadu_si256((const __m256i *)(codes + done)), pair);
        all = _mm256_madd_epi16(all, four);
        all = _mm256_or_si256(_mm256_and_si256(all, low), _mm256_srl_epi64(_mm256_andnot_si256(low, all), up));
        all = _mm256_shuffle_epi8(all, together);
        _mm_storeu_si128((__m128i *)bytes, _mm256_castsi256_si128(all));
        _mm_storeu_si128((__m128i *)(bytes + half), _mm256_extracti128_si256(all, 1));
    }
    return done;
}

TARGET static void pack_avx2(const uint8_t *codes, size_t count, uint32_t bits, bool high_first, uint8_t *bytes) {
    size_t done = bits == 4 ? pack_nibbles(codes, count, high_first, bytes) : pack_any(codes, count, bits, bytes);
    sl_encode_scalar.pack(codes + done, count - done, bits, high_first, bytes + done / 8 * bits);
}

const sl_encode_steps sl_encode_avx2 = {extremes_avx2, quotients_avx2, integers_avx2, ranks_avx2, e4m3_avx2, pack_avx2};

#endif
