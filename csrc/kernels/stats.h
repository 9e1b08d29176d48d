/* Statistics. Scalar C is the reference; every other tier gives the same bits.
 *
 * Values are added up as f64 in blocks of SL_STATS_BLOCK, counted from the tensor's first element. Within a block
 * element i goes to lane i % SL_STATS_LANES, and lanes are reduced in one order; blocks are merged in the order of
 * their indices into segments of SL_STATS_SEGMENT (sl_api.h), and segments into a tensor in the same way. So a result
 * depends on neither the instruction set nor the number of threads nor the size of a read.
 *
 * A block takes one pass: sums and sums of squares. That is enough where the mean is small compared with the deviation,
 * as in weights. Where bits of the variance would cancel, an element is not finite, or a square could overflow or
 * underflow (f64 only), the block, still in the first-level cache, takes a second pass as f64: over its finite elements
 * minus their mean. Blocks are merged as Chan, Golub and LeVeque do (Updating formulae and a pairwise algorithm for
 * computing sample variances, 1979), with the mean in two f64, so that the error of the mean does not grow with the
 * number of blocks and that of the deviation not with the mean.
 */
#ifndef SL_STATS_H
#define SL_STATS_H

#include "kernels/convert.h"

/* Elements of a block: 16 KiB of f32 stay in the first-level cache for a second pass, and reducing lanes costs a few
 * percent. */
#define SL_STATS_BLOCK ((size_t)4096)

_Static_assert(SL_STATS_SEGMENT % SL_STATS_BLOCK == 0, "segments are whole blocks");

/* Two registers of AVX-512, four of AVX2 and eight of NEON hold 16 f64; 32 would not fit twice into AVX2's. */
#define SL_STATS_LANES ((size_t)16)

/* The largest finite numbers, which are the minimum of no elements. */
#define SL_F64_MAX 0x1.fffffffffffffp1023
#define SL_F32_MAX 0x1.fffffep127f

/* Sums over one block. An element that is not finite makes the sum of squares not finite. */
typedef struct sl_lanes {
    double sums[SL_STATS_LANES];
    double squares[SL_STATS_LANES];
    double min, max; /* the sign of a zero is unspecified; meaningless if an element is not finite */
    uint64_t zeros;
} sl_lanes;

/* Sets *lanes from `count` elements, at any alignment in the byte order of files; count <= SL_STATS_BLOCK. */
typedef void (*sl_lanes_fn)(const void *source, size_t count, sl_lanes *lanes);

typedef struct sl_lanes_kernel {
    int32_t from; /* SL_F32, ...; < 0 ends a table */
    sl_lanes_fn sum;
} sl_lanes_kernel;

extern const sl_lanes_kernel sl_lanes_scalar[]; /* SL_F32, SL_BF16, SL_F16, SL_F64 */
extern const sl_lanes_kernel sl_lanes_avx2[];   /* each exists only where isa.h has it */
extern const sl_lanes_kernel sl_lanes_avx512[];
extern const sl_lanes_kernel sl_lanes_neon[];

/* The kernels of an available tier for one dtype. */
typedef struct sl_accumulator {
    int32_t from;
    sl_lanes_fn sum, sum_f64; /* of `from`; NULL when there is none */
} sl_accumulator;

sl_accumulator sl_accumulator_find(int32_t tier, int32_t from);

/* Adds the remainder of a vector kernel's length to the lanes, starting at lane 0. */
void sl_lanes_rest(int32_t from, const void *source, size_t count, sl_lanes *lanes);

/* Converts to f64 in the byte order of files: f32, the 16-bit floats and, rounded once, 32- and 64-bit integers; false
 * for other dtypes. */
bool sl_stats_widen(int32_t from, const void *source, void *destination, size_t count);

void sl_stats_clear(sl_stats *stats);

/* Adds a block: `count` elements of a tensor from element `index` on. `spare` holds SL_STATS_BLOCK, and may be
 * `source`. */
void sl_stats_add(sl_stats *stats, const sl_accumulator *accumulator, const void *source, size_t count, uint64_t index,
                  double *spare);

/* Like sl_stats_add, for integers: `source` holds their values as floats, `integers` themselves, of dtype `from`. */
void sl_stats_add_integers(sl_stats *stats, const sl_accumulator *accumulator, const void *source, size_t count,
                           uint64_t index, double *spare, int32_t from, const void *integers);

/* Merges the statistics of the elements that follow in the tensor. */
void sl_stats_join(sl_stats *stats, const sl_stats *next);

/* ---- histograms (stats_histogram.c) ---- */

/* Counts of elements by their f32 exponent, 255 for those that are not finite; in four tables, as neighbours often
 * share an exponent and an increment must wait for the previous one. */
typedef struct sl_exponents {
    uint32_t counts[4][256];
} sl_exponents;

/* Counts `count` f32 or f64 in the byte order of files; an f64 outside the range of normal f32 counts for the nearest
 * exponent. */
void sl_exponents_f32(sl_exponents *exponents, const void *source, size_t count);
void sl_exponents_f64(sl_exponents *exponents, const void *source, size_t count);

/* Reduces the counts to bins; `zeros` of the elements were zero. */
void sl_exponents_to_bins(const sl_exponents *exponents, uint64_t zeros, uint64_t bins[SL_HISTOGRAM_BINS]);

#endif
