/* Blocks of codes of one and two bits to f32: a part of dequant.h, which includes this file after what it needs. */
#ifndef SL_DEQUANT_TERNARY_H
#define SL_DEQUANT_TERNARY_H

/* Dequantizes two runs. */
TARGET SL_INLINE void ternary_runs(uint8_t *out, codes first, codes second, int shift, float d) {
    put_nibbles(out, take(first, shift, 3), 1, d);
    put_nibbles(out + RUN, take(second, shift, 3), 1, d);
}

TARGET SL_INLINE void restore_tq2_0(const sl_tq2_0 *block, uint8_t *out) {
    float d = half_at(block->d);
    for (size_t half = 0; half < 2; half++, out += 8 * RUN) {
        codes first = codes_at(block->codes + 32 * half), second = codes_at(block->codes + 32 * half + 16);
        ternary_runs(out, first, second, 0, d);
        ternary_runs(out + 2 * RUN, first, second, 2, d);
        ternary_runs(out + 4 * RUN, first, second, 4, d);
        ternary_runs(out + 6 * RUN, first, second, 6, d);
    }
}

/* Ternary, as packed in blocks of 128 by microsoft/BitNet's fork of llama.cpp: codes of 2 bits; a byte holds the codes
 * of elements 32 apart, the first in the high bits. The scale is outside of the block. */
typedef struct sl_i2_s {
    uint8_t codes[32];
} sl_i2_s;
_Static_assert(sizeof(sl_i2_s) == 32, "blocks have no padding in files");

TARGET SL_INLINE void restore_i2_s(const sl_i2_s *block, uint8_t *out) {
    codes first = codes_at(block->codes), second = codes_at(block->codes + 16);
    ternary_runs(out, first, second, 6, 1);
    ternary_runs(out + 2 * RUN, first, second, 4, 1);
    ternary_runs(out + 4 * RUN, first, second, 2, 1);
    ternary_runs(out + 6 * RUN, first, second, 0, 1);
}

/* Multiplies each byte of a word by three. */
SL_INLINE uint32_t word_thrice(uint32_t word) {
    const uint32_t even = 0x00ff00ff;
    return ((word & even) * 3 & even) | (((word >> 8 & even) * 3 & even) << 8);
}

TARGET SL_INLINE void put_digit(uint8_t *out, codes rest, float d) { put_nibbles(out, top_digit(rest), 1, d); }

TARGET SL_INLINE void restore_tq1_0(const sl_tq1_0 *block, uint8_t *out) {
    float d = half_at(block->d);
    codes a = codes_at(block->codes), b = codes_at(block->codes + 16), c = codes_at(block->codes + 32);
    for (size_t digit = 0; digit < 5; digit++) {
        put_digit(out + 2 * RUN * digit, a, d);
        put_digit(out + 2 * RUN * digit + RUN, b, d);
        put_digit(out + 10 * RUN + RUN * digit, c, d);
        a = thrice(a);
        b = thrice(b);
        c = thrice(c);
    }
    uint32_t first = load32(block->last, 0), second = word_thrice(first), third = word_thrice(second);
    uint64_t low = (uint64_t)second << 32 | first, high = (uint64_t)word_thrice(third) << 32 | third;
    put_digit(out + 15 * RUN, codes_of(low, high), d);
}

/* Signs: x = d for a bit that is set, else -d. Bit k of a byte belongs to element k. */
typedef struct sl_q1_0 {
    uint8_t d[2], bits[16];
} sl_q1_0;
_Static_assert(sizeof(sl_q1_0) == 18, "blocks have no padding in files");

TARGET SL_INLINE void restore_q1_0(const sl_q1_0 *block, uint8_t *out) {
    float d = half_at(block->d);
    for (size_t run = 0; run < 8; run++, out += RUN) put_nibbles(out, spread(load16(block->bits, run), 2), 1, d);
}

/* x = d * (code - 1), codes of 2 bits from -1 to 2. A byte holds four elements that follow each other. */
typedef struct sl_q2_0 {
    uint8_t d[2], codes[16];
} sl_q2_0;
_Static_assert(sizeof(sl_q2_0) == 18, "blocks have no padding in files");

TARGET SL_INLINE void restore_q2_0(const sl_q2_0 *block, uint8_t *out) {
    float d = half_at(block->d);
    for (size_t run = 0; run < 4; run++, out += RUN) {
        uint64_t low = pairs_apart(load16(block->codes, 2 * run)),
                 high = pairs_apart(load16(block->codes, 2 * run + 1));
        put_nibbles(out, codes_of(low, high), 1, d);
    }
}

#endif
