/* Differences with NEON. */
#include "kernels/difference.h"
#include "kernels/isa.h"

#ifdef SL_NEON

#define TARGET
#define KERNEL sl_difference_neon

typedef struct lanes {
    float64x2_t pairs[4];
} lanes;

SL_INLINE lanes lanes_at(const double *values) {
    lanes all;
    for (int k = 0; k < 4; k++) all.pairs[k] = vld1q_f64(values + 2 * k);
    return all;
}

SL_INLINE void put(double *out, lanes values) {
    for (int k = 0; k < 4; k++) vst1q_f64(out + 2 * k, values.pairs[k]);
}

#define OF_TWO(name, instruction)                                                     \
    SL_INLINE lanes name(lanes a, lanes b) {                                          \
        for (int k = 0; k < 4; k++) a.pairs[k] = instruction(a.pairs[k], b.pairs[k]); \
        return a;                                                                     \
    }

OF_TWO(plus, vaddq_f64)
OF_TWO(less, vsubq_f64)
OF_TWO(times, vmulq_f64)
OF_TWO(larger, vmaxq_f64)

SL_INLINE lanes size_of(lanes values) {
    for (int k = 0; k < 4; k++) values.pairs[k] = vabsq_f64(values.pairs[k]);
    return values;
}

SL_INLINE lanes ones(lanes values) {
    const uint64x2_t one = vreinterpretq_u64_f64(vdupq_n_f64(1.0));
    for (int k = 0; k < 4; k++) values.pairs[k] = vreinterpretq_f64_u64(vbicq_u64(one, vceqzq_f64(values.pairs[k])));
    return values;
}

#include "kernels/difference_lanes.h"

#endif
