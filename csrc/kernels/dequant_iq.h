/* Dequantization of ggml's IQ types, in terms of dequant.h, which includes this file: super-blocks of 256 with codes
 * that are indices into grids (iq_grids.h).
 *
 * d has 11 bits, a scale at most 5 and a value at most 6, so that no product is ever rounded and their order is free.
 * Hence the halves and eighths of ggml's formulas are applied to d first, and scales and values are integers. */
#ifndef SL_DEQUANT_IQ_H
#define SL_DEQUANT_IQ_H

#include "kernels/iq_grids.h"
#include "kernels/scalar.h"

/* Stores the values of 16 codes of 2 or 3 bits, negative if the bit of `signs` is set: entries from 8 on are negatives.
 */
TARGET SL_INLINE void put_signed(uint8_t *out, const int8_t table[16], uint64_t low, uint64_t high, uint16_t signs,
                                 float scale) {
    put_from(out, table, either(codes_of(low, high), spread(signs, 8)), scale);
}

/* d * (2 * scale + 1) for scales in nibbles: first the low nibbles of 8 bytes, then the high nibbles. */
TARGET SL_INLINE void odd_scales(float scales[16], uint64_t nibbles, float d) {
    const uint64_t one = UINT64_C(0x0101010101010101), nibble = UINT64_C(0x0f0f0f0f0f0f0f0f);
    scales_of(scales, codes_of((nibbles & nibble) << 1 | one, (nibbles >> 4 & nibble) << 1 | one), d);
}

/* Eight signs are stored as seven bits, because the number of minus signs is even. Adds the eighth to the low seven
 * bits of each byte. */
SL_INLINE uint64_t with_eighth(uint64_t signs) {
    uint64_t odd = signs ^ signs >> 4;
    odd ^= odd >> 2;
    odd ^= odd >> 1;
    return signs | (odd & UINT64_C(0x0101010101010101)) << 7;
}

/* Returns the signs of 32 elements from four times seven bits. */
SL_INLINE uint32_t signs_of(uint32_t word) {
    uint32_t sevens = (word & 0x7f) | (word & 0x3f80) << 1 | (word & 0x1fc000) << 2 | (word & 0xfe00000) << 3;
    return (uint32_t)with_eighth(sevens);
}

/* d * (2 * scale + 1) for a scale in the high 4 bits of a word. */
SL_INLINE float top_scale(uint32_t word, float d) { return (float)(int32_t)(word >> 27 | 1) * d; }

/* 8 runs of 32: four indices, then 28 bits of signs and 4 of the scale. x = (d * (2 * scale + 1) / 8) * value. */
typedef struct sl_iq2_xxs {
    uint8_t d[2], runs[64];
} sl_iq2_xxs;
_Static_assert(sizeof(sl_iq2_xxs) == 66, "blocks have no padding in files");

TARGET SL_INLINE void restore_iq2_xxs(const sl_iq2_xxs *block, uint8_t *out) {
    const uint64_t *grid = sl_grid_iq2_xxs;
    float d = half_at(block->d) * 0.125f;
    for (size_t run = 0; run < 8; run++, out += 2 * RUN) {
        const uint8_t *index = block->runs + 8 * run;
        uint32_t word = load32(index, 1), signs = signs_of(word);
        float scale = top_scale(word, d);
        put_signed(out, sl_values_iq2, grid[index[0]], grid[index[1]], (uint16_t)signs, scale);
        put_signed(out + RUN, sl_values_iq2, grid[index[2]], grid[index[3]], (uint16_t)(signs >> 16), scale);
    }
}

/* 16 runs of 16, scales of 4 bits: the low nibble of byte k belongs to run 2k. Each 8 elements have an index of 9 bits
 * and signs of 7 bits. x = (d * (2 * scale + 1) / 8) * value. */
typedef struct sl_iq2_xs {
    uint8_t d[2], codes[64], scales[8];
} sl_iq2_xs;
_Static_assert(sizeof(sl_iq2_xs) == 74, "blocks have no padding in files");

TARGET SL_INLINE void restore_iq2_xs(const sl_iq2_xs *block, uint8_t *out) {
    const uint64_t *grid = sl_grid_iq2_xs;
    float scales[16];
    odd_scales(scales, load64(block->scales, 0), half_at(block->d) * 0.125f);
    for (size_t k = 0; k < 8; k++, out += 2 * RUN) {
        uint64_t words = load64(block->codes, k), signs = with_eighth(words >> 9 & UINT64_C(0x007f007f007f007f));
        signs |= signs >> 8; /* 16 signs, and 16 more from bit 32 on */
        put_signed(out, sl_values_iq2, grid[words & 511], grid[words >> 16 & 511], (uint16_t)signs, scales[k]);
        put_signed(out + RUN, sl_values_iq2, grid[words >> 32 & 511], grid[words >> 48 & 511], (uint16_t)(signs >> 32),
                   scales[8 + k]);
    }
}

/* Like IQ2_XS, with indices of 10 bits, of which a byte of `high` holds the high two for four indices, and with all
 * signs. */
typedef struct sl_iq2_s {
    uint8_t d[2], low[32], signs[32], high[8], scales[8];
} sl_iq2_s;
_Static_assert(sizeof(sl_iq2_s) == 82, "blocks have no padding in files");

TARGET SL_INLINE void restore_iq2_s(const sl_iq2_s *block, uint8_t *out) {
    const uint64_t *grid = sl_grid_iq2_s;
    float scales[16];
    odd_scales(scales, load64(block->scales, 0), half_at(block->d) * 0.125f);
    for (size_t k = 0; k < 8; k++, out += 2 * RUN) {
        const uint8_t *low = block->low + 4 * k;
        unsigned high = block->high[k];
        put_signed(out, sl_values_iq2, grid[low[0] | (high << 8 & 0x300)], grid[low[1] | (high << 6 & 0x300)],
                   load16(block->signs, 2 * k), scales[k]);
        put_signed(out + RUN, sl_values_iq2, grid[low[2] | (high << 4 & 0x300)], grid[low[3] | (high << 2 & 0x300)],
                   load16(block->signs, 2 * k + 1), scales[8 + k]);
    }
}

/* 8 runs of 32, with an index for 4 elements. 28 bits of signs and 4 of the scale of a run are apart from the indices.
 * x = (d * (2 * scale + 1) / 4) * value. */
typedef struct sl_iq3_xxs {
    uint8_t d[2], codes[64], signs[32];
} sl_iq3_xxs;
_Static_assert(sizeof(sl_iq3_xxs) == 98, "blocks have no padding in files");

SL_INLINE uint64_t both(uint32_t first, uint32_t second) { return (uint64_t)second << 32 | first; }

TARGET SL_INLINE void restore_iq3_xxs(const sl_iq3_xxs *block, uint8_t *out) {
    const uint32_t *grid = sl_grid_iq3_xxs;
    float d = half_at(block->d) * 0.25f;
    for (size_t run = 0; run < 8; run++, out += 2 * RUN) {
        const uint8_t *index = block->codes + 8 * run;
        uint32_t word = load32(block->signs, run), signs = signs_of(word);
        float scale = top_scale(word, d);
        put_signed(out, sl_values_iq3_xxs, both(grid[index[0]], grid[index[1]]), both(grid[index[2]], grid[index[3]]),
                   (uint16_t)signs, scale);
        put_signed(out + RUN, sl_values_iq3_xxs, both(grid[index[4]], grid[index[5]]),
                   both(grid[index[6]], grid[index[7]]), (uint16_t)(signs >> 16), scale);
    }
}

/* 8 runs of 32, with an index of 9 bits for 4 elements; `high` holds the ninth bits. Scales have 4 bits: the low nibble
 * of byte k belongs to run 2k. x = (d * (2 * scale + 1)) * value. */
typedef struct sl_iq3_s {
    uint8_t d[2], low[64], high[8], signs[32], scales[4];
} sl_iq3_s;
_Static_assert(sizeof(sl_iq3_s) == 110, "blocks have no padding in files");

/* Returns the codes of 8 elements. */
SL_INLINE uint64_t iq3_s_codes(const uint8_t low[2], unsigned high) {
    return both(sl_grid_iq3_s[low[0] | (high << 8 & 0x100)], sl_grid_iq3_s[low[1] | (high << 7 & 0x100)]);
}

TARGET SL_INLINE void restore_iq3_s(const sl_iq3_s *block, uint8_t *out) {
    float scales[16];
    odd_scales(scales, load32(block->scales, 0), half_at(block->d));
    for (size_t run = 0; run < 8; run++, out += 2 * RUN) {
        const uint8_t *low = block->low + 8 * run;
        unsigned high = block->high[run];
        float scale = scales[run / 2 + run % 2 * 8];
        put_signed(out, sl_values_iq3_s, iq3_s_codes(low, high), iq3_s_codes(low + 2, high >> 2),
                   load16(block->signs, 2 * run), scale);
        put_signed(out + RUN, sl_values_iq3_s, iq3_s_codes(low + 4, high >> 4), iq3_s_codes(low + 6, high >> 6),
                   load16(block->signs, 2 * run + 1), scale);
    }
}

/* Returns the codes of 8 elements. Bits 0 to 2 of `high` belong to the index; `minus` (0 or 1) is whether to subtract.
 */
SL_INLINE uint64_t iq1_codes(uint8_t low, unsigned high, unsigned minus) {
    return sl_grid_iq1[low | (high << 8 & 0x700)] | minus * UINT64_C(0x0808080808080808);
}

/* 8 runs of 32, each with a word in `high`: 3 bits of the index per 8 elements, 3 bits of the scale, and whether to
 * subtract. x = (d * (2 * scale + 1) / 8) * value. */
typedef struct sl_iq1_s {
    uint8_t d[2], low[32], high[16];
} sl_iq1_s;
_Static_assert(sizeof(sl_iq1_s) == 50, "blocks have no padding in files");

TARGET SL_INLINE void restore_iq1_s(const sl_iq1_s *block, uint8_t *out) {
    float d = half_at(block->d) * 0.125f;
    for (size_t run = 0; run < 8; run++, out += 2 * RUN) {
        const uint8_t *low = block->low + 4 * run;
        unsigned high = load16(block->high, run), minus = high >> 15;
        float scale = (float)(int32_t)((high >> 11 & 14) | 1) * d;
        put_from(out, sl_values_iq1, codes_of(iq1_codes(low[0], high, minus), iq1_codes(low[1], high >> 3, minus)),
                 scale);
        put_from(out + RUN, sl_values_iq1,
                 codes_of(iq1_codes(low[2], high >> 6, minus), iq1_codes(low[3], high >> 9, minus)), scale);
    }
}

/* 16 runs of 16, each with a byte in `high`: per 8 elements 3 bits of the index, and whether to subtract. Each of the
 * four words of `scales` holds four scales of 3 bits, and a nibble of d at the top. x = (d * (2 * scale + 1) / 8) *
 * value. */
typedef struct sl_iq1_m {
    uint8_t low[32], high[16], scales[8];
} sl_iq1_m;
_Static_assert(sizeof(sl_iq1_m) == 56, "blocks have no padding in files");

TARGET SL_INLINE void restore_iq1_m(const sl_iq1_m *block, uint8_t *out) {
    uint64_t words = load64(block->scales, 0);
    const uint8_t half[2] = {(uint8_t)((words >> 12 & 0x0f) | (words >> 24 & 0xf0)),
                             (uint8_t)((words >> 44 & 0x0f) | (words >> 56 & 0xf0))};
    float d = half_at(half) * 0.125f;
    for (size_t run = 0; run < 16; run++, out += RUN) {
        const uint8_t *low = block->low + 2 * run;
        unsigned high = block->high[run], word = load16(block->scales, run / 4);
        float scale = (float)(int32_t)((word << 1 >> run % 4 * 3 & 14) | 1) * d;
        put_from(out, sl_values_iq1,
                 codes_of(iq1_codes(low[0], high, high >> 3 & 1), iq1_codes(low[1], high >> 4, high >> 7)), scale);
    }
}

#define EACH_IQ_TYPE(ROW)           \
    ROW(SL_IQ2_XXS, iq2_xxs, SUPER) \
    ROW(SL_IQ2_XS, iq2_xs, SUPER)   \
    ROW(SL_IQ2_S, iq2_s, SUPER)     \
    ROW(SL_IQ3_XXS, iq3_xxs, SUPER) \
    ROW(SL_IQ3_S, iq3_s, SUPER)     \
    ROW(SL_IQ1_S, iq1_s, SUPER)     \
    ROW(SL_IQ1_M, iq1_m, SUPER)

#endif
