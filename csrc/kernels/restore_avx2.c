/* Dequantization with AVX2: a table of 16 numbers is two registers. */
#include "kernels/isa.h"
#include "kernels/restore.h"

#ifdef SL_X86

#define TARGET SL_AVX2

/* 16 codes in 8 bytes. */
#define STEP ((size_t)16)

/* Codes in the lowest 4 bits of the lanes: the bit of value 8 chooses between the two halves of the table. */
TARGET static __m256 look_up(__m256i codes, __m256 low, __m256 high) {
    __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)); /* blendv looks at the highest bit */
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, codes), _mm256_permutevar8x32_ps(high, codes), upper);
}

TARGET static void sl_nibbles_avx2(const uint8_t *codes, size_t first, bool high_first, size_t count,
                                   const float *table, void *values) {
    uint8_t *out = values;
    if (first != 0 && count > 0) {
        sl_restore_scalar.nibbles(codes++, 1, high_first, 1, table, out);
        out += 4;
        count--;
    }
    __m256 low_numbers = _mm256_loadu_ps(table), high_numbers = _mm256_loadu_ps(table + 8);
    __m128i mask = _mm_set1_epi8(15);
    size_t i = 0;
    for (; i + STEP <= count; i += STEP, codes += STEP / 2) {
        __m128i bytes = _mm_loadl_epi64((const __m128i *)codes);
        __m128i low = _mm_and_si128(bytes, mask), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
        __m128i in_order = high_first ? _mm_unpacklo_epi8(high, low) : _mm_unpacklo_epi8(low, high);
        __m256i a = _mm256_cvtepu8_epi32(in_order), b = _mm256_cvtepu8_epi32(_mm_srli_si128(in_order, 8));
        _mm256_storeu_ps((float *)(out + 4 * i), look_up(a, low_numbers, high_numbers));
        _mm256_storeu_ps((float *)(out + 4 * i + 32), look_up(b, low_numbers, high_numbers));
    }
    sl_restore_scalar.nibbles(codes, 0, high_first, count - i, table, out + 4 * i);
}

TARGET static void sl_plane_avx2(const uint8_t *bytes, int shift, int bits, size_t count, const float *table,
                                 void *values) {
    uint8_t *out = values;
    __m256 four = _mm256_broadcast_ps((const __m128 *)(const void *)table);
    __m256 low = bits == 4 ? _mm256_loadu_ps(table) : four, high = bits == 4 ? _mm256_loadu_ps(table + 8) : four;
    __m256i mask = _mm256_set1_epi32((1 << bits) - 1);
    __m128i by = _mm_cvtsi32_si128(shift);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(bytes + i)));
        __m256i code = _mm256_and_si256(_mm256_srl_epi32(wide, by), mask);
        _mm256_storeu_ps((float *)(out + 4 * i), look_up(code, low, high));
    }
    sl_restore_scalar.plane(bytes + i, shift, bits, count - i, table, out + 4 * i);
}

TARGET static void sl_words_avx2(const uint8_t *words, int shift, size_t count, const float *table, void *values) {
    uint8_t *out = values;
    __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
    __m128i by = _mm_cvtsi32_si128(shift);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256i codes = _mm256_srl_epi32(_mm256_loadu_si256((const __m256i *)(words + 4 * i)), by);
        _mm256_storeu_ps((float *)(out + 4 * i), look_up(codes, low, high));
    }
    sl_restore_scalar.words(words + 4 * i, shift, count - i, table, out + 4 * i);
}

/* Values [0, count) with one scale; the remainder of a length in scalar C. */
TARGET static inline void scale_run(uint8_t *out, size_t count, const sl_scaling *one) {
    __m256 factor = _mm256_set1_ps(*one->scales), less = _mm256_set1_ps(one->zeros != NULL ? *one->zeros : 0);
    __m256 more = _mm256_set1_ps(one->biases != NULL ? *one->biases : 0);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        float *at = (float *)(void *)(out + 4 * i);
        __m256 value = _mm256_loadu_ps(at);
        if (one->zeros != NULL) value = _mm256_sub_ps(value, less);
        value = _mm256_mul_ps(value, factor);
        if (one->biases != NULL) value = _mm256_add_ps(value, more);
        _mm256_storeu_ps(at, value);
    }
    if (i < count) sl_restore_scalar.scale(out + 4 * i, count - i, one);
}

/* Each value has a scale of its own. */
TARGET static void scale_each(uint8_t *out, size_t count, const sl_scaling *all) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        float *at = (float *)(void *)(out + 4 * i);
        __m256 value = _mm256_loadu_ps(at);
        if (all->zeros != NULL) value = _mm256_sub_ps(value, _mm256_loadu_ps(all->zeros + i));
        value = _mm256_mul_ps(value, _mm256_loadu_ps(all->scales + i));
        if (all->biases != NULL) value = _mm256_add_ps(value, _mm256_loadu_ps(all->biases + i));
        _mm256_storeu_ps(at, value);
    }
    sl_scaling rest = {1, 0, all->scales + i, all->zeros == NULL ? NULL : all->zeros + i,
                       all->biases == NULL ? NULL : all->biases + i};
    sl_restore_scalar.scale(out + 4 * i, count - i, &rest);
}

TARGET static void sl_scale_avx2(void *values, size_t count, const sl_scaling *scaling) {
    uint8_t *out = values;
    if (scaling->block == 1) {
        scale_each(out, count, scaling);
        return;
    }
    size_t at = 0, end = scaling->block - scaling->first;
    for (size_t i = 0; i < count; i = end, end += scaling->block, at++) {
        sl_scaling one = {scaling->block, 0, scaling->scales + at, scaling->zeros == NULL ? NULL : scaling->zeros + at,
                          scaling->biases == NULL ? NULL : scaling->biases + at};
        scale_run(out + 4 * i, (end < count ? end : count) - i, &one);
    }
}

const sl_restore sl_restore_avx2 = {sl_nibbles_avx2, sl_plane_avx2, sl_words_avx2, sl_scale_avx2};

#endif
