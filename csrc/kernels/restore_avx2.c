/* Dequantization with AVX2: a table of 16 numbers is two registers. */
#include "kernels/isa.h"
#include "kernels/restore.h"

#ifdef SL_X86

#define TARGET SL_AVX2

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
    const sl_scaling rest = sl_scaling_at(all, i);
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
        const sl_scaling one = sl_scaling_at(scaling, at);
        scale_run(out + 4 * i, (end < count ? end : count) - i, &one);
    }
}

/* Numbers of a table. Where as many values share a scale, the table is scaled instead of them. */
#define TABLE ((size_t)16)

typedef struct numbers {
    __m256 low, high;
} numbers;

TARGET static inline numbers load_numbers(const float *table) {
    return (numbers){_mm256_loadu_ps(table), _mm256_loadu_ps(table + 8)};
}

TARGET static inline void store_numbers(float *table, numbers all) {
    _mm256_storeu_ps(table, all.low);
    _mm256_storeu_ps(table + 8, all.high);
}

/* The numbers of a table for the codes of element `at` of a scaling. */
TARGET static inline numbers scaled(numbers all, const sl_scaling *scaling, size_t at) {
    if (scaling->zeros != NULL) {
        __m256 less = _mm256_set1_ps(scaling->zeros[at]);
        all.low = _mm256_sub_ps(all.low, less);
        all.high = _mm256_sub_ps(all.high, less);
    }
    __m256 factor = _mm256_set1_ps(scaling->scales[at]);
    all.low = _mm256_mul_ps(all.low, factor);
    all.high = _mm256_mul_ps(all.high, factor);
    if (scaling->biases != NULL) {
        __m256 more = _mm256_set1_ps(scaling->biases[at]);
        all.low = _mm256_add_ps(all.low, more);
        all.high = _mm256_add_ps(all.high, more);
    }
    return all;
}

/* Codes in the lowest 4 bits of the lanes, whatever is above them: the bit of value 8 chooses between the two halves of
 * the table. */
TARGET static inline __m256 look_up(__m256i codes, numbers all) {
    __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)); /* blendv looks at the highest bit */
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(all.low, codes), _mm256_permutevar8x32_ps(all.high, codes), upper);
}

TARGET static inline void put(uint8_t *out, size_t i, __m256 values) {
    _mm256_storeu_ps((float *)(void *)(out + 4 * i), values);
}

/* Codes [0, count) with one scale. A word of 8 codes goes to 8 lanes, which each shift theirs to the lowest 4 bits. */
TARGET static inline void nibbles_run(const uint8_t *codes, size_t first, bool high_first, size_t count, numbers all,
                                      uint8_t *out) {
    __m256i by = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    if (high_first) by = _mm256_xor_si256(by, _mm256_set1_epi32(4));
    float table[TABLE];
    if (first != 0 || count % 8 != 0) store_numbers(table, all);
    if (first != 0 && count > 0) {
        sl_restore_scalar.nibbles(codes++, 1, high_first, 1, table, NULL, out);
        out += 4;
        count--;
    }
    size_t i = 0;
    for (; i + 8 <= count; i += 8, codes += 4) {
        __m256i word = _mm256_set1_epi32((int)sl_load_le32(codes));
        put(out, i, look_up(_mm256_srlv_epi32(word, by), all));
    }
    if (i < count) sl_restore_scalar.nibbles(codes, 0, high_first, count - i, table, NULL, out + 4 * i);
}

TARGET static void sl_nibbles_avx2(const uint8_t *codes, size_t first, bool high_first, size_t count,
                                   const float *table, const sl_scaling *scaling, void *values) {
    uint8_t *out = values;
    numbers all = load_numbers(table);
    if (scaling == NULL || scaling->block < TABLE) {
        nibbles_run(codes, first, high_first, count, all, out);
        if (scaling != NULL) sl_scale_avx2(values, count, scaling);
        return;
    }
    size_t at = 0, end = scaling->block - scaling->first;
    for (size_t i = 0; i < count; i = end, end += scaling->block, at++)
        nibbles_run(codes + (first + i) / 2, (first + i) % 2, high_first, (end < count ? end : count) - i,
                    scaled(all, scaling, at), out + 4 * i);
}

/* A table of 4 numbers is in every lane of both registers, so that it does not matter what is above the code. */
TARGET static inline void plane_run(const uint8_t *bytes, int shift, int bits, size_t count, numbers all,
                                    uint8_t *out) {
    __m128i by = _mm_cvtsi32_si128(shift);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(bytes + i)));
        __m256i codes = _mm256_srl_epi32(wide, by);
        put(out, i, bits == 4 ? look_up(codes, all) : _mm256_permutevar8x32_ps(all.low, codes));
    }
    if (i == count) return;
    float table[TABLE];
    store_numbers(table, all);
    sl_restore_scalar.plane(bytes + i, shift, bits, count - i, table, NULL, out + 4 * i);
}

TARGET static void sl_plane_avx2(const uint8_t *bytes, int shift, int bits, size_t count, const float *table,
                                 const sl_scaling *scaling, void *values) {
    uint8_t *out = values;
    __m256 four = _mm256_broadcast_ps((const __m128 *)(const void *)table);
    numbers all = bits == 4 ? load_numbers(table) : (numbers){four, four};
    if (scaling == NULL || scaling->block < TABLE) {
        plane_run(bytes, shift, bits, count, all, out);
        if (scaling != NULL) sl_scale_avx2(values, count, scaling);
        return;
    }
    size_t at = 0, end = scaling->block - scaling->first;
    for (size_t i = 0; i < count; i = end, end += scaling->block, at++)
        plane_run(bytes + i, shift, bits, (end < count ? end : count) - i, scaled(all, scaling, at), out + 4 * i);
}

TARGET static inline void words_run(const uint8_t *words, int shift, size_t count, numbers all, uint8_t *out) {
    __m128i by = _mm_cvtsi32_si128(shift);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256i codes = _mm256_srl_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(words + 4 * i)), by);
        put(out, i, look_up(codes, all));
    }
    if (i == count) return;
    float table[TABLE];
    store_numbers(table, all);
    sl_restore_scalar.words(words + 4 * i, shift, count - i, table, NULL, out + 4 * i);
}

TARGET static void sl_words_avx2(const uint8_t *words, int shift, size_t count, const float *table,
                                 const sl_scaling *scaling, void *values) {
    uint8_t *out = values;
    numbers all = load_numbers(table);
    if (scaling == NULL || scaling->block < TABLE) {
        words_run(words, shift, count, all, out);
        if (scaling != NULL) sl_scale_avx2(values, count, scaling);
        return;
    }
    size_t at = 0, end = scaling->block - scaling->first;
    for (size_t i = 0; i < count; i = end, end += scaling->block, at++)
        words_run(words + 4 * i, shift, (end < count ? end : count) - i, scaled(all, scaling, at), out + 4 * i);
}

/* The values of 8 columns of a row. */
TARGET static inline __m256 grouped_row(const sl_grouped *all, size_t row) {
    size_t bits = (size_t)all->bits, shift = row * bits % 32, at = all->groups[row] * all->step;
    const uint8_t *words = all->words + row * bits / 32 * all->pitch;
    __m256i codes = _mm256_loadu_si256((const __m256i *)(const void *)words);
    codes = _mm256_srl_epi32(codes, _mm_cvtsi64_si128((int64_t)shift));
    if (shift + bits > 32) {
        __m256i more = _mm256_loadu_si256((const __m256i *)(const void *)(words + all->pitch));
        codes = _mm256_or_si256(codes, _mm256_sll_epi32(more, _mm_cvtsi64_si128((int64_t)(32 - shift))));
    }
    codes = _mm256_and_si256(codes, _mm256_set1_epi32((1 << bits) - 1));
    __m256 value = _mm256_add_ps(_mm256_set1_ps(all->first), _mm256_cvtepi32_ps(codes));
    if (all->zeros != NULL) value = _mm256_sub_ps(value, _mm256_loadu_ps(all->zeros + at));
    value = _mm256_mul_ps(value, _mm256_loadu_ps(all->scales + at));
    if (all->biases != NULL) value = _mm256_add_ps(value, _mm256_loadu_ps(all->biases + at));
    return value;
}

/* 4 values from value `at` of row i on, and as many of row i + 4. */
TARGET static inline __m256 halves(const float (*rows)[8], size_t i, size_t at) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[i] + at)), _mm_loadu_ps(rows[i + 4] + at), 1);
}

TARGET static inline void put_both(uint8_t *out, size_t line, __m256 a, __m256 b) {
    __m256d first = _mm256_castps_pd(a), second = _mm256_castps_pd(b);
    put(out, 0, _mm256_castpd_ps(_mm256_unpacklo_pd(first, second)));
    put(out + line, 0, _mm256_castpd_ps(_mm256_unpackhi_pd(first, second)));
}

/* 8 rows of 8 columns. They meet in memory, from which they come back by halves: a transposition in registers alone
 * would need more permutations. */
TARGET static inline void grouped_square(const sl_grouped *all, size_t row, uint8_t *out, size_t line) {
    float rows[8][8];
    for (size_t i = 0; i < 8; i++) _mm256_storeu_ps(rows[i], grouped_row(all, row + i));
    for (size_t c = 0; c < 8; c += 4, out += 4 * line) {
        const float (*in)[8] = (const float (*)[8])rows;
        __m256 a = halves(in, 0, c), b = halves(in, 1, c), d = halves(in, 2, c), e = halves(in, 3, c);
        put_both(out, line, _mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(d, e));
        put_both(out + 2 * line, line, _mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(d, e));
    }
}

TARGET static void sl_grouped_avx2(const sl_grouped *codes, size_t begin, size_t end, size_t columns, void *values,
                                   size_t line) {
    size_t c = 0;
    for (; c + 8 <= columns; c += 8) {
        const sl_grouped some = sl_grouped_at(codes, c);
        uint8_t *out = (uint8_t *)values + c * line;
        size_t row = begin;
        for (; row + 8 <= end; row += 8, out += 32) grouped_square(&some, row, out, line);
        sl_restore_scalar.grouped(&some, row, end, 8, out, line);
    }
    if (c == columns) return;
    const sl_grouped rest = sl_grouped_at(codes, c);
    sl_restore_scalar.grouped(&rest, begin, end, columns - c, (uint8_t *)values + c * line, line);
}

/* Of the next eight values each set bit takes the one whose number is that of the set bits below it. Bits before a
 * whole byte and the last ones in scalar C. */
TARGET static void sl_expand_avx2(const uint8_t *mask, size_t first, size_t count, const void *stored, size_t held,
                                  void *values) {
    static const uint8_t COUNTS[16] = {0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4};
    const __m256i counts = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)COUNTS));
    const __m256i nibble = _mm256_set1_epi32(15), own = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i below = _mm256_sub_epi32(own, _mm256_set1_epi32(1));
    uint8_t *out = values;
    const uint8_t *next = stored;
    size_t i = first % 8 == 0 ? 0 : 8 - first % 8;
    if (i > count) i = count;
    if (i > 0) {
        size_t some = (size_t)sl_restore_count_bits(mask, first, i);
        sl_restore_scalar.expand(mask, first, i, next, some, out);
        next += 4 * some;
        held -= some;
    }
    const uint8_t *byte = mask + (first + i) / 8;
    for (; i + 8 <= count && held >= 8; i += 8, byte++) {
        __m256i bits = _mm256_set1_epi32(*byte), before = _mm256_and_si256(bits, below);
        __m256i low = _mm256_shuffle_epi8(counts, _mm256_and_si256(before, nibble));
        __m256i high = _mm256_shuffle_epi8(counts, _mm256_srli_epi32(before, 4));
        __m256i eight = _mm256_loadu_si256((const __m256i *)(const void *)next);
        __m256i spread = _mm256_permutevar8x32_epi32(eight, _mm256_add_epi32(low, high));
        __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(bits, own), own);
        put(out, i, _mm256_castsi256_ps(_mm256_and_si256(spread, set)));
        size_t some = (size_t)(COUNTS[*byte & 15] + COUNTS[*byte >> 4]);
        next += 4 * some;
        held -= some;
    }
    if (i < count) sl_restore_scalar.expand(byte, 0, count - i, next, held, out + 4 * i);
}

const sl_restore sl_restore_avx2 = {sl_nibbles_avx2, sl_plane_avx2,   sl_words_avx2,
                                    sl_scale_avx2,   sl_grouped_avx2, sl_expand_avx2};

#endif
