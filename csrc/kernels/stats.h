/* Statistics. Scalar C is the definition; every other tier gives the same bits.
 *
 * Values are added up as f64 in blocks of SL_STATS_BLOCK, counted from the tensor's first element. Within a block
 * element i goes to lane i % SL_STATS_LANES, and lanes are folded in one order; blocks are merged in the order of their
 * indices to segments of SL_STATS_SEGMENT (sl_api.h), and these likewise to a tensor. So neither the instruction set
 * nor the number of threads nor the size of a read can be seen in a result.
 *
 * A block takes one look: sums and sums of squares. That is enough where the mean is small beside the deviation, as it
 * is in weights. Where bits of the variance would cancel, where an element is not finite, or where a square could
 * overflow or vanish (f64 only), the block, which is still in the first-level cache, is looked at again as f64: its
 * finite elements less their mean. Blocks are merged as Chan, Golub and LeVeque do (Updating formulae and a pairwise
 * algorithm for computing sample variances, 1979), with the mean in two f64, so that the error of the mean does not
 * grow with the number of blocks and that of the deviation not with the mean.
 */
#ifndef SL_STATS_H
#define SL_STATS_H

#include "kernels/convert.h"

/* Elements: 16 KiB of f32 stay in the first-level cache for a second look, and folding lanes is a few percent. */
#define SL_STATS_BLOCK ((size_t)4096)

_Static_assert(SL_STATS_SEGMENT % SL_STATS_BLOCK == 0, "segments are whole blocks");

/* Two registers of AVX-512, four of AVX2 and eight of NEON hold 16 f64; 32 would not fit twice into AVX2's. */
#define SL_STATS_LANES ((size_t)16)

/* The largest finite numbers: what the minimum of nothing is. */
#define SL_F64_MAX 0x1.fffffffffffffp1023
#define SL_F32_MAX 0x1.fffffep127f

/* Sums over one block. An element that is not finite leaves a sum of squares that is not. */
typedef struct sl_lanes {
    double sums[SL_STATS_LANES];
    double squares[SL_STATS_LANES];
    double min, max; /* the sign of a zero is left open; meaningless where an element is not finite */
    uint64_t zeros;
} sl_lanes;

/* Sets *lanes to those of `count` elements, at any alignment in the byte order of files; count <= SL_STATS_BLOCK. */
typedef void (*sl_lanes_fn)(const void *source, size_t count, sl_lanes *lanes);

typedef struct sl_lanes_kernel {
    int32_t from; /* SL_F32, ...; < 0 ends a table */
    sl_lanes_fn sum;
} sl_lanes_kernel;

extern const sl_lanes_kernel sl_lanes_scalar[]; /* SL_F32, SL_BF16, SL_F16, SL_F64 */
extern const sl_lanes_kernel sl_lanes_avx2[];   /* each only where isa.h has it */
extern const sl_lanes_kernel sl_lanes_avx512[];
extern const sl_lanes_kernel sl_lanes_neon[];

/* The kernels of an available tier for one dtype. */
typedef struct sl_summer {
    int32_t from;
    sl_lanes_fn sum, sum_f64; /* of `from`; NULL when there is none */
} sl_summer;

sl_summer sl_summer_find(int32_t tier, int32_t from);

/* The remainder of a vector kernel's length: elements that continue lanes at the first one. */
void sl_lanes_rest(int32_t from, const void *source, size_t count, sl_lanes *lanes);

/* To f64 in the byte order of files: f32, the 16-bit floats and, rounded once, 32- and 64-bit integers; false for
 * others. */
bool sl_stats_widen(int32_t from, const void *source, void *destination, size_t count);

void sl_stats_clear(sl_stats *stats);

/* Adds a block: elements `index` and following of a tensor. `spare` holds SL_STATS_BLOCK. */
void sl_stats_add(sl_stats *stats, const sl_summer *summer, const void *source, size_t count, uint64_t index,
                  double *spare);

/* Adds what comes after it in the tensor. */
void sl_stats_join(sl_stats *stats, const sl_stats *next);

/* ---- histograms (stats_histogram.c) ---- */

/* Elements by the exponent that their bits have as f32, 255 for what is not finite; in four tables, as neighbours often
 * share an exponent and an increment must wait for the one before it. */
typedef struct sl_exponents {
    uint32_t counts[4][256];
} sl_exponents;

/* Of `count` f32 or f64 in the byte order of files; an f64 beyond the finite or normal f32 has the exponent next to it.
 */
void sl_exponents_f32(sl_exponents *exponents, const void *source, size_t count);
void sl_exponents_f64(sl_exponents *exponents, const void *source, size_t count);

/* The bins of what was counted, of which so many were zeros. */
void sl_exponents_fold(const sl_exponents *exponents, uint64_t zeros, uint64_t bins[SL_HISTOGRAM_BINS]);

#endif
