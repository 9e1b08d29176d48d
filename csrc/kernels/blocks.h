/* Layouts of ggml blocks that are read and written, beside those in quant.h, and the tables of codes. The layouts are
 * from https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Included only by the files of the tiers. */
#ifndef SL_BLOCKS_H
#define SL_BLOCKS_H

#include "kernels/quant.h"
#include "kernels/scalar.h"

/* Stores 32 codes of four bits: codes j and j + 16 share a byte. */
SL_INLINE void store_nibbles(const uint8_t numbers[SL_QK], uint8_t nibbles[16]) {
    for (size_t j = 0; j < 16; j++) nibbles[j] = (uint8_t)(numbers[j] | numbers[j + 16] << 4);
}

/* Stores codes of five bits, with the fifth bits separate. */
SL_INLINE void store_five_bits(const uint8_t numbers[SL_QK], uint8_t high[4], uint8_t nibbles[16]) {
    uint32_t fifth = 0;
    for (size_t j = 0; j < 16; j++) {
        nibbles[j] = (uint8_t)((numbers[j] & 15) | numbers[j + 16] << 4);
        fifth |= (uint32_t)(numbers[j] >> 4) << j | (uint32_t)(numbers[j + 16] >> 4) << (j + 16);
    }
    store32(high, 0, fifth);
}

static const int8_t IQ4_TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

/* x = d * IQ4_TABLE[code]; the low nibbles hold the first 16 elements. */
typedef struct sl_iq4_nl {
    uint8_t d[2], codes[16];
} sl_iq4_nl;
_Static_assert(sizeof(sl_iq4_nl) == 18, "blocks have no padding in files");

/* Twice the values of E2M1 (OCP Microscaling Formats v1.0), which makes them integers; scales are halved. Code 8 is 0,
 * not -0. */
static const int8_t E2M1_TABLE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* The scale is 2^(exponent - 128), half of E8M0's. */
typedef struct sl_mxfp4 {
    uint8_t exponent, codes[16];
} sl_mxfp4;
_Static_assert(sizeof(sl_mxfp4) == 17, "blocks have no padding in files");

/* Four runs of 16; the low nibbles of 8 bytes hold the first 8 elements of a run. x = half_ue4m3(scale) *
 * E2M1_TABLE[code]. */
typedef struct sl_nvfp4 {
    uint8_t scales[4], codes[32];
} sl_nvfp4;
_Static_assert(sizeof(sl_nvfp4) == 36, "blocks have no padding in files");

/* Half of a scale: E4M3 without a sign. Its only NaN means 0. */
SL_INLINE float half_ue4m3(uint8_t scale) {
    uint32_t bits = scale & 0x7f;
    if (bits < 8) return (float)bits * 0x1p-10f;
    return scale == 0x7f ? 0.0f : float_of((bits << 20) + ((127 - 8) << 23));
}

/* 16 runs of 16: in the run's entry of `scales`, the low nibble scales the codes and the high nibble the minimum. x =
 * (d * scale) * code - dmin * minimum. Codes have 2 bits: a byte holds the codes of elements 32 apart. */
typedef struct sl_q2_k {
    uint8_t scales[16], codes[64], d[2], dmin[2];
} sl_q2_k;
_Static_assert(sizeof(sl_q2_k) == 84, "blocks have no padding in files");

/* 16 runs of 16. x = (d * (scale - 32)) * (code - 4 unless its bit of `high` is set). Scales have 6 bits: the low 4 of
 * runs k and k + 8 share byte k, the high 2 of runs k, k + 4, k + 8 and k + 12 share byte 8 + k. */
typedef struct sl_q3_k {
    uint8_t high[32], codes[64], scales[12], d[2];
} sl_q3_k;
_Static_assert(sizeof(sl_q3_k) == 110, "blocks have no padding in files");

/* 8 runs of 32; the low nibbles hold the first 16 elements. x = (d * (scale - 32)) * IQ4_TABLE[code]. Scales have 6
 * bits: the low 4 of runs 2k and 2k + 1 share byte k of `low`, and the high 2 of run k are bits 2k and 2k + 1 of
 * `high`. */
typedef struct sl_iq4_xs {
    uint8_t d[2], high[2], low[4], codes[128];
} sl_iq4_xs;
_Static_assert(sizeof(sl_iq4_xs) == 136, "blocks have no padding in files");

/* Ternary: x = d * (code - 1), codes of 2 bits. For each half of 128 elements, a byte holds the codes of elements 32
 * apart. */
typedef struct sl_tq2_0 {
    uint8_t codes[64], d[2];
} sl_tq2_0;
_Static_assert(sizeof(sl_tq2_0) == 66, "blocks have no padding in files");

/* Ternary, with five digits of base 3 in a byte v: v / 256 is about 0.d1d2d3d4d5 in base 3, so that 3 * v >> 8 is the
 * first digit and the low 8 bits of 3 * v are the rest. Elements of a byte are 32 apart in the first 32 bytes, then 16,
 * and 4 in the last 4 bytes, which have four elements each. */
typedef struct sl_tq1_0 {
    uint8_t codes[48], last[4], d[2];
} sl_tq1_0;
_Static_assert(sizeof(sl_tq1_0) == 54, "blocks have no padding in files");

#endif
