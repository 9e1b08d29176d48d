/* Dequantization with AVX-512: a table of 16 numbers is one register. */
#include "kernels/isa.h"
#include "kernels/restore.h"

#ifdef SL_X86

#define TARGET SL_AVX512

/* 32 codes in 16 bytes. */
#define STEP ((size_t)32)

TARGET static void sl_nibbles_avx512(const uint8_t *codes, size_t first, bool high_first, size_t count,
                                     const float *table, void *values) {
    uint8_t *out = values;
    if (first != 0 && count > 0) {
        sl_restore_scalar.nibbles(codes++, 1, high_first, 1, table, out);
        out += 4;
        count--;
    }
    __m512 numbers = _mm512_loadu_ps(table);
    __m128i mask = _mm_set1_epi8(15);
    size_t i = 0;
    for (; i + STEP <= count; i += STEP, codes += STEP / 2) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)codes);
        __m128i low = _mm_and_si128(bytes, mask), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
        __m128i even = high_first ? high : low, odd = high_first ? low : high;
        __m512i a = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(even, odd));
        __m512i b = _mm512_cvtepu8_epi32(_mm_unpackhi_epi8(even, odd));
        _mm512_storeu_ps(out + 4 * i, _mm512_permutexvar_ps(a, numbers));
        _mm512_storeu_ps(out + 4 * i + 64, _mm512_permutexvar_ps(b, numbers));
    }
    sl_restore_scalar.nibbles(codes, 0, high_first, count - i, table, out + 4 * i);
}

TARGET static void sl_plane_avx512(const uint8_t *bytes, int shift, int bits, size_t count, const float *table,
                                   void *values) {
    uint8_t *out = values;
    __m512 numbers = bits == 4 ? _mm512_loadu_ps(table) : _mm512_broadcast_f32x4(_mm_loadu_ps(table));
    __m512i mask = _mm512_set1_epi32((1 << bits) - 1);
    __m128i by = _mm_cvtsi32_si128(shift);
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(bytes + i)));
        __m512i code = _mm512_and_si512(_mm512_srl_epi32(wide, by), mask);
        _mm512_storeu_ps(out + 4 * i, _mm512_permutexvar_ps(code, numbers));
    }
    sl_restore_scalar.plane(bytes + i, shift, bits, count - i, table, out + 4 * i);
}

/* A permutation looks at the lowest 4 bits of its indices. */
TARGET static void sl_words_avx512(const uint8_t *words, int shift, size_t count, const float *table, void *values) {
    uint8_t *out = values;
    __m512 numbers = _mm512_loadu_ps(table);
    __m128i by = _mm_cvtsi32_si128(shift);
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m512i codes = _mm512_srl_epi32(_mm512_loadu_si512(words + 4 * i), by);
        _mm512_storeu_ps(out + 4 * i, _mm512_permutexvar_ps(codes, numbers));
    }
    sl_restore_scalar.words(words + 4 * i, shift, count - i, table, out + 4 * i);
}

/* Values [0, count) with one scale; the remainder of a length in scalar C. */
TARGET static void scale_run(uint8_t *out, size_t count, const sl_scaling *one) {
    __m512 factor = _mm512_set1_ps(*one->scales), less = _mm512_set1_ps(one->zeros != NULL ? *one->zeros : 0);
    __m512 more = _mm512_set1_ps(one->biases != NULL ? *one->biases : 0);
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m512 value = _mm512_loadu_ps(out + 4 * i);
        if (one->zeros != NULL) value = _mm512_sub_ps(value, less);
        value = _mm512_mul_ps(value, factor);
        if (one->biases != NULL) value = _mm512_add_ps(value, more);
        _mm512_storeu_ps(out + 4 * i, value);
    }
    if (i < count) sl_restore_scalar.scale(out + 4 * i, count - i, one);
}

/* Each value has a scale of its own. */
TARGET static void scale_each(uint8_t *out, size_t count, const sl_scaling *all) {
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m512 value = _mm512_loadu_ps(out + 4 * i);
        if (all->zeros != NULL) value = _mm512_sub_ps(value, _mm512_loadu_ps(all->zeros + i));
        value = _mm512_mul_ps(value, _mm512_loadu_ps(all->scales + i));
        if (all->biases != NULL) value = _mm512_add_ps(value, _mm512_loadu_ps(all->biases + i));
        _mm512_storeu_ps(out + 4 * i, value);
    }
    sl_scaling rest = {1, 0, all->scales + i, all->zeros == NULL ? NULL : all->zeros + i,
                       all->biases == NULL ? NULL : all->biases + i};
    sl_restore_scalar.scale(out + 4 * i, count - i, &rest);
}

TARGET static void sl_scale_avx512(void *values, size_t count, const sl_scaling *scaling) {
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

const sl_restore sl_restore_avx512 = {sl_nibbles_avx512, sl_plane_avx512, sl_words_avx512, sl_scale_avx512};

#endif
