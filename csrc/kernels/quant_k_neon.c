/* Quantization to K-quants, types with tables, and types with importance with NEON. */
#include "kernels/convert.h"
#include "kernels/isa.h"

#ifdef SL_NEON

#include "base/base.h"

#define TARGET
#define KERNEL(type) sl_f32_to_##type##_neon
#define WEIGHTED(type) sl_weighted_##type##_neon

#define LANES 8

typedef struct lanes {
    float32x4_t low, high;
} lanes;

typedef struct truths {
    uint32x4_t low, high;
} truths;

SL_INLINE lanes all_of(float value) {
    lanes out = {vdupq_n_f32(value), vdupq_n_f32(value)};
    return out;
}

SL_INLINE lanes lanes_at(const float *values) {
    lanes out = {vld1q_f32(values), vld1q_f32(values + 4)};
    return out;
}

SL_INLINE void put(float *out, lanes values) {
    vst1q_f32(out, values.low);
    vst1q_f32(out + 4, values.high);
}

SL_INLINE void put_bytes(uint8_t *out, lanes values) {
    uint16x4_t low = vmovn_u32(vcvtq_u32_f32(values.low)), high = vmovn_u32(vcvtq_u32_f32(values.high));
    vst1_u8(out, vmovn_u16(vcombine_u16(low, high)));
}

#define OF_TWO(type, name, operand, instruction)                             \
    SL_INLINE type name(operand a, operand b) {                              \
        type out = {instruction(a.low, b.low), instruction(a.high, b.high)}; \
        return out;                                                          \
    }

#define OF_ONE(name, instruction)                              \
    SL_INLINE lanes name(lanes a) {                            \
        lanes out = {instruction(a.low), instruction(a.high)}; \
        return out;                                            \
    }

OF_TWO(lanes, plus, lanes, vaddq_f32)
OF_TWO(lanes, minus, lanes, vsubq_f32)
OF_TWO(lanes, times, lanes, vmulq_f32)
OF_TWO(lanes, over, lanes, vdivq_f32)
OF_TWO(lanes, least_of, lanes, vminq_f32)
OF_TWO(lanes, most_of, lanes, vmaxq_f32)
OF_TWO(truths, below, lanes, vcltq_f32)
OF_TWO(truths, same, lanes, vceqq_f32)
OF_TWO(truths, both, truths, vandq_u32)
OF_TWO(truths, either, truths, vorrq_u32)
OF_ONE(root, vsqrtq_f32)
OF_ONE(size_of, vabsq_f32)

SL_INLINE bool all_true(truths p) { return vminvq_u32(vandq_u32(p.low, p.high)) != 0; }

SL_INLINE bool any_true(truths p) { return vmaxvq_u32(vorrq_u32(p.low, p.high)) != 0; }

SL_INLINE lanes choose(truths p, lanes a, lanes b) {
    lanes out = {vbslq_f32(p.low, a.low, b.low), vbslq_f32(p.high, a.high, b.high)};
    return out;
}

SL_INLINE float32x4_t nearest_of(float32x4_t values) {
    uint32x4_t bits = vreinterpretq_u32_f32(vaddq_f32(values, vdupq_n_f32(12582912.0f)));
    int32x4_t integers = vreinterpretq_s32_u32(vandq_u32(bits, vdupq_n_u32(0x007fffff)));
    return vcvtq_f32_s32(vsubq_s32(integers, vdupq_n_s32(0x00400000)));
}

OF_ONE(nearest, nearest_of)

#include "kernels/quant_blocks.h"
#include "kernels/quant_k.h"

const sl_kernel sl_quant_k_kernels_neon[] = {QUANT_K_KERNELS QUANT_BLOCK_KERNELS{-1, -1, NULL}};

const sl_weighted_kernel sl_weighted_neon[] = {WEIGHTED_K_KERNELS WEIGHTED_BLOCK_KERNELS{-1, NULL}};

#endif
