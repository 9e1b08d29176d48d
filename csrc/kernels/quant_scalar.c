/* Quantization element by element: the reference for all tiers. */
#include "kernels/quant.h"

#include "kernels/blocks.h"
#include "kernels/scalar.h"

/* ---- the largest |x| ---- */

static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

static uint32_t sl_absmax_f32_scalar(const void *source, size_t count) {
    uint32_t absmax = 0;
    for (size_t i = 0; i < count; i++) absmax = larger(absmax, load32(source, i) & 0x7fffffff);
    return absmax;
}

static uint32_t absmax_half(const void *source, size_t count) {
    uint32_t absmax = 0;
    for (size_t i = 0; i < count; i++) absmax = larger(absmax, load16(source, i) & 0x7fff);
    return absmax;
}

static uint32_t sl_absmax_bf16_scalar(const void *source, size_t count) { return absmax_half(source, count) << 16; }

/* All NaNs become the same NaN: quieted NaNs are not ordered by their codes, so the maximum of a tensor would depend on
 * its partition. */
static uint32_t sl_absmax_f16_scalar(const void *source, size_t count) {
    uint32_t absmax = absmax_half(source, count);
    return absmax > 0x7c00 ? 0x7fc00000 : f16_to_f32((uint16_t)absmax);
}

static void sl_absmax_each_scalar(const void *source, uint32_t *absmax, size_t count) {
    for (size_t i = 0; i < count; i++) absmax[i] = larger(absmax[i], load32(source, i) & 0x7fffffff);
}

/* ---- int8 ---- */

/* Rounds half away from zero; |value| must be < 2^31. A sum stored in a variable is rounded to f32 even if C computes
 * in f64 (FLT_EVAL_METHOD 1, GCC for s390x). */
static int32_t round_away(float value) {
    float sum = value + (value < 0.0f ? -SL_BELOW_HALF : SL_BELOW_HALF);
    return (int32_t)sum;
}

static int8_t int8_code(float value) {
    float below = value < 127.0f ? value : 127.0f; /* NaN compares false and becomes 127 */
    return (int8_t)round_away(below > -128.0f ? below : -128.0f);
}

static void sl_f32_to_int8_scalar(const void *source, int8_t *destination, size_t count, float factor) {
    for (size_t i = 0; i < count; i++) destination[i] = int8_code(float_of(load32(source, i)) * factor);
}

static void sl_f32_to_int8_each_scalar(const void *source, int8_t *destination, size_t count, const float *factors) {
    for (size_t i = 0; i < count; i++) destination[i] = int8_code(float_of(load32(source, i)) * factors[i]);
}

const sl_quant sl_quant_scalar = {
    .absmax_f32 = sl_absmax_f32_scalar,
    .absmax_bf16 = sl_absmax_bf16_scalar,
    .absmax_f16 = sl_absmax_f16_scalar,
    .absmax_each = sl_absmax_each_scalar,
    .to_int8 = sl_f32_to_int8_scalar,
    .to_int8_each = sl_f32_to_int8_each_scalar,
};

/* ---- f32 to blocks ---- */

/* d = absmax / 7 and 1 / d in f32. If 1 / d is infinite (absmax is 0, or below about 2^-125) the block is zero: d is 0
 * and every nibble 8. Only the stored d is rounded to f16: from 2^-25 down it becomes 0, while the codes, which are
 * computed from the f32, are not 0 but dequantize to 0. */
static void q4_0_absmax_block(const uint8_t *x, sl_q4_0 *block) {
    uint32_t absmax = sl_absmax_f32_scalar(x, SL_QK);
    memset(block, 0, sizeof *block);
    if (absmax >= SL_F32_INFINITY) {
        store16(block->d, 0, SL_NOT_FINITE);
        return;
    }
    float d = float_of(absmax) / 7.0f, inverse = 0.0f;
    if (d > SL_SCALE_WITHOUT_INVERSE)
        inverse = 1.0f / d;
    else
        d = 0.0f;
    store_half(block->d, d);
    for (size_t i = 0; i < SL_QK; i++) {
        int32_t q = round_away(float_of(load32(x, i)) * inverse);
        q = (q < -8 ? -8 : q > 7 ? 7 : q) + 8;
        block->codes[i % 16] |= (uint8_t)(i < 16 ? q : q << 4);
    }
}

static void sl_f32_to_q4_0_absmax_scalar(const void *source, void *destination, size_t count) {
    sl_q4_0 *blocks = destination;
    for (size_t b = 0; b < count / SL_QK; b++) q4_0_absmax_block((const uint8_t *)source + 4 * SL_QK * b, &blocks[b]);
}

/* Returns the first element with the largest |x|; +0 if all are zeros of either sign. */
static float signed_max(const uint8_t *x, uint32_t absmax) {
    if (absmax == 0) return 0.0f;
    size_t i = 0;
    while ((load32(x, i) & 0x7fffffff) != absmax) i++;
    return float_of(load32(x, i));
}

/* Produces the result of ggml's reference (quantize_row_q4_0_ref in ggml-quants.c) compiled for x86, even for scales
 * without an inverse: x * infinity is then infinity or NaN, cvttps2dq turns both into 0x80000000, and the low byte is
 * the code. A block of zeros of either sign has scale -0. */
static void q4_0_ggml_block(const uint8_t *x, sl_q4_0 *block) {
    uint32_t absmax = sl_absmax_f32_scalar(x, SL_QK);
    memset(block, 0, sizeof *block);
    if (absmax >= SL_F32_INFINITY) {
        store16(block->d, 0, SL_NOT_FINITE);
        return;
    }
    float d = signed_max(x, absmax) * -0.125f;
    store_half(block->d, d);
    bool has_inverse = d < -SL_SCALE_WITHOUT_INVERSE || d > SL_SCALE_WITHOUT_INVERSE;
    if (!has_inverse && d != 0.0f) return;
    float inverse = has_inverse ? 1.0f / d : 0.0f;
    for (size_t i = 0; i < SL_QK; i++) {
        float product = float_of(load32(x, i)) * inverse, sum = product + 8.5f;
        int32_t q = sum < 16.0f ? (int32_t)sum : 15; /* never negative */
        block->codes[i % 16] |= (uint8_t)(i < 16 ? q : q << 4);
    }
}

static void sl_f32_to_q4_0_scalar(const void *source, void *destination, size_t count) {
    sl_q4_0 *blocks = destination;
    for (size_t b = 0; b < count / SL_QK; b++) q4_0_ggml_block((const uint8_t *)source + 4 * SL_QK * b, &blocks[b]);
}

/* ggml's quantize_row_q8_0_ref; without an inverse every code is 0 there too (x * infinity, by cvttss2si). */
static void q8_0_block(const uint8_t *x, sl_q8_0 *block) {
    uint32_t absmax = sl_absmax_f32_scalar(x, SL_QK);
    memset(block, 0, sizeof *block);
    if (absmax >= SL_F32_INFINITY) {
        store16(block->d, 0, SL_NOT_FINITE);
        return;
    }
    float d = float_of(absmax) / 127.0f, inverse = d > SL_SCALE_WITHOUT_INVERSE ? 1.0f / d : 0.0f;
    store_half(block->d, d);
    for (size_t i = 0; i < SL_QK; i++) block->codes[i] = (int8_t)round_away(float_of(load32(x, i)) * inverse);
}

static void sl_f32_to_q8_0_scalar(const void *source, void *destination, size_t count) {
    sl_q8_0 *blocks = destination;
    for (size_t b = 0; b < count / SL_QK; b++) q8_0_block((const uint8_t *)source + 4 * SL_QK * b, &blocks[b]);
}

/* ggml's quantize_row_q5_0_ref; see q4_0_ggml_block. */
static void q5_0_block(const uint8_t *x, sl_q5_0 *block) {
    uint32_t absmax = sl_absmax_f32_scalar(x, SL_QK);
    memset(block, 0, sizeof *block);
    if (absmax >= SL_F32_INFINITY) {
        store16(block->d, 0, SL_NOT_FINITE);
        return;
    }
    float d = signed_max(x, absmax) * -0.0625f;
    store_half(block->d, d);
    bool has_inverse = d < -SL_SCALE_WITHOUT_INVERSE || d > SL_SCALE_WITHOUT_INVERSE;
    if (!has_inverse && d != 0.0f) return;
    float inverse = has_inverse ? 1.0f / d : 0.0f;
    uint8_t codes[SL_QK];
    for (size_t i = 0; i < SL_QK; i++) {
        float product = float_of(load32(x, i)) * inverse, sum = product + 16.5f;
        codes[i] = (uint8_t)(sum < 32.0f ? (int32_t)sum : 31); /* never negative */
    }
    store_five_bits(codes, block->high, block->codes);
}

/* Sets `d` and `m` to the scale and minimum that map codes from 0 to `most` onto the range of the elements. Returns
 * false if all codes are zero: all elements are equal, the scale has no inverse, the difference overflows (to an
 * infinite scale), or an element is NaN or infinite (the scale is then a NaN). */
static bool scale_of_range(const uint8_t *x, float most, uint8_t d[2], uint8_t m[2], float *least, float *inverse) {
    if (sl_absmax_f32_scalar(x, SL_QK) >= SL_F32_INFINITY) {
        store16(d, 0, SL_NOT_FINITE);
        return false;
    }
    float smallest = float_of(load32(x, 0)), largest = smallest;
    for (size_t i = 1; i < SL_QK; i++) { /* of zeros with both signs, the first wins */
        float value = float_of(load32(x, i));
        if (value < smallest) smallest = value;
        if (value > largest) largest = value;
    }
    float difference = largest - smallest, scale = difference / most;
    store_half(d, scale);
    store_half(m, smallest);
    *least = smallest;
    if (!(scale > SL_SCALE_WITHOUT_INVERSE)) return false;
    *inverse = 1.0f / scale;
    return *inverse > 0.0f;
}

/* Returns a code for scale_of_range; ggml adds a half and truncates. */
static uint8_t code_in_range(const uint8_t *x, size_t i, float least, float inverse) {
    float above = float_of(load32(x, i)) - least, product = above * inverse, sum = product + 0.5f;
    return (uint8_t)(int32_t)sum;
}

/* ggml's quantize_row_q4_1_ref. */
static void q4_1_block(const uint8_t *x, sl_q4_1 *block) {
    float least, inverse;
    memset(block, 0, sizeof *block);
    if (!scale_of_range(x, 15.0f, block->d, block->m, &least, &inverse)) return;
    for (size_t i = 0; i < SL_QK; i++) {
        uint8_t code = code_in_range(x, i, least, inverse);
        code = code < 15 ? code : 15;
        block->codes[i % 16] |= (uint8_t)(i < 16 ? code : code << 4);
    }
}

/* ggml's quantize_row_q5_1_ref. */
static void q5_1_block(const uint8_t *x, sl_q5_1 *block) {
    float least, inverse;
    uint8_t codes[SL_QK];
    memset(block, 0, sizeof *block);
    if (!scale_of_range(x, 31.0f, block->d, block->m, &least, &inverse)) return;
    for (size_t i = 0; i < SL_QK; i++) codes[i] = code_in_range(x, i, least, inverse);
    store_five_bits(codes, block->high, block->codes);
}

static void sl_f32_to_q4_1_scalar(const void *source, void *destination, size_t count) {
    sl_q4_1 *blocks = destination;
    for (size_t b = 0; b < count / SL_QK; b++) q4_1_block((const uint8_t *)source + 4 * SL_QK * b, &blocks[b]);
}

static void sl_f32_to_q5_0_scalar(const void *source, void *destination, size_t count) {
    sl_q5_0 *blocks = destination;
    for (size_t b = 0; b < count / SL_QK; b++) q5_0_block((const uint8_t *)source + 4 * SL_QK * b, &blocks[b]);
}

static void sl_f32_to_q5_1_scalar(const void *source, void *destination, size_t count) {
    sl_q5_1 *blocks = destination;
    for (size_t b = 0; b < count / SL_QK; b++) q5_1_block((const uint8_t *)source + 4 * SL_QK * b, &blocks[b]);
}

/* ---- ternary ---- */

/* Sets d to the largest |x| and returns its inverse: 0 if there is none, which makes all codes 1 (the value 0). ggml
 * converts the infinite products of subnormals to 1 too. Returns false if an element is NaN or infinite. */
static bool ternary_scale(const uint8_t *x, uint8_t d[2], float *inverse) {
    uint32_t absmax = sl_absmax_f32_scalar(x, SL_SUPER);
    if (absmax >= SL_F32_INFINITY) {
        store16(d, 0, SL_NOT_FINITE);
        return false;
    }
    float largest = float_of(absmax);
    *inverse = largest > SL_SCALE_WITHOUT_INVERSE ? 1.0f / largest : 0.0f;
    store_half(d, largest);
    return true;
}

/* Returns the code of an element: 0, 1 or 2. */
static uint32_t ternary_code(const uint8_t *x, size_t i, float inverse) {
    return (uint32_t)(round_away(float_of(load32(x, i)) * inverse) + 1);
}

/* ggml's quantize_row_tq2_0_ref. */
static void tq2_0_block(const uint8_t *x, sl_tq2_0 *block) {
    float inverse;
    memset(block, 0, sizeof *block);
    if (!ternary_scale(x, block->d, &inverse)) return;
    for (size_t i = 0; i < 64; i++)
        for (size_t k = 0; k < 4; k++)
            block->codes[i] |= (uint8_t)(ternary_code(x, i / 32 * 128 + i % 32 + 32 * k, inverse) << 2 * k);
}

/* Returns the byte of `count` codes that are `apart` elements apart, the first in the highest digit of five: v / 256
 * rounded up, see blocks.h. */
static uint8_t ternary_byte(const uint8_t *x, size_t first, size_t apart, size_t count, float inverse) {
    uint32_t number = 0;
    for (size_t k = 0; k < 5; k++) number = 3 * number + (k < count ? ternary_code(x, first + apart * k, inverse) : 0);
    return (uint8_t)((number * 256 + 242) / 243);
}

/* ggml's quantize_row_tq1_0_ref. */
static void tq1_0_block(const uint8_t *x, sl_tq1_0 *block) {
    float inverse;
    memset(block, 0, sizeof *block);
    if (!ternary_scale(x, block->d, &inverse)) return;
    for (size_t i = 0; i < 32; i++) block->codes[i] = ternary_byte(x, i, 32, 5, inverse);
    for (size_t i = 0; i < 16; i++) block->codes[32 + i] = ternary_byte(x, 160 + i, 16, 5, inverse);
    for (size_t i = 0; i < 4; i++) block->last[i] = ternary_byte(x, 240 + i, 4, 4, inverse);
}

static void sl_f32_to_tq1_0_scalar(const void *source, void *destination, size_t count) {
    sl_tq1_0 *blocks = destination;
    for (size_t b = 0; b < count / SL_SUPER; b++) tq1_0_block((const uint8_t *)source + 4 * SL_SUPER * b, &blocks[b]);
}

static void sl_f32_to_tq2_0_scalar(const void *source, void *destination, size_t count) {
    sl_tq2_0 *blocks = destination;
    for (size_t b = 0; b < count / SL_SUPER; b++) tq2_0_block((const uint8_t *)source + 4 * SL_SUPER * b, &blocks[b]);
}

const sl_kernel sl_quant_kernels_scalar[] = {
    {SL_F32, SL_Q4_0_ABSMAX, sl_f32_to_q4_0_absmax_scalar},
    {SL_F32, SL_Q4_0, sl_f32_to_q4_0_scalar},
    {SL_F32, SL_Q8_0, sl_f32_to_q8_0_scalar},
    {SL_F32, SL_Q4_1, sl_f32_to_q4_1_scalar},
    {SL_F32, SL_Q5_0, sl_f32_to_q5_0_scalar},
    {SL_F32, SL_Q5_1, sl_f32_to_q5_1_scalar},
    {SL_F32, SL_TQ1_0, sl_f32_to_tq1_0_scalar},
    {SL_F32, SL_TQ2_0, sl_f32_to_tq2_0_scalar},
    {-1, -1, NULL},
};
