/* Products added to values with AVX2. */
#include "kernels/isa.h"
#include "kernels/merge.h"

#ifdef SL_X86

#define TARGET SL_AVX2_FMA
#define KERNEL sl_merge_avx2
#define WIDTH ((size_t)8)
#define ROWS ((size_t)2)

typedef __m256 lanes;
#define load _mm256_loadu_ps
#define load_values(bytes) _mm256_loadu_ps((const float *)(const void *)(bytes))
#define store_values(bytes, values) _mm256_storeu_ps((float *)(void *)(bytes), values)
#define same _mm256_set1_ps
#define fused _mm256_fmadd_ps

#include "kernels/merge_lanes.h"

#endif
