/* Statistics. Scalar C is the reference; every other tier produces the same bits.
 *
 * Values are summed as f64 in blocks of SL_STATS_BLOCK, counted from the tensor's first element. Within a block,
 * element i goes to lane i % SL_STATS_LANES, and lanes are reduced in a fixed order. Blocks are merged in the order of
 * their indices into segments of SL_STATS_SEGMENT (sl_api.h), and segments into a tensor. Therefore a result does not
 * depend on the instruction set, the number of threads, or the size of reads.
 *
 * A block takes a single pass over sums and sums of squares, which is enough if the mean is small compared with the
 * deviation, as in weights. If bits of the variance would cancel, an element is NaN or infinite, or a square could
 * overflow or underflow (f64 only), the block takes a second pass as f64 while it is in the first-level cache: over its
 * finite elements minus their mean. Blocks are merged by the method of Chan, Golub and LeVeque (Updating formulae and a
 * pairwise algorithm for computing sample variances, 1979), with the mean in two f64, so that the error of the mean
 * does not grow with the number of blocks, nor the error of the deviation with the mean.
 */
#ifndef SL_STATS_H
#define SL_STATS_H

#include "kernels/convert.h"

/* Elements of a block: 16 KiB of f32 stay in the first-level cache for a second pass, and reducing the lanes costs
 * little. */
#define SL_STATS_BLOCK ((size_t)4096)

_Static_assert(SL_STATS_SEGMENT % SL_STATS_BLOCK == 0, "segments are whole blocks");

/* 16 f64 fill two registers of AVX-512, four of AVX2, or eight of NEON; 32 would not fit twice into AVX2's registers.
 */
#define SL_STATS_LANES ((size_t)16)

/* The largest finite numbers, used as the minimum of no elements. */
#define SL_F64_MAX 0x1.fffffffffffffp1023
#define SL_F32_MAX 0x1.fffffep127f

/* Sums over a block. A NaN or infinite element makes the sum of squares NaN or infinite too. */
typedef struct sl_lanes {
    double sums[SL_STATS_LANES];
    double squares[SL_STATS_LANES];
    double min, max; /* the sign of a zero is unspecified; meaningless if an element is NaN or infinite */
    uint64_t zeros;
} sl_lanes;

/* Sets *lanes from `count` elements, at any alignment in file byte order; count <= SL_STATS_BLOCK. */
typedef void (*sl_lanes_fn)(const void *source, size_t count, sl_lanes *lanes);

typedef struct sl_lanes_kernel {
    int32_t from; /* SL_F32, ...; < 0 ends a table */
    sl_lanes_fn sum;
} sl_lanes_kernel;

extern const sl_lanes_kernel sl_lanes_scalar[]; /* SL_F32, SL_BF16, SL_F16, SL_F64 */
extern const sl_lanes_kernel sl_lanes_avx2[];   /* each exists only if isa.h defines it */
extern const sl_lanes_kernel sl_lanes_avx512[];
extern const sl_lanes_kernel sl_lanes_neon[];

/* The kernels of an available tier for a dtype. */
typedef struct sl_accumulator {
    int32_t from;
    sl_lanes_fn sum, sum_f64; /* of `from`; NULL if there is none */
} sl_accumulator;

sl_accumulator sl_accumulator_find(int32_t tier, int32_t from);

/* Adds the remainder of a vector kernel's length to the lanes, starting at lane 0. */
void sl_lanes_rest(int32_t from, const void *source, size_t count, sl_lanes *lanes);

/* Converts to f64 in file byte order: f32, 16-bit floats and, with a single rounding, 32- and 64-bit integers. Returns
 * false for other dtypes. */
bool sl_stats_widen(int32_t from, const void *source, void *destination, size_t count);

void sl_stats_clear(sl_stats *stats);

/* Adds a block: `count` elements of a tensor, starting with element `index`. `spare` has room for SL_STATS_BLOCK
 * elements, and may be `source`. */
void sl_stats_add(sl_stats *stats, const sl_accumulator *accumulator, const void *source, size_t count, uint64_t index,
                  double *spare);

/* Like sl_stats_add, for integers: `source` holds their values as floats, `integers` the integers, of dtype `from`. */
void sl_stats_add_integers(sl_stats *stats, const sl_accumulator *accumulator, const void *source, size_t count,
                           uint64_t index, double *spare, int32_t from, const void *integers);

/* Merges the statistics of the tensor's following elements. */
void sl_stats_join(sl_stats *stats, const sl_stats *next);

/* ---- histograms (stats_histogram.c) ---- */

/* Counts of elements by their f32 exponent; 255 is for NaN and infinity. Four tables, because neighbours often share an
 * exponent and an increment must wait for the previous increment. */
typedef struct sl_exponents {
    uint32_t counts[4][256];
} sl_exponents;

/* Counts `count` f32 or f64 in file byte order; an f64 outside the range of normal f32 counts for the nearest exponent.
 */
void sl_exponents_f32(sl_exponents *exponents, const void *source, size_t count);
void sl_exponents_f64(sl_exponents *exponents, const void *source, size_t count);

/* Reduces the counts to bins; `zeros` is the number of zeros among the elements. */
void sl_exponents_to_bins(const sl_exponents *exponents, uint64_t zeros, uint64_t bins[SL_HISTOGRAM_BINS]);

#endif
