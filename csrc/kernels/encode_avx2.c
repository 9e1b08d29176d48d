/* The steps of quantization for other engines with AVX2. The remainder of a vector is left to scalar C. */
#include "kernels/encode.h"
#include "kernels/isa.h"

#ifdef SL_X86

#define TARGET SL_AVX2
#define WHOLE(count) ((count) / 8 * 8)

TARGET static inline uint32_t highest(__m256i values) {
    __m128i half = _mm_max_epu32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(half);
}

TARGET static sl_extremes range(const float *values, size_t count) {
    if (count < 8) return sl_encode_scalar.range(values, count);
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256 least = _mm256_loadu_ps(values), most = least;
    __m256i absmax = _mm256_setzero_si256();
    for (size_t i = 0; i < WHOLE(count); i += 8) {
        __m256 x = _mm256_loadu_ps(values + i);
        absmax = _mm256_max_epu32(absmax, _mm256_and_si256(_mm256_castps_si256(x), magnitude));
        least = _mm256_min_ps(x, least);
        most = _mm256_max_ps(x, most);
    }
    float low[8], high[8];
    _mm256_storeu_ps(low, least);
    _mm256_storeu_ps(high, most);
    sl_extremes found = {highest(absmax), sl_encode_scalar.range(low, 8).least, sl_encode_scalar.range(high, 8).most};
    if (count % 8 == 0) return found;
    sl_extremes rest = sl_encode_scalar.range(values + WHOLE(count), count % 8);
    found.absmax = rest.absmax > found.absmax ? rest.absmax : found.absmax;
    found.least = rest.least < found.least ? rest.least : found.least;
    found.most = rest.most > found.most ? rest.most : found.most;
    return found;
}

TARGET static inline __m256 to_bf16(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256 rounded = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32((int)0xffff0000)));
    return _mm256_blendv_ps(rounded, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

TARGET static inline __m256 unchanged(__m256 x) { return x; }

TARGET static inline __m256 to_f16(__m256 x) { return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

#define DIVIDE(rounded)                                                                  \
    for (size_t i = begin; i < whole; i += 8) {                                          \
        __m256 x = _mm256_sub_ps(_mm256_loadu_ps(values + i), _mm256_set1_ps(bias));     \
        _mm256_storeu_ps(results + i, rounded(_mm256_div_ps(x, _mm256_set1_ps(scale)))); \
    }

TARGET static void divide(const float *values, size_t count, size_t group, const float *biases, const float *scales,
                          int32_t from, float *results) {
    for (size_t begin = 0, k = 0; begin < count; begin += group, k++) {
        size_t end = count - begin < group ? count : begin + group, whole = begin + WHOLE(end - begin);
        float bias = biases == NULL ? 0.0f : biases[k], scale = scales[k];
        if (from == SL_BF16) {
            DIVIDE(to_bf16)
        } else if (from == SL_F16) {
            DIVIDE(to_f16)
        } else {
            DIVIDE(unchanged)
        }
        if (whole < end) sl_encode_scalar.divide(values + whole, end - whole, 8, &bias, &scale, from, results + whole);
    }
}

TARGET static void multiply(const float *values, size_t count, size_t group, const float *factors, float limit,
                            float *results) {
    for (size_t begin = 0, k = 0; begin < count; begin += group, k++) {
        size_t end = count - begin < group ? count : begin + group, whole = begin + WHOLE(end - begin);
        for (size_t i = begin; i < whole; i += 8) {
            __m256 x = _mm256_mul_ps(_mm256_loadu_ps(values + i), _mm256_set1_ps(factors[k]));
            x = _mm256_max_ps(_mm256_set1_ps(-limit), x);
            _mm256_storeu_ps(results + i, _mm256_min_ps(_mm256_set1_ps(limit), x));
        }
        if (whole < end) sl_encode_scalar.multiply(values + whole, end - whole, 8, &factors[k], limit, results + whole);
    }
}

/* Stores the low bytes of 8 integers. */
TARGET static inline void put_bytes(uint8_t *codes, __m256i numbers) {
    const __m256i first = _mm256_set1_epi32(0x0c080400);
    __m256i bytes = _mm256_shuffle_epi8(numbers, first);
    uint32_t low = (uint32_t)_mm256_extract_epi32(bytes, 0), high = (uint32_t)_mm256_extract_epi32(bytes, 4);
    memcpy(codes, &low, sizeof low);
    memcpy(codes + 4, &high, sizeof high);
}

TARGET static void round_all(const float *values, size_t count, float least, float most, int32_t offset,
                             uint8_t *codes) {
    for (size_t i = 0; i < WHOLE(count); i += 8) {
        __m256 x = _mm256_max_ps(_mm256_set1_ps(least), _mm256_loadu_ps(values + i));
        x = _mm256_add_ps(_mm256_min_ps(_mm256_set1_ps(most), x), _mm256_set1_ps(12582912.0f));
        __m256i number = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x007fffff));
        put_bytes(codes + i, _mm256_add_epi32(number, _mm256_set1_epi32(offset - 0x00400000)));
    }
    size_t done = WHOLE(count);
    sl_encode_scalar.round(values + done, count - done, least, most, offset, codes + done);
}

#define ABOVE(x, bound) _mm256_castps_si256(_mm256_cmp_ps(x, _mm256_set1_ps(bound), _CMP_GT_OQ))
#define FROM(x, bound) _mm256_castps_si256(_mm256_cmp_ps(x, _mm256_set1_ps(bound), _CMP_GE_OQ))
#define SUM(a, b, c) _mm256_add_epi32(_mm256_add_epi32(a, b), c)

TARGET static void e2m1(const float *values, size_t count, bool even, uint8_t *codes) {
    for (size_t i = 0; i < WHOLE(count); i += 8) {
        __m256 x = _mm256_loadu_ps(values + i);
        __m256i negative = _mm256_castps_si256(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ));
        x = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
        __m256i code = _mm256_add_epi32(SUM(ABOVE(x, 0.25f), ABOVE(x, 1.25f), ABOVE(x, 2.5f)), ABOVE(x, 5.0f));
        if (even)
            code = _mm256_add_epi32(code, SUM(FROM(x, 0.75f), FROM(x, 1.75f), FROM(x, 3.5f)));
        else
            code = _mm256_add_epi32(code, SUM(ABOVE(x, 0.75f), ABOVE(x, 1.75f), ABOVE(x, 3.5f)));
        if (!even) negative = _mm256_andnot_si256(_mm256_cmpeq_epi32(code, _mm256_setzero_si256()), negative);
        code = _mm256_sub_epi32(_mm256_setzero_si256(), code); /* true is -1 */
        put_bytes(codes + i, _mm256_or_si256(code, _mm256_and_si256(negative, _mm256_set1_epi32(8))));
    }
    size_t done = WHOLE(count);
    sl_encode_scalar.e2m1(values + done, count - done, even, codes + done);
}

TARGET static void bucket(const float *values, size_t count, const float bounds[15], const uint8_t map[16],
                          uint8_t *codes) {
    for (size_t i = 0; i < WHOLE(count); i += 8) {
        __m256 x = _mm256_loadu_ps(values + i);
        __m256i below = _mm256_setzero_si256();
        for (int k = 0; k < 15; k++) below = _mm256_sub_epi32(below, ABOVE(x, bounds[k]));
        put_bytes(codes + i, below);
    }
    size_t done = WHOLE(count);
    for (size_t i = 0; i < done; i++) codes[i] = map[codes[i]];
    sl_encode_scalar.bucket(values + done, count - done, bounds, map, codes + done);
}

TARGET static void e4m3(const float *values, size_t count, uint8_t *codes) {
    for (size_t i = 0; i < WHOLE(count); i += 8) {
        __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(values + i));
        __m256i size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(size, 20), _mm256_set1_epi32(1));
        __m256i code = _mm256_srli_epi32(SUM(size, _mm256_set1_epi32(0x7ffff), odd), 20);
        code = _mm256_sub_epi32(code, _mm256_set1_epi32(120 << 3));
        __m256 sum = _mm256_add_ps(_mm256_castsi256_ps(size), _mm256_set1_ps(0x1p14f));
        __m256i subnormal = _mm256_sub_epi32(_mm256_castps_si256(sum), _mm256_set1_epi32(0x46800000));
        code = _mm256_blendv_epi8(code, subnormal, _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3c800000), size));
        __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
        put_bytes(codes + i, _mm256_or_si256(code, sign));
    }
    size_t done = WHOLE(count);
    sl_encode_scalar.e4m3(values + done, count - done, codes + done);
}

TARGET static void nibbles(const uint8_t *codes, size_t count, bool high_first, uint8_t *bytes) {
    size_t done = count / 32 * 32;
    const __m256i weights = _mm256_set1_epi16(high_first ? 0x0110 : 0x1001);
    for (size_t i = 0; i < done; i += 32) {
        __m256i pairs = _mm256_maddubs_epi16(_mm256_loadu_si256((const __m256i *)(codes + i)), weights);
        __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
        _mm_storeu_si128((__m128i *)(bytes + i / 2), _mm256_castsi256_si128(packed));
    }
    sl_encode_scalar.nibbles(codes + done, count - done, high_first, bytes + done / 2);
}

const sl_encode_steps sl_encode_avx2 = {range, divide, multiply, round_all, e2m1, bucket, e4m3, nibbles};

#endif
