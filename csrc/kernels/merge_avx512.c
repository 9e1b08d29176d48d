/* Products added to values with AVX-512. */
#include "kernels/isa.h"
#include "kernels/merge.h"

#ifdef SL_X86

#define TARGET SL_AVX512
#define KERNEL sl_merge_avx512
#define WIDTH ((size_t)16)
#define ROWS ((size_t)8)

typedef __m512 lanes;
#define load _mm512_loadu_ps
#define load_values _mm512_loadu_ps
#define store_values _mm512_storeu_ps
#define same _mm512_set1_ps
#define fused _mm512_fmadd_ps

#include "kernels/merge_lanes.h"

#endif
