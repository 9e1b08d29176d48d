/* Products added to values with NEON. */
#include "kernels/isa.h"
#include "kernels/merge.h"

#ifdef SL_NEON

#define TARGET
#define KERNEL sl_merge_neon
#define WIDTH ((size_t)4)
#define ROWS ((size_t)2)

typedef float32x4_t lanes;
#define load vld1q_f32
#define load_values(bytes) vreinterpretq_f32_u8(vld1q_u8(bytes))
#define store_values(bytes, values) vst1q_u8(bytes, vreinterpretq_u8_f32(values))
#define same vdupq_n_f32
#define fused(a, b, c) vfmaq_f32(c, a, b)

#include "kernels/merge_lanes.h"

#endif
