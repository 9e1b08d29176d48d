/* Differences with AVX-512. */
#include "kernels/difference.h"
#include "kernels/isa.h"

#ifdef SL_X86

#define TARGET SL_AVX512
#define KERNEL sl_difference_avx512

#define lanes __m512d
#define lanes_at(values) _mm512_loadu_pd(values)
#define put(out, values) _mm512_storeu_pd(out, values)
#define plus(a, b) _mm512_add_pd(a, b)
#define less(a, b) _mm512_sub_pd(a, b)
#define times(a, b) _mm512_mul_pd(a, b)
#define larger(a, b) _mm512_max_pd(a, b)
#define size_of(values) _mm512_abs_pd(values)
#define ones(values) \
    _mm512_maskz_mov_pd(_mm512_cmp_pd_mask(values, _mm512_setzero_pd(), _CMP_NEQ_UQ), _mm512_set1_pd(1.0))

#include "kernels/difference_lanes.h"

#endif
