/* Differences between two runs of f64: the partial sums of `safeload.diff`. Scalar C is the reference; every other tier
 * produces the same bits: element i goes to lane i % SL_DIFFERENCE_LANES, lanes are summed in a fixed order, and no
 * product is fused with a sum. */
#ifndef SL_DIFFERENCE_H
#define SL_DIFFERENCE_H

#include "base/base.h"

/* A register of AVX-512, two of AVX2, or four of NEON. AVX2 keeps all sums of a block in registers. */
#define SL_DIFFERENCE_LANES ((size_t)8)

/* Elements per search for the position of the largest difference: both runs, 16 KiB, are then still in the first-level
 * cache. */
#define SL_DIFFERENCE_BLOCK ((size_t)1024)

/* Sums, with element i in lane i % SL_DIFFERENCE_LANES. If an element is NaN or infinite, norm_a or norm_b is too. */
typedef struct sl_difference_lanes {
    double norm_a[SL_DIFFERENCE_LANES], norm_b[SL_DIFFERENCE_LANES], dot[SL_DIFFERENCE_LANES];
    double squares[SL_DIFFERENCE_LANES]; /* of a - b */
    double unequal[SL_DIFFERENCE_LANES]; /* number of unequal pairs */
} sl_difference_lanes;

/* |a - b| */
static inline double sl_distance(double a, double b) { return a < b ? b - a : a - b; }

/* Adds an element to a lane and returns |a - b|. */
static inline double sl_difference_add(sl_difference_lanes *sums, size_t lane, double a, double b) {
    double difference = sl_distance(a, b);
    sums->norm_a[lane] += a * a;
    sums->norm_b[lane] += b * b;
    sums->dot[lane] += a * b;
    sums->squares[lane] += difference * difference;
    sums->unequal[lane] += difference != 0.0 ? 1.0 : 0.0;
    return difference;
}

/* Adds `count` elements from lane 0 on, and returns the largest |a - b|, which is unspecified if an element is NaN or
 * infinite. */
typedef double (*sl_difference_fn)(const double *a, const double *b, size_t count, sl_difference_lanes *sums);

double sl_difference_scalar(const double *a, const double *b, size_t count, sl_difference_lanes *sums);
double sl_difference_avx2(const double *a, const double *b, size_t count, sl_difference_lanes *sums);
double sl_difference_avx512(const double *a, const double *b, size_t count, sl_difference_lanes *sums);
double sl_difference_neon(const double *a, const double *b, size_t count, sl_difference_lanes *sums);

#endif
