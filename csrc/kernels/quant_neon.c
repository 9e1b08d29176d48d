/* Quantization with NEON. */
#include "kernels/isa.h"
#include "kernels/quant.h"

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

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

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

/* Returns registers k and k + 1 as words, from 0 to 15. */
static int16x8_t truncated(const uint8_t *x, int k, float32x4_t inverse) {
    const float32x4_t offset = vdupq_n_f32(8.5f);
    int32x4_t low = vcvtq_s32_f32(vaddq_f32(vmulq_f32(load_f32(x, k), inverse), offset));
    int32x4_t high = vcvtq_s32_f32(vaddq_f32(vmulq_f32(load_f32(x, k + 1), inverse), offset));
    return vminq_s16(vcombine_s16(vmovn_s32(low), vmovn_s32(high)), vdupq_n_s16(15));
}

/* The scalar kernel takes blocks with NaN or infinity, blocks with a scale without an inverse, and blocks in which the
 * largest positive and the most negative element have equal magnitudes, so that the order decides. */
static void sl_f32_to_q4_0_neon(const void *source, void *destination, size_t count) {
    sl_q4_0 *block = destination;
    for (size_t b = 0; b < count / SL_QK; b++, block++) {
        const uint8_t *x = (const uint8_t *)source + BLOCK * b;
        uint32_t positive = most_positive(x), negative = most_negative(x),
                 absmax = positive > negative ? positive : negative;
        float scale = float_of(absmax) * 0.125f;
        if (absmax >= SL_F32_INFINITY || positive == negative || !(scale > SL_SCALE_WITHOUT_INVERSE)) {
            sl_convert_rest(SL_F32, SL_Q4_0, x, block, SL_QK);
            continue;
        }
        float d = positive > negative ? -scale : scale;
        float32x4_t inverse = vdupq_n_f32(1.0f / d);
        int16x8_t low = vorrq_s16(truncated(x, 0, inverse), vshlq_n_s16(truncated(x, 4, inverse), 4));
        int16x8_t high = vorrq_s16(truncated(x, 2, inverse), vshlq_n_s16(truncated(x, 6, inverse), 4));
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

const sl_kernel sl_quant_kernels_neon[] = {
    {SL_F32, SL_Q4_0_ABSMAX, sl_f32_to_q4_0_absmax_neon},
    {SL_F32, SL_Q4_0, sl_f32_to_q4_0_neon},
    {SL_F32, SL_Q8_0, sl_f32_to_q8_0_neon},
    {-1, -1, NULL},
};

#endif
