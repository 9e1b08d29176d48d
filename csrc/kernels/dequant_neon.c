/* Dequantization of ggml blocks with NEON: four values per register. */
#include "kernels/convert.h"
#include "kernels/isa.h"

#ifdef SL_NEON

#define TARGET
#define KERNEL(type) sl_##type##_to_f32_neon

typedef uint8x16_t codes;

SL_INLINE codes codes_at(const void *bytes) { return vld1q_u8(bytes); }

SL_INLINE codes codes_of(uint64_t low, uint64_t high) { return vcombine_u8(vcreate_u8(low), vcreate_u8(high)); }

SL_INLINE codes take(codes all, int shift, uint8_t mask) {
    return vandq_u8(vshlq_u8(all, vdupq_n_s8((int8_t)-shift)), vdupq_n_u8(mask));
}

SL_INLINE codes spread(uint16_t bits, uint8_t weight) {
    uint8x16_t own = vcombine_u8(vdup_n_u8((uint8_t)bits), vdup_n_u8((uint8_t)(bits >> 8)));
    uint8x8_t bit = vcreate_u8(0x8040201008040201);
    return vandq_u8(vtstq_u8(own, vcombine_u8(bit, bit)), vdupq_n_u8(weight));
}

SL_INLINE codes either(codes a, codes b) { return vorrq_u8(a, b); }

SL_INLINE codes less(codes all, uint8_t bias) { return vsubq_u8(all, vdupq_n_u8(bias)); }

SL_INLINE codes thrice(codes all) { return vmulq_u8(all, vdupq_n_u8(3)); }

/* 3 * code reaches 256 with 86, and 512 with 171. */
SL_INLINE codes top_digit(codes all) {
    uint8x16_t one = vcgeq_u8(all, vdupq_n_u8(86)), two = vcgeq_u8(all, vdupq_n_u8(171));
    return vsubq_u8(vdupq_n_u8(0), vaddq_u8(one, two));
}

typedef struct sixteen {
    float32x4_t at[4];
} sixteen;

SL_INLINE sixteen products(codes all, float scale) {
    int8x16_t numbers = vreinterpretq_s8_u8(all);
    int16x8_t low = vmovl_s8(vget_low_s8(numbers)), high = vmovl_s8(vget_high_s8(numbers));
    sixteen found = {{vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), scale),
                      vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))), scale),
                      vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), scale),
                      vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(high))), scale)}};
    return found;
}

SL_INLINE void put(uint8_t *out, codes all, float scale) {
    sixteen values = products(all, scale);
    for (int k = 0; k < 4; k++) vst1q_u8(out + 16 * k, vreinterpretq_u8_f32(values.at[k]));
}

SL_INLINE void put_plus(uint8_t *out, codes all, float scale, float more) {
    sixteen values = products(all, scale);
    for (int k = 0; k < 4; k++)
        vst1q_u8(out + 16 * k, vreinterpretq_u8_f32(vaddq_f32(values.at[k], vdupq_n_f32(more))));
}

SL_INLINE void put_nibbles(uint8_t *out, codes all, uint8_t bias, float scale) { put(out, less(all, bias), scale); }

SL_INLINE void put_from(uint8_t *out, const int8_t table[16], codes all, float scale) {
    put(out, vreinterpretq_u8_s8(vqtbl1q_s8(vld1q_s8(table), all)), scale);
}

SL_INLINE void scales_of(float floats[16], codes all, float factor) { put((uint8_t *)floats, all, factor); }

SL_INLINE float half_at(const uint8_t bytes[2]) {
    uint16_t half = (uint16_t)(bytes[0] | bytes[1] << 8);
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half))), 0);
}

#include "kernels/dequant.h"

const sl_kernel sl_dequant_kernels_neon[] = {DEQUANT_KERNELS{-1, -1, NULL}};

#endif
