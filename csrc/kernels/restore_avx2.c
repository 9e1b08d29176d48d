/* Dequantization with AVX2: a table of 16 numbers takes two registers. */
#include "kernels/isa.h"
#include "kernels/restore.h"

#ifdef SL_X86

#define TARGET SL_AVX2
#define NAME(stem) sl_##stem##_avx2
#define WIDTH ((size_t)8)

typedef __m256 lanes;
#define load(memory) _mm256_loadu_ps((const float *)(const void *)(memory))
#define store(memory, value) _mm256_storeu_ps((float *)(void *)(memory), value)
#define same _mm256_set1_ps
#define minus _mm256_sub_ps
#define times _mm256_mul_ps
#define plus _mm256_add_ps

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

TARGET static inline numbers repeat_four(const float *table) {
    __m256 four = _mm256_broadcast_ps((const __m128 *)(const void *)table);
    return (numbers){four, four};
}

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

/* Looks up codes in the lowest 4 bits of the lanes, ignoring higher bits: the bit of value 8 selects a half of the
 * table. */
TARGET static inline __m256 look_up(__m256i codes, numbers all) {
    __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)); /* blendv uses the highest bit */
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(all.low, codes), _mm256_permutevar8x32_ps(all.high, codes), upper);
}

/* Codes [0, count) with a single scale. A word of 8 codes is copied to 8 lanes, and each shifts its code to the lowest
 * 4 bits. */
TARGET static inline void nibbles_run(const uint8_t *codes, size_t first, bool high_first, size_t count, numbers all,
                                      uint8_t *out) {
    __m256i by = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    if (high_first) by = _mm256_xor_si256(by, _mm256_set1_epi32(4));
    float table[16];
    if (first != 0 || count % 8 != 0) store_numbers(table, all);
    if (first != 0 && count > 0) {
        sl_restore_scalar.nibbles(codes++, 1, high_first, 1, table, NULL, out);
        out += 4;
        count--;
    }
    size_t i = 0;
    for (; i + 8 <= count; i += 8, codes += 4) {
        __m256i word = _mm256_set1_epi32((int)sl_load_le32(codes));
        store(out + 4 * i, look_up(_mm256_srlv_epi32(word, by), all));
    }
    if (i < count) sl_restore_scalar.nibbles(codes, 0, high_first, count - i, table, NULL, out + 4 * i);
}

/* A table of 4 numbers is repeated in both registers, so that the bits above the code do not matter. */
TARGET static inline void plane_run(const uint8_t *bytes, int shift, int bits, size_t count, numbers all,
                                    uint8_t *out) {
    __m128i by = _mm_cvtsi32_si128(shift);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(bytes + i)));
        __m256i codes = _mm256_srl_epi32(wide, by);
        store(out + 4 * i, bits == 4 ? look_up(codes, all) : _mm256_permutevar8x32_ps(all.low, codes));
    }
    if (i == count) return;
    float table[16];
    store_numbers(table, all);
    sl_restore_scalar.plane(bytes + i, shift, bits, count - i, table, NULL, out + 4 * i);
}

TARGET static inline lanes word_lanes(const uint8_t *words, int shift, numbers all) {
    __m256i codes = _mm256_loadu_si256((const __m256i *)(const void *)words);
    return look_up(_mm256_srl_epi32(codes, _mm_cvtsi32_si128(shift)), all);
}

TARGET static inline void words_run(const uint8_t *words, int shift, size_t count, numbers all, uint8_t *out) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8) store(out + 4 * i, word_lanes(words + 4 * i, shift, all));
    if (i == count) return;
    float table[16];
    store_numbers(table, all);
    sl_restore_scalar.words(words + 4 * i, shift, count - i, table, NULL, out + 4 * i);
}

/* Returns the values of 8 columns of a row. */
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

/* Returns 4 values of row i, starting with value `at`, and 4 of row i + 4. */
TARGET static inline __m256 halves(const float (*rows)[8], size_t i, size_t at) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[i] + at)), _mm_loadu_ps(rows[i + 4] + at), 1);
}

TARGET static inline void put_both(uint8_t *out, size_t line, __m256 a, __m256 b) {
    __m256d first = _mm256_castps_pd(a), second = _mm256_castps_pd(b);
    store(out, _mm256_castpd_ps(_mm256_unpacklo_pd(first, second)));
    store(out + line, _mm256_castpd_ps(_mm256_unpackhi_pd(first, second)));
}

/* Transposes 8 rows of 8 columns through memory, loading halves of registers: a transposition in registers alone would
 * need more permutations. */
TARGET static inline void square(const sl_grouped *all, size_t row, uint8_t *out, size_t line) {
    float rows[8][8];
    for (size_t i = 0; i < 8; i++) _mm256_storeu_ps(rows[i], grouped_row(all, row + i));
    for (size_t c = 0; c < 8; c += 4, out += 4 * line) {
        const float (*in)[8] = (const float (*)[8])rows;
        __m256 a = halves(in, 0, c), b = halves(in, 1, c), d = halves(in, 2, c), e = halves(in, 3, c);
        put_both(out, line, _mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(d, e));
        put_both(out + 2 * line, line, _mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(d, e));
    }
}

#define nibbles_whole(codes, high_first, count, all, out) nibbles_run(codes, 0, high_first, count, all, out)

#include "kernels/restore_lanes.h"

/* Each set bit takes, from the next eight values, the value with the number of set bits below it. Scalar C takes the
 * bits before a whole byte and the last bits. */
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
        store(out + 4 * i, _mm256_castsi256_ps(_mm256_and_si256(spread, set)));
        size_t some = (size_t)(COUNTS[*byte & 15] + COUNTS[*byte >> 4]);
        next += 4 * some;
        held -= some;
    }
    if (i < count) sl_restore_scalar.expand(byte, 0, count - i, next, held, out + 4 * i);
}

/* Returns 8 integers, cut to their lowest bytes. */
TARGET static inline __m256i lowest(const uint8_t *values) {
    __m256i sums = _mm256_castps_si256(_mm256_add_ps(load(values), same(SL_TO_INTEGER)));
    return _mm256_and_si256(sums, _mm256_set1_epi32(255));
}

TARGET static void sl_narrow_avx2(const void *values, size_t count, uint8_t *bytes) {
    const uint8_t *in = values;
    size_t i = 0;
    for (; i + 32 <= count; i += 32, in += 128) {
        __m256i low = _mm256_packs_epi32(lowest(in), lowest(in + 32));
        __m256i high = _mm256_packs_epi32(lowest(in + 64), lowest(in + 96));
        __m256i all = _mm256_packus_epi16(low, high); /* in lanes of four */
        all = _mm256_permutevar8x32_epi32(all, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((__m256i *)(void *)(bytes + i), all);
    }
    sl_restore_scalar.narrow(in, count - i, bytes + i);
}

const sl_restore sl_restore_avx2 = {sl_nibbles_avx2, sl_plane_avx2,  sl_words_avx2, sl_scale_avx2,
                                    sl_grouped_avx2, sl_expand_avx2, sl_narrow_avx2};

#endif
