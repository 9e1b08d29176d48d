/* Dequantization with AVX-512: a table of 16 numbers is one register. */
#include "kernels/isa.h"
#include "kernels/restore.h"

#ifdef SL_X86

#define TARGET SL_AVX512

/* Numbers of a table. Where as many values share a scale, the table is scaled instead of them. */
#define TABLE ((size_t)16)

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
    const sl_scaling rest = sl_scaling_at(all, i);
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
        const sl_scaling one = sl_scaling_at(scaling, at);
        scale_run(out + 4 * i, (end < count ? end : count) - i, &one);
    }
}

/* The numbers of a table for the codes of element `at` of a scaling. */
TARGET static inline __m512 scaled(__m512 numbers, const sl_scaling *scaling, size_t at) {
    if (scaling->zeros != NULL) numbers = _mm512_sub_ps(numbers, _mm512_set1_ps(scaling->zeros[at]));
    numbers = _mm512_mul_ps(numbers, _mm512_set1_ps(scaling->scales[at]));
    if (scaling->biases != NULL) numbers = _mm512_add_ps(numbers, _mm512_set1_ps(scaling->biases[at]));
    return numbers;
}

/* Codes [0, count) with one scale. A word of 8 codes goes to 8 lanes, which each shift theirs to the lowest 4 bits: a
 * permutation looks at no others. */
TARGET static inline void nibbles_run(const uint8_t *codes, size_t first, bool high_first, size_t count, __m512 numbers,
                                      uint8_t *out) {
    const __m512i words = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), two = _mm512_set1_epi32(2);
    __m512i by = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    if (high_first) by = _mm512_xor_si512(by, _mm512_set1_epi32(4));
    float table[16];
    if (first != 0 || count % 16 != 0) _mm512_storeu_ps(table, numbers);
    if (first != 0 && count > 0) {
        sl_restore_scalar.nibbles(codes++, 1, high_first, 1, table, NULL, out);
        out += 4;
        count--;
    }
    size_t i = 0;
    for (; i + 32 <= count; i += 32, codes += 16) {
        __m512i held = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)codes));
        __m512i a = _mm512_permutexvar_epi32(words, held);
        __m512i b = _mm512_permutexvar_epi32(_mm512_add_epi32(words, two), held);
        _mm512_storeu_ps(out + 4 * i, _mm512_permutexvar_ps(_mm512_srlv_epi32(a, by), numbers));
        _mm512_storeu_ps(out + 4 * i + 64, _mm512_permutexvar_ps(_mm512_srlv_epi32(b, by), numbers));
    }
    if (i + 16 <= count) {
        __m512i held = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)codes));
        __m512i a = _mm512_permutexvar_epi32(words, held);
        _mm512_storeu_ps(out + 4 * i, _mm512_permutexvar_ps(_mm512_srlv_epi32(a, by), numbers));
        i += 16;
        codes += 8;
    }
    if (i < count) sl_restore_scalar.nibbles(codes, 0, high_first, count - i, table, NULL, out + 4 * i);
}

TARGET static void sl_nibbles_avx512(const uint8_t *codes, size_t first, bool high_first, size_t count,
                                     const float *table, const sl_scaling *scaling, void *values) {
    uint8_t *out = values;
    __m512 numbers = _mm512_loadu_ps(table);
    if (scaling == NULL || scaling->block < TABLE) {
        nibbles_run(codes, first, high_first, count, numbers, out);
        if (scaling != NULL) sl_scale_avx512(values, count, scaling);
        return;
    }
    size_t at = 0, end = scaling->block - scaling->first;
    for (size_t i = 0; i < count; i = end, end += scaling->block, at++)
        nibbles_run(codes + (first + i) / 2, (first + i) % 2, high_first, (end < count ? end : count) - i,
                    scaled(numbers, scaling, at), out + 4 * i);
}

/* A table of 4 numbers is in all quarters of the register, so that it does not matter what is above the code. */
TARGET static inline void plane_run(const uint8_t *bytes, int shift, int bits, size_t count, __m512 numbers,
                                    uint8_t *out) {
    __m128i by = _mm_cvtsi32_si128(shift);
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(bytes + i)));
        _mm512_storeu_ps(out + 4 * i, _mm512_permutexvar_ps(_mm512_srl_epi32(wide, by), numbers));
    }
    if (i == count) return;
    float table[16];
    _mm512_storeu_ps(table, numbers);
    sl_restore_scalar.plane(bytes + i, shift, bits, count - i, table, NULL, out + 4 * i);
}

TARGET static void sl_plane_avx512(const uint8_t *bytes, int shift, int bits, size_t count, const float *table,
                                   const sl_scaling *scaling, void *values) {
    uint8_t *out = values;
    __m512 numbers = bits == 4 ? _mm512_loadu_ps(table) : _mm512_broadcast_f32x4(_mm_loadu_ps(table));
    if (scaling == NULL || scaling->block < TABLE) {
        plane_run(bytes, shift, bits, count, numbers, out);
        if (scaling != NULL) sl_scale_avx512(values, count, scaling);
        return;
    }
    size_t at = 0, end = scaling->block - scaling->first;
    for (size_t i = 0; i < count; i = end, end += scaling->block, at++)
        plane_run(bytes + i, shift, bits, (end < count ? end : count) - i, scaled(numbers, scaling, at), out + 4 * i);
}

TARGET static inline void words_run(const uint8_t *words, int shift, size_t count, __m512 numbers, uint8_t *out) {
    __m128i by = _mm_cvtsi32_si128(shift);
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m512i codes = _mm512_srl_epi32(_mm512_loadu_si512(words + 4 * i), by);
        _mm512_storeu_ps(out + 4 * i, _mm512_permutexvar_ps(codes, numbers));
    }
    if (i == count) return;
    float table[16];
    _mm512_storeu_ps(table, numbers);
    sl_restore_scalar.words(words + 4 * i, shift, count - i, table, NULL, out + 4 * i);
}

TARGET static void sl_words_avx512(const uint8_t *words, int shift, size_t count, const float *table,
                                   const sl_scaling *scaling, void *values) {
    uint8_t *out = values;
    __m512 numbers = _mm512_loadu_ps(table);
    if (scaling == NULL || scaling->block < TABLE) {
        words_run(words, shift, count, numbers, out);
        if (scaling != NULL) sl_scale_avx512(values, count, scaling);
        return;
    }
    size_t at = 0, end = scaling->block - scaling->first;
    for (size_t i = 0; i < count; i = end, end += scaling->block, at++)
        words_run(words + 4 * i, shift, (end < count ? end : count) - i, scaled(numbers, scaling, at), out + 4 * i);
}

/* The values of 16 columns of a row. */
TARGET static inline __m512 grouped_row(const sl_grouped *all, size_t row) {
    size_t bits = (size_t)all->bits, shift = row * bits % 32, at = all->groups[row] * all->step;
    const uint8_t *words = all->words + row * bits / 32 * all->pitch;
    __m512i codes = _mm512_srl_epi32(_mm512_loadu_si512(words), _mm_cvtsi64_si128((int64_t)shift));
    if (shift + bits > 32) {
        __m512i more = _mm512_loadu_si512(words + all->pitch);
        codes = _mm512_or_si512(codes, _mm512_sll_epi32(more, _mm_cvtsi64_si128((int64_t)(32 - shift))));
    }
    codes = _mm512_and_si512(codes, _mm512_set1_epi32((1 << bits) - 1));
    __m512 value = _mm512_add_ps(_mm512_set1_ps(all->first), _mm512_cvtepi32_ps(codes));
    if (all->zeros != NULL) value = _mm512_sub_ps(value, _mm512_loadu_ps(all->zeros + at));
    value = _mm512_mul_ps(value, _mm512_loadu_ps(all->scales + at));
    if (all->biases != NULL) value = _mm512_add_ps(value, _mm512_loadu_ps(all->biases + at));
    return value;
}

/* Lane k of the result: 4 values from value `at` of row i + 4 * k on. */
TARGET static inline __m512 quarters(const float (*rows)[16], size_t i, size_t at) {
    __m512 all = _mm512_castps128_ps512(_mm_loadu_ps(rows[i] + at));
    all = _mm512_insertf32x4(all, _mm_loadu_ps(rows[i + 4] + at), 1);
    all = _mm512_insertf32x4(all, _mm_loadu_ps(rows[i + 8] + at), 2);
    return _mm512_insertf32x4(all, _mm_loadu_ps(rows[i + 12] + at), 3);
}

/* 16 rows of 16 columns. They meet in memory, from which they come back by lanes: a transposition in registers would
 * need twice as many permutations. */
TARGET static inline void grouped_square(const sl_grouped *all, size_t row, uint8_t *out, size_t line) {
    float rows[16][16];
    for (size_t i = 0; i < 16; i++) _mm512_storeu_ps(rows[i], grouped_row(all, row + i));
    for (size_t c = 0; c < 16; c += 4, out += 4 * line) {
        const float (*in)[16] = (const float (*)[16])rows;
        __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(quarters(in, 0, c), quarters(in, 1, c)));
        __m512d b = _mm512_castps_pd(_mm512_unpacklo_ps(quarters(in, 2, c), quarters(in, 3, c)));
        __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(quarters(in, 0, c), quarters(in, 1, c)));
        __m512d e = _mm512_castps_pd(_mm512_unpackhi_ps(quarters(in, 2, c), quarters(in, 3, c)));
        _mm512_storeu_pd(out, _mm512_unpacklo_pd(a, b));
        _mm512_storeu_pd(out + line, _mm512_unpackhi_pd(a, b));
        _mm512_storeu_pd(out + 2 * line, _mm512_unpacklo_pd(d, e));
        _mm512_storeu_pd(out + 3 * line, _mm512_unpackhi_pd(d, e));
    }
}

TARGET static void sl_grouped_avx512(const sl_grouped *codes, size_t begin, size_t end, size_t columns, void *values,
                                     size_t line) {
    size_t c = 0;
    for (; c + 16 <= columns; c += 16) {
        const sl_grouped some = sl_grouped_at(codes, c);
        uint8_t *out = (uint8_t *)values + c * line;
        size_t row = begin;
        for (; row + 16 <= end; row += 16, out += 64) grouped_square(&some, row, out, line);
        sl_restore_scalar.grouped(&some, row, end, 16, out, line);
    }
    if (c == columns) return;
    const sl_grouped rest = sl_grouped_at(codes, c);
    sl_restore_scalar.grouped(&rest, begin, end, columns - c, (uint8_t *)values + c * line, line);
}

/* Bits before a whole byte, and those after the last 16, in scalar C. */
TARGET static void sl_expand_avx512(const uint8_t *mask, size_t first, size_t count, const void *stored, size_t held,
                                    void *values) {
    uint8_t *out = values;
    const uint8_t *next = stored;
    size_t i = first % 8 == 0 ? 0 : 8 - first % 8;
    if (i > count) i = count;
    if (i > 0) {
        size_t own = (size_t)sl_restore_count_bits(mask, first, i);
        sl_restore_scalar.expand(mask, first, i, next, own, out);
        next += 4 * own;
        held -= own;
    }
    const uint8_t *bytes = mask + (first + i) / 8;
    for (; i + 16 <= count; i += 16, bytes += 2) {
        __mmask16 bits = (__mmask16)(bytes[0] | bytes[1] << 8);
        size_t own = (size_t)_mm_popcnt_u32(bits);
        /* The load of an expansion is slower, and only needed where others would read too far. */
        __m512 some = held >= 16 ? _mm512_maskz_expand_ps(bits, _mm512_loadu_ps(next))
                                 : _mm512_maskz_expandloadu_ps(bits, next);
        _mm512_storeu_ps(out + 4 * i, some);
        next += 4 * own;
        held -= own;
    }
    if (i < count) sl_restore_scalar.expand(bytes, 0, count - i, next, held, out + 4 * i);
}

const sl_restore sl_restore_avx512 = {sl_nibbles_avx512, sl_plane_avx512,   sl_words_avx512,
                                      sl_scale_avx512,   sl_grouped_avx512, sl_expand_avx512};

#endif
