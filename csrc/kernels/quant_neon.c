/* Quantization with NEON. */
#include "kernels/blocks.h"
#include "kernels/isa.h"

#ifdef SL_NEON

/* 16 elements: four registers of f32, a register of int8. */
#define STEP ((size_t)16)
/* Bytes of f32 in a block. */
#define BLOCK (4 * SL_QK)

/* Register k of f32. */
static float32x4_t load_f32(const uint8_t *source, int k) { return vreinterpretq_f32_u8(vld1q_u8(source + 16 * k)); }

static uint32x4_t load_bits(const uint8_t *source, int k) { return vreinterpretq_u32_u8(vld1q_u8(source + 16 * k)); }

/* ---- the largest |x| ---- */

static uint32x4_t abs_bits(const uint8_t *source, int k) {
    return vandq_u32(load_bits(source, k), vdupq_n_u32(0x7fffffff));
}

static uint32_t sl_absmax_f32_neon(const void *source, size_t count) {
    const uint8_t *in = source;
    uint32x4_t a = vdupq_n_u32(0), b = a, c = a, d = a;
    size_t i = 0;
    for (; i + STEP <= count; i += STEP) {
        a = vmaxq_u32(a, abs_bits(in + 4 * i, 0));
        b = vmaxq_u32(b, abs_bits(in + 4 * i, 1));
        c = vmaxq_u32(c, abs_bits(in + 4 * i, 2));
        d = vmaxq_u32(d, abs_bits(in + 4 * i, 3));
    }
    uint32_t absmax = vmaxvq_u32(vmaxq_u32(vmaxq_u32(a, b), vmaxq_u32(c, d)));
    uint32_t rest = sl_quant_scalar.absmax_f32(in + 4 * i, count - i);
    return absmax > rest ? absmax : rest;
}

/* Returns the largest of the first count / 16 * 16 16-bit floats, ignoring signs. */
static uint16_t absmax_half(const uint8_t *in, size_t count) {
    const uint16x8_t magnitude = vdupq_n_u16(0x7fff);
    uint16x8_t a = vdupq_n_u16(0), b = a;
    for (size_t i = 0; i + STEP <= count; i += STEP) {
        a = vmaxq_u16(a, vandq_u16(vreinterpretq_u16_u8(vld1q_u8(in + 2 * i)), magnitude));
        b = vmaxq_u16(b, vandq_u16(vreinterpretq_u16_u8(vld1q_u8(in + 2 * i + 16)), magnitude));
    }
    return vmaxvq_u16(vmaxq_u16(a, b));
}

static uint32_t sl_absmax_bf16_neon(const void *source, size_t count) {
    const uint8_t *in = source;
    size_t done = count / STEP * STEP;
    uint32_t absmax = (uint32_t)absmax_half(in, count) << 16,
             rest = sl_quant_scalar.absmax_bf16(in + 2 * done, count - done);
    return absmax > rest ? absmax : rest;
}

static uint32_t sl_absmax_f16_neon(const void *source, size_t count) {
    const uint8_t *in = source;
    size_t done = count / STEP * STEP;
    uint16_t half = absmax_half(in, count);
    uint32_t absmax = sl_quant_scalar.absmax_f16(&half, 1),
             rest = sl_quant_scalar.absmax_f16(in + 2 * done, count - done);
    return absmax > rest ? absmax : rest;
}

static void sl_absmax_each_neon(const void *source, uint32_t *absmax, size_t count) {
    const uint8_t *in = source;
    size_t i = 0;
    for (; i + 4 <= count; i += 4) vst1q_u32(absmax + i, vmaxq_u32(vld1q_u32(absmax + i), abs_bits(in + 4 * i, 0)));
    sl_quant_scalar.absmax_each(in + 4 * i, absmax + i, count - i);
}

/* ---- int8 ---- */

/* FCVTAS rounds half away from zero and saturates; FMINNM of a number and a quiet NaN is the number. */
static int32x4_t int8_codes(float32x4_t value) { return vcvtaq_s32_f32(vminnmq_f32(value, vdupq_n_f32(127.0f))); }

static int8x16_t pack_int8(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) {
    int16x8_t low = vcombine_s16(vqmovn_s32(a), vqmovn_s32(b)), high = vcombine_s16(vqmovn_s32(c), vqmovn_s32(d));
    return vcombine_s8(vqmovn_s16(low), vqmovn_s16(high));
}

static int8x16_t codes_of_16(const uint8_t *in, float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
    return pack_int8(int8_codes(vmulq_f32(load_f32(in, 0), a)), int8_codes(vmulq_f32(load_f32(in, 1), b)),
                     int8_codes(vmulq_f32(load_f32(in, 2), c)), int8_codes(vmulq_f32(load_f32(in, 3), d)));
}

static void sl_f32_to_int8_neon(const void *source, int8_t *destination, size_t count, float factor) {
    const uint8_t *in = source;
    float32x4_t all = vdupq_n_f32(factor);
    size_t i = 0;
    for (; i + STEP <= count; i += STEP) vst1q_s8(destination + i, codes_of_16(in + 4 * i, all, all, all, all));
    sl_quant_scalar.to_int8(in + 4 * i, destination + i, count - i, factor);
}

static void sl_f32_to_int8_each_neon(const void *source, int8_t *destination, size_t count, const float *factors) {
    const uint8_t *in = source;
    size_t i = 0;
    for (; i + STEP <= count; i += STEP) {
        const float *f = factors + i;
        vst1q_s8(destination + i,
                 codes_of_16(in + 4 * i, vld1q_f32(f), vld1q_f32(f + 4), vld1q_f32(f + 8), vld1q_f32(f + 12)));
    }
    sl_quant_scalar.to_int8_each(in + 4 * i, destination + i, count - i, factors + i);
}

const sl_quant sl_quant_neon = {
    .absmax_f32 = sl_absmax_f32_neon,
    .absmax_bf16 = sl_absmax_bf16_neon,
    .absmax_f16 = sl_absmax_f16_neon,
    .absmax_each = sl_absmax_each_neon,
    .to_int8 = sl_f32_to_int8_neon,
    .to_int8_each = sl_f32_to_int8_each_neon,
};

/* ---- f32 to blocks ---- */

static uint32_t absmax_of_block(const uint8_t *x) {
    uint32x4_t a = vmaxq_u32(abs_bits(x, 0), abs_bits(x, 1)), b = vmaxq_u32(abs_bits(x, 2), abs_bits(x, 3));
    uint32x4_t c = vmaxq_u32(abs_bits(x, 4), abs_bits(x, 5)), d = vmaxq_u32(abs_bits(x, 6), abs_bits(x, 7));
    return vmaxvq_u32(vmaxq_u32(vmaxq_u32(a, b), vmaxq_u32(c, d)));
}

static void store_f16(uint8_t *destination, float value) {
    uint16_t half = vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(value))), 0);
    memcpy(destination, &half, sizeof half);
}

/* Returns registers k and k + 1 as words. */
static int16x8_t scaled(const uint8_t *x, int k, float32x4_t inverse) {
    int32x4_t low = vcvtaq_s32_f32(vmulq_f32(load_f32(x, k), inverse));
    return vcombine_s16(vmovn_s32(low), vmovn_s32(vcvtaq_s32_f32(vmulq_f32(load_f32(x, k + 1), inverse))));
}

/* |x * inverse| < 7.5 in every block that gets here, so clamping is not needed. */
static void sl_f32_to_q4_0_absmax_neon(const void *source, void *destination, size_t count) {
    const int16x8_t offset = vdupq_n_s16(8 + 8 * 16);
    sl_q4_0 *block = destination;
    for (size_t b = 0; b < count / SL_QK; b++, block++) {
        const uint8_t *x = (const uint8_t *)source + BLOCK * b;
        uint32_t absmax = absmax_of_block(x);
        float d = float_of(absmax) / 7.0f;
        if (absmax >= SL_F32_INFINITY || !(d > SL_SCALE_WITHOUT_INVERSE)) {
            sl_convert_rest(SL_F32, SL_Q4_0_ABSMAX, x, block, SL_QK);
            continue;
        }
        float32x4_t inverse = vdupq_n_f32(1.0f / d);
        int16x8_t low = vaddq_s16(scaled(x, 0, inverse), vshlq_n_s16(scaled(x, 4, inverse), 4));
        int16x8_t high = vaddq_s16(scaled(x, 2, inverse), vshlq_n_s16(scaled(x, 6, inverse), 4));
        store_f16(block->d, d);
        vst1_u8(block->codes, vreinterpret_u8_s8(vmovn_s16(vaddq_s16(low, offset))));
        vst1_u8(block->codes + 8, vreinterpret_u8_s8(vmovn_s16(vaddq_s16(high, offset))));
    }
}

static uint32_t most_positive(const uint8_t *x) {
    int32x4_t most = vreinterpretq_s32_u32(load_bits(x, 0));
    for (int k = 1; k < 8; k++) most = vmaxq_s32(most, vreinterpretq_s32_u32(load_bits(x, k)));
    int32_t bits = vmaxvq_s32(most);
    return bits > 0 ? (uint32_t)bits : 0;
}

static uint32_t most_negative(const uint8_t *x) {
    uint32x4_t lowest = load_bits(x, 0);
    for (int k = 1; k < 8; k++) lowest = vmaxq_u32(lowest, load_bits(x, k));
    uint32_t bits = vmaxvq_u32(lowest);
    return bits > 0x80000000 ? bits & 0x7fffffff : 0;
}

/* Returns registers k and k + 1 as words, from 0 to `most`; 0 is in the middle. */
static int16x8_t truncated(const uint8_t *x, int k, float32x4_t inverse, int16_t most) {
    const float32x4_t offset = vdupq_n_f32((float)most / 2.0f + 1.0f);
    int32x4_t low = vcvtq_s32_f32(vaddq_f32(vmulq_f32(load_f32(x, k), inverse), offset));
    int32x4_t high = vcvtq_s32_f32(vaddq_f32(vmulq_f32(load_f32(x, k + 1), inverse), offset));
    return vminq_s16(vcombine_s16(vmovn_s32(low), vmovn_s32(high)), vdupq_n_s16(most));
}

/* Returns the scale of a block as ggml rounds it, -max * factor, or 0 for blocks that the scalar kernel must take. */
static float signed_scale(const uint8_t *x, float factor) {
    uint32_t positive = most_positive(x), negative = most_negative(x),
             absmax = positive > negative ? positive : negative;
    float scale = float_of(absmax) * factor;
    if (absmax >= SL_F32_INFINITY || positive == negative || !(scale > SL_SCALE_WITHOUT_INVERSE)) return 0.0f;
    return positive > negative ? -scale : scale;
}

/* The scalar kernel takes blocks with NaN or infinity, blocks with a scale without an inverse, and blocks in which the
 * largest positive and the most negative element have equal magnitudes, so that the order decides. */
static void sl_f32_to_q4_0_neon(const void *source, void *destination, size_t count) {
    sl_q4_0 *block = destination;
    for (size_t b = 0; b < count / SL_QK; b++, block++) {
        const uint8_t *x = (const uint8_t *)source + BLOCK * b;
        float d = signed_scale(x, 0.125f);
        if (d == 0.0f) {
            sl_convert_rest(SL_F32, SL_Q4_0, x, block, SL_QK);
            continue;
        }
        float32x4_t inverse = vdupq_n_f32(1.0f / d);
        int16x8_t low = vorrq_s16(truncated(x, 0, inverse, 15), vshlq_n_s16(truncated(x, 4, inverse, 15), 4));
        int16x8_t high = vorrq_s16(truncated(x, 2, inverse, 15), vshlq_n_s16(truncated(x, 6, inverse, 15), 4));
        store_f16(block->d, d);
        vst1_u8(block->codes, vreinterpret_u8_s8(vmovn_s16(low)));
        vst1_u8(block->codes + 8, vreinterpret_u8_s8(vmovn_s16(high)));
    }
}

static void sl_f32_to_q8_0_neon(const void *source, void *destination, size_t count) {
    sl_q8_0 *block = destination;
    for (size_t b = 0; b < count / SL_QK; b++, block++) {
        const uint8_t *x = (const uint8_t *)source + BLOCK * b;
        uint32_t absmax = absmax_of_block(x);
        float d = float_of(absmax) / 127.0f;
        if (absmax >= SL_F32_INFINITY || !(d > SL_SCALE_WITHOUT_INVERSE)) {
            sl_convert_rest(SL_F32, SL_Q8_0, x, block, SL_QK);
            continue;
        }
        float32x4_t inverse = vdupq_n_f32(1.0f / d);
        store_f16(block->d, d);
        for (int k = 0; k < 8; k += 2) vst1_s8(block->codes + 4 * k, vmovn_s16(scaled(x, k, inverse)));
    }
}

/* Stores 32 codes of five bits, in order. */
static void store_fives(uint8_t *high, uint8_t *nibbles, uint8x16_t first, uint8x16_t last) {
    static const uint8_t BITS[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t bits = vld1q_u8(BITS), fifth = vdupq_n_u8(16);
    uint8x16_t a = vandq_u8(vtstq_u8(first, fifth), bits), b = vandq_u8(vtstq_u8(last, fifth), bits);
    high[0] = vaddv_u8(vget_low_u8(a));
    high[1] = vaddv_u8(vget_high_u8(a));
    high[2] = vaddv_u8(vget_low_u8(b));
    high[3] = vaddv_u8(vget_high_u8(b));
    vst1q_u8(nibbles, vorrq_u8(vandq_u8(first, vdupq_n_u8(15)), vshlq_n_u8(last, 4)));
}

static uint8x16_t bytes_of(int16x8_t low, int16x8_t high) {
    return vreinterpretq_u8_s8(vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

static void sl_f32_to_q5_0_neon(const void *source, void *destination, size_t count) {
    sl_q5_0 *block = destination;
    for (size_t b = 0; b < count / SL_QK; b++, block++) {
        const uint8_t *x = (const uint8_t *)source + BLOCK * b;
        float d = signed_scale(x, 0.0625f);
        if (d == 0.0f) {
            sl_convert_rest(SL_F32, SL_Q5_0, x, block, SL_QK);
            continue;
        }
        float32x4_t inverse = vdupq_n_f32(1.0f / d);
        store_f16(block->d, d);
        store_fives(block->high, block->codes, bytes_of(truncated(x, 0, inverse, 31), truncated(x, 2, inverse, 31)),
                    bytes_of(truncated(x, 4, inverse, 31), truncated(x, 6, inverse, 31)));
    }
}

/* ---- blocks with a minimum ---- */

typedef struct block_range {
    float least, inverse;
} block_range;

/* Sets the scale and the minimum for codes from 0 to `most`. Returns false if the scalar kernel must take the block:
 * an element is not finite, the least are zeros, whose first sign counts, or the scale has no inverse. */
static bool scale_of_range(const uint8_t *x, float most, uint8_t *d, uint8_t *m, block_range *out) {
    float32x4_t least = load_f32(x, 0), largest = least;
    for (int k = 1; k < 8; k++) {
        least = vminq_f32(least, load_f32(x, k));
        largest = vmaxq_f32(largest, load_f32(x, k));
    }
    out->least = vminvq_f32(least);
    float difference = vmaxvq_f32(largest) - out->least, scale = difference / most;
    if (absmax_of_block(x) >= SL_F32_INFINITY || out->least == 0.0f) return false;
    if (!(scale > SL_SCALE_WITHOUT_INVERSE && scale < float_of(SL_F32_INFINITY))) return false;
    out->inverse = 1.0f / scale;
    store_f16(d, scale);
    store_f16(m, out->least);
    return true;
}

/* Returns the codes of registers k to k + 3. */
static uint8x16_t codes_in_range(const uint8_t *x, int k, block_range range) {
    const float32x4_t least = vdupq_n_f32(range.least), inverse = vdupq_n_f32(range.inverse), half = vdupq_n_f32(0.5f);
    int16x4_t words[4];
    for (int i = 0; i < 4; i++) {
        float32x4_t above = vsubq_f32(load_f32(x, k + i), least);
        words[i] = vmovn_s32(vcvtq_s32_f32(vaddq_f32(vmulq_f32(above, inverse), half)));
    }
    return bytes_of(vcombine_s16(words[0], words[1]), vcombine_s16(words[2], words[3]));
}

static void sl_f32_to_q4_1_neon(const void *source, void *destination, size_t count) {
    const uint8x16_t most = vdupq_n_u8(15);
    sl_q4_1 *block = destination;
    for (size_t b = 0; b < count / SL_QK; b++, block++) {
        const uint8_t *x = (const uint8_t *)source + BLOCK * b;
        block_range range;
        if (!scale_of_range(x, 15.0f, block->d, block->m, &range)) {
            sl_convert_rest(SL_F32, SL_Q4_1, x, block, SL_QK);
            continue;
        }
        uint8x16_t first = vminq_u8(codes_in_range(x, 0, range), most);
        vst1q_u8(block->codes, vorrq_u8(first, vshlq_n_u8(vminq_u8(codes_in_range(x, 4, range), most), 4)));
    }
}

static void sl_f32_to_q5_1_neon(const void *source, void *destination, size_t count) {
    sl_q5_1 *block = destination;
    for (size_t b = 0; b < count / SL_QK; b++, block++) {
        const uint8_t *x = (const uint8_t *)source + BLOCK * b;
        block_range range;
        if (!scale_of_range(x, 31.0f, block->d, block->m, &range)) {
            sl_convert_rest(SL_F32, SL_Q5_1, x, block, SL_QK);
            continue;
        }
        store_fives(block->high, block->codes, codes_in_range(x, 0, range), codes_in_range(x, 4, range));
    }
}

/* ---- ternary ---- */

/* Sets the scale of a super-block and its inverse. Returns false if an element is not finite or the scale has no
 * inverse; the scalar kernel takes these. */
static bool ternary_scale(const uint8_t *x, uint8_t *d, float32x4_t *inverse) {
    uint32_t absmax = sl_absmax_f32_neon(x, SL_SUPER);
    float scale = float_of(absmax);
    if (absmax >= SL_F32_INFINITY || !(scale > SL_SCALE_WITHOUT_INVERSE)) return false;
    *inverse = vdupq_n_f32(1.0f / scale);
    store_f16(d, scale);
    return true;
}

/* Returns the codes of 16 elements. */
static uint8x16_t ternary_codes(const uint8_t *x, size_t k, float32x4_t inverse) {
    const uint8_t *in = x + 4 * 16 * k;
    return vaddq_u8(bytes_of(scaled(in, 0, inverse), scaled(in, 2, inverse)), vdupq_n_u8(1));
}

static void sl_f32_to_tq2_0_neon(const void *source, void *destination, size_t count) {
    sl_tq2_0 *block = destination;
    for (size_t b = 0; b < count / SL_SUPER; b++, block++) {
        const uint8_t *x = (const uint8_t *)source + 4 * SL_SUPER * b;
        float32x4_t inverse;
        if (!ternary_scale(x, block->d, &inverse)) {
            sl_convert_rest(SL_F32, SL_TQ2_0, x, block, SL_SUPER);
            continue;
        }
        for (size_t i = 0; i < 4; i++) { /* 16 bytes; elements 32 apart */
            size_t first = i / 2 * 8 + i % 2;
            uint8x16_t bytes = ternary_codes(x, first + 6, inverse);
            for (size_t k = 3; k-- > 0;)
                bytes = vorrq_u8(vshlq_n_u8(bytes, 2), ternary_codes(x, first + 2 * k, inverse));
            vst1q_u8(block->codes + 16 * i, bytes);
        }
    }
}

/* Returns 3 * number + code, at most 242. */
static uint8x16_t with_digit(uint8x16_t number, uint8x16_t code) { return vmlaq_u8(code, number, vdupq_n_u8(3)); }

/* Returns number / 243 * 256, rounded up: (256 * number + 242) / 243. 34522 is 2^23 / 243, rounded up. */
static uint8x8_t ternary_half(uint8x8_t number) {
    uint16x8_t above = vaddq_u16(vmull_u8(number, vdup_n_u8(13)), vdupq_n_u16(242));
    uint16x4_t low = vshrn_n_u32(vmull_n_u16(vget_low_u16(above), 34522), 16);
    uint16x4_t high = vshrn_n_u32(vmull_n_u16(vget_high_u16(above), 34522), 16);
    return vadd_u8(number, vshrn_n_u16(vcombine_u16(low, high), 7));
}

static uint8x16_t ternary_bytes(uint8x16_t numbers) {
    return vcombine_u8(ternary_half(vget_low_u8(numbers)), ternary_half(vget_high_u8(numbers)));
}

static void sl_f32_to_tq1_0_neon(const void *source, void *destination, size_t count) {
    sl_tq1_0 *block = destination;
    for (size_t b = 0; b < count / SL_SUPER; b++, block++) {
        const uint8_t *x = (const uint8_t *)source + 4 * SL_SUPER * b;
        float32x4_t inverse;
        if (!ternary_scale(x, block->d, &inverse)) {
            sl_convert_rest(SL_F32, SL_TQ1_0, x, block, SL_SUPER);
            continue;
        }
        for (size_t i = 0; i < 3; i++) { /* 16 bytes; elements 32, 32 and 16 apart */
            size_t first = i < 2 ? i : 10, apart = i < 2 ? 2 : 1;
            uint8x16_t number = vdupq_n_u8(0);
            for (size_t k = 0; k < 5; k++) number = with_digit(number, ternary_codes(x, first + apart * k, inverse));
            vst1q_u8(block->codes + 16 * i, ternary_bytes(number));
        }
        uint32x4_t codes = vreinterpretq_u32_u8(ternary_codes(x, 15, inverse));
        uint8x16_t number = vreinterpretq_u8_u32(vdupq_laneq_u32(codes, 0));
        number = with_digit(number, vreinterpretq_u8_u32(vdupq_laneq_u32(codes, 1)));
        number = with_digit(number, vreinterpretq_u8_u32(vdupq_laneq_u32(codes, 2)));
        number = with_digit(number, vreinterpretq_u8_u32(vdupq_laneq_u32(codes, 3)));
        number = ternary_bytes(with_digit(number, vdupq_n_u8(0)));
        uint32_t last = vgetq_lane_u32(vreinterpretq_u32_u8(number), 0);
        memcpy(block->last, &last, sizeof last);
    }
}

const sl_kernel sl_quant_kernels_neon[] = {
    {SL_F32, SL_Q4_0_ABSMAX, sl_f32_to_q4_0_absmax_neon},
    {SL_F32, SL_Q4_0, sl_f32_to_q4_0_neon},
    {SL_F32, SL_Q8_0, sl_f32_to_q8_0_neon},
    {SL_F32, SL_Q4_1, sl_f32_to_q4_1_neon},
    {SL_F32, SL_Q5_0, sl_f32_to_q5_0_neon},
    {SL_F32, SL_Q5_1, sl_f32_to_q5_1_neon},
    {SL_F32, SL_TQ1_0, sl_f32_to_tq1_0_neon},
    {SL_F32, SL_TQ2_0, sl_f32_to_tq2_0_neon},
    {-1, -1, NULL},
};

#endif
