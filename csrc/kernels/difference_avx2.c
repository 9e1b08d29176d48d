/* Differences with AVX2. */
#include "kernels/difference.h"
#include "kernels/isa.h"

#ifdef SL_X86

#define TARGET SL_AVX2
#define KERNEL sl_difference_avx2

typedef struct lanes {
    __m256d low, high;
} lanes;

TARGET SL_INLINE lanes lanes_at(const double *values) {
    lanes both = {_mm256_loadu_pd(values), _mm256_loadu_pd(values + 4)};
    return both;
}

TARGET SL_INLINE void put(double *out, lanes values) {
    _mm256_storeu_pd(out, values.low);
    _mm256_storeu_pd(out + 4, values.high);
}

#define OF_TWO(name, instruction)                                              \
    TARGET SL_INLINE lanes name(lanes a, lanes b) {                            \
        lanes both = {instruction(a.low, b.low), instruction(a.high, b.high)}; \
        return both;                                                           \
    }

OF_TWO(plus, _mm256_add_pd)
OF_TWO(less, _mm256_sub_pd)
OF_TWO(times, _mm256_mul_pd)
OF_TWO(larger, _mm256_max_pd)

TARGET SL_INLINE lanes size_of(lanes values) {
    const __m256d sign = _mm256_set1_pd(-0.0);
    lanes both = {_mm256_andnot_pd(sign, values.low), _mm256_andnot_pd(sign, values.high)};
    return both;
}

TARGET SL_INLINE lanes ones(lanes values) {
    const __m256d one = _mm256_set1_pd(1.0), zero = _mm256_setzero_pd();
    lanes both = {_mm256_and_pd(_mm256_cmp_pd(values.low, zero, _CMP_NEQ_UQ), one),
                  _mm256_and_pd(_mm256_cmp_pd(values.high, zero, _CMP_NEQ_UQ), one)};
    return both;
}

#include "kernels/difference_lanes.h"

#endif
