/* Conversions with NEON. */
#include "kernels/convert_lanes.h"
#include "kernels/isa.h"

#ifdef SL_NEON

#define TARGET

#define STEP ((size_t)8)

static uint16x8_t load8(const uint8_t *source) { return vreinterpretq_u16_u8(vld1q_u8(source)); }

static void store4(uint8_t *destination, uint32x4_t bits) { vst1q_u8(destination, vreinterpretq_u8_u32(bits)); }

/* Sets all bits of the lanes with a NaN. */
static uint32x4_t nan_lanes(uint32x4_t bits) {
    float32x4_t value = vreinterpretq_f32_u32(bits);
    return vmvnq_u32(vceqq_f32(value, value));
}

static uint32x4_t quiet(uint32x4_t bits) {
    return vorrq_u32(bits, vandq_u32(nan_lanes(bits), vdupq_n_u32(0x00400000)));
}

SL_INLINE void bf16_to_f32(const uint8_t *in, uint8_t *out) {
    uint16x8_t halves = load8(in);
    store4(out, quiet(vshll_n_u16(vget_low_u16(halves), 16)));
    store4(out + 16, quiet(vshll_n_u16(vget_high_u16(halves), 16)));
}

CONVERSION(sl_bf16_to_f32_neon, bf16_to_f32, STEP, SL_BF16, 2, SL_F32, 4)

/* FCVTL keeps the payload of a NaN and makes it quiet (FPCR.DN is 0 when a process starts). */
SL_INLINE void f16_to_f32(const uint8_t *in, uint8_t *out) {
    float16x8_t halves = vreinterpretq_f16_u16(load8(in));
    store4(out, vreinterpretq_u32_f32(vcvt_f32_f16(vget_low_f16(halves))));
    store4(out + 16, vreinterpretq_u32_f32(vcvt_high_f32_f16(halves)));
}

CONVERSION(sl_f16_to_f32_neon, f16_to_f32, STEP, SL_F16, 2, SL_F32, 4)

SL_INLINE void i8_to_f32(const uint8_t *in, uint8_t *out) {
    int16x8_t codes = vmovl_s8(vreinterpret_s8_u8(vld1_u8(in)));
    store4(out, vreinterpretq_u32_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(codes)))));
    store4(out + 16, vreinterpretq_u32_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(codes)))));
}

CONVERSION(sl_i8_to_f32_neon, i8_to_f32, STEP, SL_I8, 1, SL_F32, 4)

SL_INLINE void u8_to_f32(const uint8_t *in, uint8_t *out) {
    uint16x8_t codes = vmovl_u8(vld1_u8(in));
    store4(out, vreinterpretq_u32_f32(vcvtq_f32_u32(vmovl_u16(vget_low_u16(codes)))));
    store4(out + 16, vreinterpretq_u32_f32(vcvtq_f32_u32(vmovl_u16(vget_high_u16(codes)))));
}

CONVERSION(sl_u8_to_f32_neon, u8_to_f32, STEP, SL_U8, 1, SL_F32, 4)

static float32x4_t load4_f32(const uint8_t *source) { return vreinterpretq_f32_u8(vld1q_u8(source)); }

SL_INLINE void f32_to_f16(const uint8_t *in, uint8_t *out) {
    float16x4_t low = vcvt_f16_f32(load4_f32(in));
    float16x8_t both = vcvt_high_f16_f32(low, load4_f32(in + 16));
    vst1q_u8(out, vreinterpretq_u8_f16(both));
}

CONVERSION(sl_f32_to_f16_neon, f32_to_f16, STEP, SL_F32, 4, SL_F16, 2)

static uint16x4_t round_to_bf16(const uint8_t *source) {
    uint32x4_t bits = vreinterpretq_u32_u8(vld1q_u8(source));
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    uint32x4_t nan = vorrq_u32(vandq_u32(bits, vdupq_n_u32(0x80000000u)), vdupq_n_u32(0x7fc00000));
    return vshrn_n_u32(vbslq_u32(nan_lanes(bits), nan, rounded), 16);
}

SL_INLINE void f32_to_bf16(const uint8_t *in, uint8_t *out) {
    vst1q_u8(out, vreinterpretq_u8_u16(vcombine_u16(round_to_bf16(in), round_to_bf16(in + 16))));
}

CONVERSION(sl_f32_to_bf16_neon, f32_to_bf16, STEP, SL_F32, 4, SL_BF16, 2)

const sl_kernel sl_kernels_neon[] = {
    {SL_BF16, SL_F32, sl_bf16_to_f32_neon},
    {SL_F16, SL_F32, sl_f16_to_f32_neon},
    {SL_I8, SL_F32, sl_i8_to_f32_neon},
    {SL_U8, SL_F32, sl_u8_to_f32_neon},
    {SL_F32, SL_F16, sl_f32_to_f16_neon},
    {SL_F32, SL_BF16, sl_f32_to_bf16_neon},
    {-1, -1, NULL},
};

#endif
