/* Conversion kernels. Scalar C is the reference; every other tier gives the same bits.
 *
 * Both sides are little-endian, as files are. To f32: exact; a NaN keeps its payload and is quieted (8-bit formats have
 * one NaN, as in ml_dtypes). To narrower types: round to nearest, ties to even, once; a NaN stays a NaN. f64 and wide
 * integers get there through SL_F32_ODD.
 */
#ifndef SL_CONVERT_H
#define SL_CONVERT_H

#include "kernels/dtype.h"

/* Converts `count` elements, whole blocks of block types. The source may have any alignment; elements of less than a
 * byte start at the low bits of the first byte. Source and destination do not overlap. */
typedef void (*sl_convert_fn)(const void *source, void *destination, size_t count);

typedef struct sl_kernel {
    int16_t from, to; /* SL_F32, ...; from < 0 ends a table */
    sl_convert_fn convert;
} sl_kernel;

extern const sl_kernel sl_kernels_scalar[];
extern const sl_kernel sl_kernels_avx2[]; /* each exists only where isa.h has it */
extern const sl_kernel sl_kernels_avx512[];
extern const sl_kernel sl_kernels_neon[];

extern const sl_kernel sl_quant_kernels_scalar[]; /* blocks: quant.h */
extern const sl_kernel sl_quant_kernels_avx2[];
extern const sl_kernel sl_quant_kernels_avx512[];
extern const sl_kernel sl_quant_kernels_neon[];
extern const sl_kernel sl_quant_k_kernels_scalar[]; /* super-blocks: quant_k.h */
extern const sl_kernel sl_quant_k_kernels_avx2[];
extern const sl_kernel sl_quant_k_kernels_neon[];
extern const sl_kernel sl_dequant_kernels_scalar[]; /* blocks to f32: dequant.h */
extern const sl_kernel sl_dequant_kernels_avx2[];
extern const sl_kernel sl_dequant_kernels_avx512[];
extern const sl_kernel sl_dequant_kernels_neon[];

/* Converts the remainder of a vector kernel's length with the scalar kernel, which must exist. */
void sl_convert_rest(int32_t from, int32_t to, const void *source, void *destination, size_t count);

/* How to convert: directly, or through f32 block by block (second != NULL). */
typedef struct sl_conversion {
    sl_convert_fn first, second;
    const sl_dtype_info *from, *to;
} sl_conversion;

/* Smallest number of elements that is whole blocks on both sides. */
static inline uint64_t sl_conversion_unit(const sl_conversion *conversion) {
    int32_t from = conversion->from->block, to = conversion->to->block; /* powers of two */
    return (uint64_t)(from > to ? from : to);
}

/* False when there is no such conversion. `tier` must be available. */
bool sl_conversion_find(int32_t tier, int32_t from, int32_t to, sl_conversion *out);

void sl_conversion_run(const sl_conversion *conversion, const void *source, void *destination, size_t count);

#endif
