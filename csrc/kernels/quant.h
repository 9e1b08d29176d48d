/* Quantization. Scalar C is the reference; every other tier produces the same bits.
 *
 * Blocks are conversions of convert.h: f32 to SL_Q4_0_ABSMAX; to SL_Q4_0, SL_Q4_1, SL_Q5_0, SL_Q5_1, SL_Q8_0,
 * SL_TQ1_0 and SL_TQ2_0 with ggml's rounding; to SL_Q2_K, ... SL_Q6_K (quant_k.h); to SL_IQ4_NL, SL_IQ4_XS, SL_MXFP4
 * and SL_NVFP4 (quant_blocks.h). Dequantization is in dequant.h. Each block of SL_QK elements has its own scale d, an
 * f16. d is NaN or infinite if and only if an element is, or the scale does not fit into f16; for SL_MXFP4 the exponent
 * is SL_E8M0_NAN, for SL_NVFP4 all scales are SL_UE4M3_NOT_FINITE. sl_blocks_finite finds such blocks, and their codes
 * are meaningless.
 *
 * Quantization with importance (an "importance matrix" of llama.cpp's) takes rows instead of blocks.
 *
 * int8 has a scale for a tensor or a channel and therefore takes two passes: the largest |x|, then the codes.
 */
#ifndef SL_QUANT_H
#define SL_QUANT_H

#include "kernels/convert.h"

/* Elements in a block, QK4_0 and QK8_0 of https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h */
#define SL_QK ((size_t)32)

/* Elements in a super-block (QK_K). */
#define SL_SUPER ((size_t)256)

/* Value j is (low nibble of codes[j] - 8) * d; value j + 16 uses the high nibble. */
typedef struct sl_q4_0 {
    uint8_t d[2]; /* f16 */
    uint8_t codes[16];
} sl_q4_0;

/* Value j is codes[j] * d. */
typedef struct sl_q8_0 {
    uint8_t d[2]; /* f16 */
    int8_t codes[32];
} sl_q8_0;

/* Value j is (low nibble of codes[j]) * d + m; value j + 16 uses the high nibble. */
typedef struct sl_q4_1 {
    uint8_t d[2], m[2]; /* f16 */
    uint8_t codes[16];
} sl_q4_1;

/* Like sl_q4_0 and sl_q4_1 with codes of five bits, (code - 16) * d and code * d + m: the fifth bit of code j is bit j
 * of `high`. */
typedef struct sl_q5_0 {
    uint8_t d[2], high[4], codes[16];
} sl_q5_0;

typedef struct sl_q5_1 {
    uint8_t d[2], m[2], high[4], codes[16];
} sl_q5_1;

/* ---- super-blocks of 256, see dequant.h ---- */

/* 8 runs of 32. x = (d * scale) * code - dmin * minimum. A byte holds the codes of elements 32 apart. */
typedef struct sl_q4_k {
    uint8_t d[2], dmin[2], scales[12], codes[128];
} sl_q4_k;

/* Like Q4_K, with a fifth bit: bit k of `high` for run k. */
typedef struct sl_q5_k {
    uint8_t d[2], dmin[2], scales[12], high[32], codes[128];
} sl_q5_k;

/* 16 runs of 16, scales of 8 bits. x = (d * scale) * (code - 32). For each half of 128 elements, `low` has the low 4
 * bits (elements 64 apart share a byte) and `high` the high 2 bits (elements 32 apart). */
typedef struct sl_q6_k {
    uint8_t low[128], high[64];
    int8_t scales[16];
    uint8_t d[2];
} sl_q6_k;

_Static_assert(sizeof(sl_q4_0) == 18 && sizeof(sl_q8_0) == 34 && sizeof(sl_q4_1) == 20 && sizeof(sl_q5_0) == 22 &&
                   sizeof(sl_q5_1) == 24 && sizeof(sl_q4_k) == 144 && sizeof(sl_q5_k) == 176 && sizeof(sl_q6_k) == 210,
               "blocks have no padding in files");

/* The f32 bits of infinity. As integers without the sign, the bits order as NaN > infinity > finite. */
#define SL_F32_INFINITY 0x7f800000u

/* The scale of a block with NaN or infinity: the bits of a NaN in f16. */
#define SL_NOT_FINITE 0x7e00

/* The only NaN among E8M0 scales. */
#define SL_E8M0_NAN 0xff
#define SL_UE4M3_NOT_FINITE 0xff /* ggml's quantizer writes no sign */

/* The largest scale without an inverse in f32: 2^128 is infinity, while the inverse of the next larger scale, 2^-128 +
 * 2^-149, is finite. */
#define SL_SCALE_WITHOUT_INVERSE 0x1p-128f

/* trunc(x + copysign(SL_BELOW_HALF, x)) rounds half away from zero for every f32. One half itself would fail: the
 * largest f32 below 0.5, plus 0.5, rounds to 1. */
#define SL_BELOW_HALF 0x1.fffffep-2f

/* f32 and 16-bit elements have any alignment and file byte order; factors and `absmax` have this machine's. */
typedef struct sl_quant {
    /* f32 bits of the largest |x|; 0 if count is 0; SL_F32_INFINITY or more if some x is NaN or infinite. */
    uint32_t (*absmax_f32)(const void *source, size_t count);
    uint32_t (*absmax_bf16)(const void *source, size_t count);
    uint32_t (*absmax_f16)(const void *source, size_t count);
    /* Raises absmax[i] to the bits of |source[i]|. */
    void (*absmax_each)(const void *source, uint32_t *absmax, size_t count);
    /* source * factor, rounded half away from zero, within [-128, 127]; NaN becomes 127. */
    void (*to_int8)(const void *source, int8_t *destination, size_t count, float factor);
    void (*to_int8_each)(const void *source, int8_t *destination, size_t count, const float *factors);
} sl_quant;

/* Quantizes a row of `count` f32 in file byte order, which must be finite, to whole blocks. Each element has an
 * importance in this machine's byte order, finite and at least 0: errors of important elements count more. */
typedef void (*sl_weighted_fn)(const void *row, const float *importance, void *blocks, size_t count);

typedef struct sl_weighted_kernel {
    int16_t to; /* SL_Q4_0, ...; to < 0 ends a table */
    sl_weighted_fn quantize;
} sl_weighted_kernel;

extern const sl_weighted_kernel sl_weighted_scalar[];
extern const sl_weighted_kernel sl_weighted_avx2[];
extern const sl_weighted_kernel sl_weighted_avx512[];
extern const sl_weighted_kernel sl_weighted_neon[];

extern const sl_quant sl_quant_scalar;
extern const sl_quant sl_quant_avx2; /* each exists only if isa.h defines it; NULL if the tier below is as fast */
extern const sl_quant sl_quant_avx512;
extern const sl_quant sl_quant_neon;

#endif
