/* Statistics with NEON. */
#include "kernels/isa.h"
#include "kernels/stats_lanes.h"

#ifdef SL_NEON

#define TARGET

typedef struct sums {
    float64x2_t sums[8], squares[8];
    float32x4_t min, max;
    uint32x4_t zeros;
} sums;

static inline void start(sums *all) {
    for (int k = 0; k < 8; k++) all->sums[k] = all->squares[k] = vdupq_n_f64(0.0);
    all->min = vdupq_n_f32(SL_F32_MAX);
    all->max = vdupq_n_f32(-SL_F32_MAX);
    all->zeros = vdupq_n_u32(0);
}

/* A fused multiply-add has the same bits as a multiplication and an addition here, because squares of f32 are exact in
 * f64.
 */
static inline void add_2(sums *all, int k, float64x2_t x) {
    all->sums[k] = vaddq_f64(all->sums[k], x);
    all->squares[k] = vfmaq_f64(all->squares[k], x, x);
}

/* Adds four elements of a step, starting at element 2 * k. */
static inline void add_4(sums *all, int k, float32x4_t values) {
    all->min = vminq_f32(all->min, values);
    all->max = vmaxq_f32(all->max, values);
    all->zeros = vsubq_u32(all->zeros, vceqzq_f32(values));
    add_2(all, k, vcvt_f64_f32(vget_low_f32(values)));
    add_2(all, k + 1, vcvt_high_f64_f32(values));
}

static void finish(const sums *all, sl_lanes *lanes) {
    for (int k = 0; k < 8; k++) {
        vst1q_f64(lanes->sums + 2 * k, all->sums[k]);
        vst1q_f64(lanes->squares + 2 * k, all->squares[k]);
    }
    lanes->min = (double)vminvq_f32(all->min);
    lanes->max = (double)vmaxvq_f32(all->max);
    lanes->zeros = vaddvq_u32(all->zeros);
}

static float32x4_t load_f32(const uint8_t *source) { return vreinterpretq_f32_u8(vld1q_u8(source)); }

SL_INLINE void add_f32(sums *all, const uint8_t *in) {
    for (int k = 0; k < 4; k++) add_4(all, 2 * k, load_f32(in + 16 * (size_t)k));
}

LANES_OF(sl_lanes_f32_neon, add_f32, SL_F32, 4)

SL_INLINE void add_bf16(sums *all, const uint8_t *in) {
    for (int k = 0; k < 8; k += 4) {
        uint16x8_t halves = vreinterpretq_u16_u8(vld1q_u8(in + 4 * (size_t)k));
        add_4(all, k, vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16)));
        add_4(all, k + 2, vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(halves), 16)));
    }
}

LANES_OF(sl_lanes_bf16_neon, add_bf16, SL_BF16, 2)

SL_INLINE void add_f16(sums *all, const uint8_t *in) {
    for (int k = 0; k < 8; k += 4) {
        float16x8_t halves = vreinterpretq_f16_u8(vld1q_u8(in + 4 * (size_t)k));
        add_4(all, k, vcvt_f32_f16(vget_low_f16(halves)));
        add_4(all, k + 2, vcvt_high_f32_f16(halves));
    }
}

LANES_OF(sl_lanes_f16_neon, add_f16, SL_F16, 2)

const sl_lanes_kernel sl_lanes_neon[] = {
    {SL_F32, sl_lanes_f32_neon},
    {SL_BF16, sl_lanes_bf16_neon},
    {SL_F16, sl_lanes_f16_neon},
    {-1, NULL},
};

#endif
