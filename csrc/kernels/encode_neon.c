/* The steps of quantization for other engines with NEON: 16 lanes are four registers. */
#include "kernels/encode.h"
#include "kernels/isa.h"

#ifdef SL_NEON

#define TARGET
#define NAME(stem) stem##_neon

typedef float32x4x4_t lanes;

SL_INLINE lanes load(const float *values) {
    lanes all;
    for (int k = 0; k < 4; k++) all.val[k] = vld1q_f32(values + 4 * k);
    return all;
}

SL_INLINE void store(float *values, lanes all) {
    for (int k = 0; k < 4; k++) vst1q_f32(values + 4 * k, all.val[k]);
}

SL_INLINE lanes same(float value) {
    float32x4_t four = vdupq_n_f32(value);
    return (lanes){{four, four, four, four}};
}

#define OF_ONE(name, quarter)                                     \
    SL_INLINE lanes name(lanes a) {                               \
        for (int k = 0; k < 4; k++) a.val[k] = quarter(a.val[k]); \
        return a;                                                 \
    }
#define OF_TWO(name, quarter)                                               \
    SL_INLINE lanes name(lanes a, lanes b) {                                \
        for (int k = 0; k < 4; k++) a.val[k] = quarter(a.val[k], b.val[k]); \
        return a;                                                           \
    }

OF_TWO(minus, vsubq_f32)
OF_TWO(times, vmulq_f32)
OF_TWO(plus, vaddq_f32)
OF_TWO(over, vdivq_f32)
OF_TWO(smaller, vminq_f32)
OF_TWO(larger, vmaxq_f32)

SL_INLINE float32x4_t quarter_to_bf16(float32x4_t values) {
    uint32x4_t bits = vreinterpretq_u32_f32(values), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    bits = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    return vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xffff0000)));
}

SL_INLINE float32x4_t quarter_to_f16(float32x4_t values) { return vcvt_f32_f16(vcvt_f16_f32(values)); }

OF_ONE(to_bf16, quarter_to_bf16)
OF_ONE(to_f16, quarter_to_f16)

/* The magnitudes of all quarters: only their maximum is of interest. */
typedef uint32x4_t sizes;
#define larger_size vmaxq_u32

SL_INLINE sizes sizes_of(lanes values) {
    uint32x4_t top = vdupq_n_u32(0);
    for (int k = 0; k < 4; k++) top = vmaxq_u32(top, vreinterpretq_u32_f32(vabsq_f32(values.val[k])));
    return top;
}

SL_INLINE float highest_size(sizes all) {
    return vgetq_lane_f32(vreinterpretq_f32_u32(vdupq_n_u32(vmaxvq_u32(all))), 0);
}

SL_INLINE float lowest(lanes all) {
    return vminvq_f32(vminq_f32(vminq_f32(all.val[0], all.val[1]), vminq_f32(all.val[2], all.val[3])));
}

SL_INLINE float highest(lanes all) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(all.val[0], all.val[1]), vmaxq_f32(all.val[2], all.val[3])));
}

/* The low bytes of 16 integers. */
SL_INLINE uint8x16_t bytes_of(const uint32x4_t all[4]) {
    uint16x8_t low = vcombine_u16(vmovn_u32(all[0]), vmovn_u32(all[1]));
    uint16x8_t high = vcombine_u16(vmovn_u32(all[2]), vmovn_u32(all[3]));
    return vcombine_u8(vmovn_u16(low), vmovn_u16(high));
}

SL_INLINE void put_integers(uint8_t *codes, lanes values, int32_t offset) {
    uint32x4_t numbers[4];
    for (int k = 0; k < 4; k++) numbers[k] = vreinterpretq_u32_f32(vaddq_f32(values.val[k], vdupq_n_f32(12582912.0f)));
    vst1q_u8(codes, vaddq_u8(bytes_of(numbers), vdupq_n_u8((uint8_t)offset)));
}

typedef struct table {
    const float *bounds;
    uint8x16_t map;
} table;

SL_INLINE table load_table(const float bounds[15], const uint8_t map[16]) { return (table){bounds, vld1q_u8(map)}; }

SL_INLINE void put_ranks(uint8_t *codes, lanes values, const table *all) {
    uint32x4_t ranks[4];
    for (int k = 0; k < 4; k++) {
        ranks[k] = vdupq_n_u32(0);
        for (int j = 0; j < 15; j++) /* a bound below is -1 */
            ranks[k] = vsubq_u32(ranks[k], vcgtq_f32(values.val[k], vdupq_n_f32(all->bounds[j])));
    }
    vst1q_u8(codes, vqtbl1q_u8(all->map, bytes_of(ranks)));
}

SL_INLINE uint32x4_t quarter_e4m3(float32x4_t values) {
    uint32x4_t bits = vreinterpretq_u32_f32(values), size = vandq_u32(bits, vdupq_n_u32(0x7fffffff));
    uint32x4_t odd = vandq_u32(vshrq_n_u32(size, 20), vdupq_n_u32(1));
    uint32x4_t code = vshrq_n_u32(vaddq_u32(vaddq_u32(size, vdupq_n_u32(0x7ffff)), odd), 20);
    code = vsubq_u32(code, vdupq_n_u32(120 << 3));
    float32x4_t sum = vaddq_f32(vreinterpretq_f32_u32(size), vdupq_n_f32(0x1p14f));
    uint32x4_t subnormal = vsubq_u32(vreinterpretq_u32_f32(sum), vdupq_n_u32(0x46800000));
    code = vbslq_u32(vcltq_u32(size, vdupq_n_u32(0x3c800000)), subnormal, code);
    return vorrq_u32(code, vandq_u32(vshrq_n_u32(bits, 24), vdupq_n_u32(0x80)));
}

SL_INLINE void put_e4m3(uint8_t *codes, lanes values) {
    uint32x4_t all[4];
    for (int k = 0; k < 4; k++) all[k] = quarter_e4m3(values.val[k]);
    vst1q_u8(codes, bytes_of(all));
}

#include "kernels/encode_lanes.h"

/* Nibbles; other codes are left to scalar C. */
static void pack_neon(const uint8_t *codes, size_t count, uint32_t bits, bool high_first, uint8_t *bytes) {
    size_t done = 0;
    for (; bits == 4 && done + 32 <= count; done += 32) {
        uint8x16x2_t pairs = vld2q_u8(codes + done);
        uint8x16_t low = pairs.val[high_first ? 1 : 0], high = pairs.val[high_first ? 0 : 1];
        vst1q_u8(bytes + done / 2, vorrq_u8(low, vshlq_n_u8(high, 4)));
    }
    sl_encode_scalar.pack(codes + done, count - done, bits, high_first, bytes + done * bits / 8);
}

const sl_encode_steps sl_encode_neon = {extremes_neon, quotients_neon, integers_neon, ranks_neon, e4m3_neon, pack_neon};

#endif
