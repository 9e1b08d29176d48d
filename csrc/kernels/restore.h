/* Kernels of dequantization: codes to the numbers of a table, and numbers times scales. Scalar C is the reference;
 * every other tier produces the same bits: each step is rounded to f32, and nothing is fused. */
#ifndef SL_RESTORE_H
#define SL_RESTORE_H

#include "base/base.h"

/* Added to an integer of magnitude below 2^22, the sum's lowest bits are the integer: 1.5 * 2^23. */
#define SL_TO_INTEGER 0x1.8p23f

/* Scales of consecutive values: value i of a run uses element (first + i) / block of each array. */
typedef struct sl_scaling {
    size_t block, first;                  /* first < block */
    const float *scales, *zeros, *biases; /* zeros and biases may be NULL */
} sl_scaling;

/* Returns the scaling for the values of element `at` alone. */
static inline sl_scaling sl_scaling_at(const sl_scaling *all, size_t at) {
    sl_scaling one = {all->block, 0, all->scales + at, all->zeros == NULL ? NULL : all->zeros + at,
                      all->biases == NULL ? NULL : all->biases + at};
    return one;
}

/* Codes in columns of 32-bit words, with scales for the rows in any order. The numbers of codes are consecutive: first,
 * first + 1, .. */
typedef struct sl_grouped {
    const uint8_t *words;                 /* of the first column, at any alignment */
    size_t pitch;                         /* bytes between rows of words */
    int bits;                             /* per code, at most 8 */
    float first;                          /* the number of code 0 */
    const uint32_t *groups;               /* for each row of codes, a row of the arrays */
    size_t step;                          /* elements between rows of the arrays */
    const float *scales, *zeros, *biases; /* of the first column; zeros and biases may be NULL */
} sl_grouped;

/* Returns the codes from column `at` on. */
static inline sl_grouped sl_grouped_at(const sl_grouped *all, size_t at) {
    sl_grouped some = *all;
    some.words += 4 * at;
    some.scales += at;
    if (some.zeros != NULL) some.zeros += at;
    if (some.biases != NULL) some.biases += at;
    return some;
}

/* Codes have any alignment; values are f32 at any alignment in file byte order. `scaling` may be NULL; otherwise each
 * number becomes ((number - zero) * scale) + bias, in this order. */
typedef struct sl_restore {
    /* table[code] for `count` codes of 4 bits; the first is nibble `first` (0 or 1) of the first byte. */
    void (*nibbles)(const uint8_t *codes, size_t first, bool high_first, size_t count, const float *table,
                    const sl_scaling *scaling, void *values);
    /* table[code] for the `bits` (2 or 4) bits from bit `shift` of each of `count` bytes. */
    void (*plane)(const uint8_t *bytes, int shift, int bits, size_t count, const float *table,
                  const sl_scaling *scaling, void *values);
    /* table[code] for the 4 bits from bit `shift` of each of `count` 32-bit words. */
    void (*words)(const uint8_t *words, int shift, size_t count, const float *table, const sl_scaling *scaling,
                  void *values);
    /* ((value - zero) * scale) + bias, in place. */
    void (*scale)(void *values, size_t count, const sl_scaling *scaling);
    /* Transposes rows [begin, end) of `columns` columns: the values of a column are contiguous, and columns are `line`
     * bytes apart. */
    void (*grouped)(const sl_grouped *codes, size_t begin, size_t end, size_t columns, void *values, size_t line);
    /* For each of `count` bits of a mask, from bit `first` of its first byte on: the next of `held` f32 if the bit is
     * set, else 0. `held` bits are set. */
    void (*expand)(const uint8_t *mask, size_t first, size_t count, const void *stored, size_t held, void *values);
    /* The lowest byte of each value, an integer of magnitude below 2^22. */
    void (*narrow)(const void *values, size_t count, uint8_t *bytes);
} sl_restore;

extern const sl_restore sl_restore_scalar;
extern const sl_restore sl_restore_avx2; /* each exists only if isa.h defines it; NULL if the tier below is as fast */
extern const sl_restore sl_restore_avx512;
extern const sl_restore sl_restore_neon;

/* table[code] for `count` codes of `bits` in a little-endian bit stream; the first code begins at bit `first` of the
 * first byte. Reads only bytes with these codes. */
void sl_restore_stream(const uint8_t *codes, size_t first, int bits, size_t count, const float *table, void *values);

/* table[code] for 32-bit words of `word_codes` codes each; the first code is number `first` of the first word. */
void sl_restore_words(const uint8_t *codes, size_t first, int bits, size_t word_codes, size_t count, const float *table,
                      void *values);

/* Divides values by their scales, in place: a single rounding, identical in every tier. */
void sl_restore_divide(void *values, size_t count, const sl_scaling *scaling);

/* Number of set bits among `count` bits of a mask, from bit `first` of its first byte on. Reads no other byte. */
uint64_t sl_restore_count_bits(const uint8_t *mask, uint64_t first, uint64_t count);

/* Index of the first of `count` bytes with `code` in the bits shift and shift + 1, or `count`. */
size_t sl_restore_find_pair(const uint8_t *bytes, int shift, size_t count, uint8_t code);

#endif
