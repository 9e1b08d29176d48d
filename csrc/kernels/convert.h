/* Conversion kernels. Scalar C is the reference; every other tier produces the same bits.
 *
 * Both sides are little-endian, like files. To f32: exact; a NaN keeps its payload and becomes quiet (8-bit formats
 * have a single NaN, as in ml_dtypes). To narrower types: a single rounding to nearest, ties to even; a NaN stays a
 * NaN. f64 and wide integers are narrowed through SL_F32_ODD.
 */
#ifndef SL_CONVERT_H
#define SL_CONVERT_H

#include "kernels/dtype.h"

/* Converts `count` elements; for block types, whole blocks. The source may have any alignment; elements smaller than a
 * byte start at the low bits of the first byte. Source and destination must not overlap. */
typedef void (*sl_convert_fn)(const void *source, void *destination, size_t count);

typedef struct sl_kernel {
    int16_t from, to; /* SL_F32, ...; from < 0 ends a table */
    sl_convert_fn convert;
} sl_kernel;

extern const sl_kernel sl_kernels_scalar[];
extern const sl_kernel sl_kernels_avx2[]; /* each tier exists only if isa.h defines it */
extern const sl_kernel sl_kernels_avx512[];
extern const sl_kernel sl_kernels_neon[];

extern const sl_kernel sl_quant_kernels_scalar[]; /* blocks: quant.h */
extern const sl_kernel sl_quant_kernels_avx2[];
extern const sl_kernel sl_quant_kernels_avx512[];
extern const sl_kernel sl_quant_kernels_neon[];
extern const sl_kernel sl_quant_k_kernels_scalar[]; /* super-blocks: quant_k.h */
extern const sl_kernel sl_quant_k_kernels_avx2[];
extern const sl_kernel sl_quant_k_kernels_avx512[];
extern const sl_kernel sl_quant_k_kernels_neon[];
extern const sl_kernel sl_dequant_kernels_scalar[]; /* blocks to f32: dequant.h */
extern const sl_kernel sl_dequant_kernels_avx2[];
extern const sl_kernel sl_dequant_kernels_avx512[];
extern const sl_kernel sl_dequant_kernels_neon[];

/* Converts the remainder of a vector kernel's length by the scalar kernel, which must exist. */
void sl_convert_rest(int32_t from, int32_t to, const void *source, void *destination, size_t count);

/* Results are prefetched this many bytes before a kernel stores them, because a processor does not run ahead of stores
 * as it does of loads: a tenth faster in the second-level cache, a fifth in the third. */
#define SL_STORE_AHEAD ((uintptr_t)512)

SL_INLINE void sl_prefetch_results(const uint8_t *out, size_t size) {
    uintptr_t ahead = (uintptr_t)out + SL_STORE_AHEAD; /* beyond the results at their end: an integer, not a pointer */
    for (size_t line = 0; line < size; line += 64) SL_PREFETCH_WRITE((const void *)(ahead + line));
}

/* A conversion: direct, or through f32 block by block (second != NULL). */
typedef struct sl_conversion {
    sl_convert_fn first, second;
    const sl_dtype_info *from, *to;
} sl_conversion;

/* Smallest number of elements with whole blocks on both sides. */
static inline uint64_t sl_conversion_unit(const sl_conversion *conversion) {
    int32_t from = conversion->from->block, to = conversion->to->block; /* powers of two */
    return (uint64_t)(from > to ? from : to);
}

/* Returns false if there is no such conversion. `tier` must be available. */
bool sl_conversion_find(int32_t tier, int32_t from, int32_t to, sl_conversion *out);

void sl_conversion_run(const sl_conversion *conversion, const void *source, void *destination, size_t count);

/* Like sl_conversion_run, but stores past the cache (stream.h). Without a conversion (first == NULL) f32 are copied. */
void sl_conversion_stream(const sl_conversion *conversion, const void *source, void *destination, size_t count);

#endif
