/* Dequantization with AVX-512: a table of 16 numbers takes a single register. */
#include "kernels/isa.h"
#include "kernels/restore.h"

#ifdef SL_X86

#define TARGET SL_AVX512
#define NAME(stem) sl_##stem##_avx512
#define WIDTH ((size_t)16)

typedef __m512 lanes, numbers;
#define load _mm512_loadu_ps
#define store _mm512_storeu_ps
#define same _mm512_set1_ps
#define minus _mm512_sub_ps
#define times _mm512_mul_ps
#define plus _mm512_add_ps
#define load_numbers _mm512_loadu_ps
#define repeat_four(table) _mm512_broadcast_f32x4(_mm_loadu_ps(table))

TARGET static inline numbers scaled(numbers all, const sl_scaling *scaling, size_t at) {
    if (scaling->zeros != NULL) all = _mm512_sub_ps(all, _mm512_set1_ps(scaling->zeros[at]));
    all = _mm512_mul_ps(all, _mm512_set1_ps(scaling->scales[at]));
    if (scaling->biases != NULL) all = _mm512_add_ps(all, _mm512_set1_ps(scaling->biases[at]));
    return all;
}

/* Codes [0, count) with a single scale. A word of 8 codes is copied to 8 lanes, and each shifts its code to the lowest
 * 4 bits: a permutation ignores all other bits. */
TARGET static inline void nibbles_run(const uint8_t *codes, size_t first, bool high_first, size_t count, numbers all,
                                      uint8_t *out) {
    const __m512i words = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), two = _mm512_set1_epi32(2);
    __m512i by = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    if (high_first) by = _mm512_xor_si512(by, _mm512_set1_epi32(4));
    float table[16];
    if (first != 0 || count % 16 != 0) _mm512_storeu_ps(table, all);
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
        _mm512_storeu_ps(out + 4 * i, _mm512_permutexvar_ps(_mm512_srlv_epi32(a, by), all));
        _mm512_storeu_ps(out + 4 * i + 64, _mm512_permutexvar_ps(_mm512_srlv_epi32(b, by), all));
    }
    if (i + 16 <= count) {
        __m512i held = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)codes));
        __m512i a = _mm512_permutexvar_epi32(words, held);
        _mm512_storeu_ps(out + 4 * i, _mm512_permutexvar_ps(_mm512_srlv_epi32(a, by), all));
        i += 16;
        codes += 8;
    }
    if (i < count) sl_restore_scalar.nibbles(codes, 0, high_first, count - i, table, NULL, out + 4 * i);
}

TARGET SL_INLINE void nibbles_whole(const uint8_t *codes, bool high_first, size_t count, numbers all, uint8_t *out) {
    const __m512i words = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    __m512i by = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    if (high_first) by = _mm512_xor_si512(by, _mm512_set1_epi32(4));
    for (size_t i = 0; i < count; i += 16, codes += 8) {
        __m512i held = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)codes));
        __m512i own = _mm512_srlv_epi32(_mm512_permutexvar_epi32(words, held), by);
        _mm512_storeu_ps(out + 4 * i, _mm512_permutexvar_ps(own, all));
    }
}

/* A table of 4 numbers is repeated in the register, so that the bits above the code do not matter. */
TARGET static inline void plane_run(const uint8_t *bytes, int shift, int bits, size_t count, numbers all,
                                    uint8_t *out) {
    __m128i by = _mm_cvtsi32_si128(shift);
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(bytes + i)));
        _mm512_storeu_ps(out + 4 * i, _mm512_permutexvar_ps(_mm512_srl_epi32(wide, by), all));
    }
    if (i == count) return;
    float table[16];
    _mm512_storeu_ps(table, all);
    sl_restore_scalar.plane(bytes + i, shift, bits, count - i, table, NULL, out + 4 * i);
}

TARGET static inline lanes word_lanes(const uint8_t *words, int shift, numbers all) {
    __m512i codes = _mm512_srl_epi32(_mm512_loadu_si512(words), _mm_cvtsi32_si128(shift));
    return _mm512_permutexvar_ps(codes, all);
}

TARGET static inline void words_run(const uint8_t *words, int shift, size_t count, numbers all, uint8_t *out) {
    size_t i = 0;
    for (; i + 16 <= count; i += 16) _mm512_storeu_ps(out + 4 * i, word_lanes(words + 4 * i, shift, all));
    if (i == count) return;
    float table[16];
    _mm512_storeu_ps(table, all);
    sl_restore_scalar.words(words + 4 * i, shift, count - i, table, NULL, out + 4 * i);
}

/* Scales the numbers of 16 columns of a row. */
TARGET SL_INLINE __m512 scaled_row(const sl_grouped *all, size_t row, __m512 value) {
    size_t at = all->groups[row] * all->step;
    if (all->zeros != NULL) value = _mm512_sub_ps(value, _mm512_loadu_ps(all->zeros + at));
    value = _mm512_mul_ps(value, _mm512_loadu_ps(all->scales + at));
    if (all->biases != NULL) value = _mm512_add_ps(value, _mm512_loadu_ps(all->biases + at));
    return value;
}

/* Returns the values of 16 columns of a row. */
TARGET static inline __m512 grouped_row(const sl_grouped *all, size_t row) {
    size_t bits = (size_t)all->bits, shift = row * bits % 32;
    const uint8_t *words = all->words + row * bits / 32 * all->pitch;
    __m512i codes = _mm512_srl_epi32(_mm512_loadu_si512(words), _mm_cvtsi64_si128((int64_t)shift));
    if (shift + bits > 32) {
        __m512i more = _mm512_loadu_si512(words + all->pitch);
        codes = _mm512_or_si512(codes, _mm512_sll_epi32(more, _mm_cvtsi64_si128((int64_t)(32 - shift))));
    }
    codes = _mm512_and_si512(codes, _mm512_set1_epi32((1 << bits) - 1));
    return scaled_row(all, row, _mm512_add_ps(_mm512_set1_ps(all->first), _mm512_cvtepi32_ps(codes)));
}

/* Returns the values of 16 columns of 16 rows of 4-bit codes, the first of which begins a word. */
TARGET SL_INLINE void nibble_rows(const sl_grouped *all, size_t row, __m512 *rows) {
    const __m512i codes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 table = _mm512_add_ps(_mm512_set1_ps(all->first), _mm512_cvtepi32_ps(codes));
    const uint8_t *words = all->words + row / 8 * all->pitch;
    SL_UNROLL for (size_t half = 0; half < 2; half++, words += all->pitch) {
        __m512i eight = _mm512_loadu_si512(words);
        SL_UNROLL for (size_t i = 0; i < 8; i++, eight = _mm512_srli_epi32(eight, 4))
            rows[8 * half + i] = scaled_row(all, row + 8 * half + i, _mm512_permutexvar_ps(eight, table));
    }
}

TARGET SL_INLINE __m512 pairs(__m512 a, __m512 b, bool upper) {
    __m512d first = _mm512_castps_pd(a), second = _mm512_castps_pd(b);
    return _mm512_castpd_ps(upper ? _mm512_unpackhi_pd(first, second) : _mm512_unpacklo_pd(first, second));
}

/* Transposes 16 rows of 16 columns. */
TARGET SL_INLINE void square(const sl_grouped *codes, size_t row, uint8_t *out, size_t line) {
    const sl_grouped all = *codes;
    __m512 a[16], b[16];
    if (all.bits == 4 && row % 8 == 0)
        nibble_rows(&all, row, a);
    else
        SL_UNROLL for (size_t i = 0; i < 16; i++) a[i] = grouped_row(&all, row + i);
    SL_UNROLL for (size_t i = 0; i < 16; i += 4) { /* columns of 4 rows in each quarter */
        __m512 c = _mm512_unpacklo_ps(a[i], a[i + 1]), d = _mm512_unpacklo_ps(a[i + 2], a[i + 3]);
        __m512 e = _mm512_unpackhi_ps(a[i], a[i + 1]), f = _mm512_unpackhi_ps(a[i + 2], a[i + 3]);
        b[i] = pairs(c, d, false);
        b[i + 1] = pairs(c, d, true);
        b[i + 2] = pairs(e, f, false);
        b[i + 3] = pairs(e, f, true);
    }
    SL_UNROLL for (size_t c = 0; c < 4; c++) { /* columns c, c + 4, .. */
        __m512 d = _mm512_shuffle_f32x4(b[c], b[c + 4], 0x44), e = _mm512_shuffle_f32x4(b[c + 8], b[c + 12], 0x44);
        __m512 f = _mm512_shuffle_f32x4(b[c], b[c + 4], 0xEE), g = _mm512_shuffle_f32x4(b[c + 8], b[c + 12], 0xEE);
        _mm512_storeu_ps(out + c * line, _mm512_shuffle_f32x4(d, e, 0x88));
        _mm512_storeu_ps(out + (c + 4) * line, _mm512_shuffle_f32x4(d, e, 0xDD));
        _mm512_storeu_ps(out + (c + 8) * line, _mm512_shuffle_f32x4(f, g, 0x88));
        _mm512_storeu_ps(out + (c + 12) * line, _mm512_shuffle_f32x4(f, g, 0xDD));
    }
}

#include "kernels/restore_lanes.h"

/* Scalar C takes the bits before a whole byte, and the bits after the last 16. */
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
        /* An expanding load is slower, and only needed if a plain load would read too far. */
        __m512 some = held >= 16 ? _mm512_maskz_expand_ps(bits, _mm512_loadu_ps(next))
                                 : _mm512_maskz_expandloadu_ps(bits, next);
        _mm512_storeu_ps(out + 4 * i, some);
        next += 4 * own;
        held -= own;
    }
    if (i < count) sl_restore_scalar.expand(bytes, 0, count - i, next, held, out + 4 * i);
}

TARGET static void sl_narrow_avx512(const void *values, size_t count, uint8_t *bytes) {
    const uint8_t *in = values;
    size_t i = 0;
    for (; i + 16 <= count; i += 16, in += 64) {
        __m512i sums = _mm512_castps_si512(_mm512_add_ps(load(in), same(SL_TO_INTEGER)));
        _mm_storeu_si128((__m128i *)(void *)(bytes + i), _mm512_cvtepi32_epi8(sums));
    }
    sl_restore_scalar.narrow(in, count - i, bytes + i);
}

const sl_restore sl_restore_avx512 = {sl_nibbles_avx512, sl_plane_avx512,  sl_words_avx512, sl_scale_avx512,
                                      sl_grouped_avx512, sl_expand_avx512, sl_narrow_avx512};

#endif
