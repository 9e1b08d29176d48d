/* Differences of two runs of f64: partial sums of what `safeload.diff` tells of two tensors. Scalar C is the reference;
 * every other tier gives the same bits: element i goes to lane i % SL_DIFFERENCE_LANES, lanes are added up in one
 * order, and no product is fused with a sum. */
#ifndef SL_DIFFERENCE_H
#define SL_DIFFERENCE_H

#include "base/base.h"

/* One register of AVX-512, two of AVX2 and four of NEON: AVX2 keeps all sums of a block in registers. */
#define SL_DIFFERENCE_LANES ((size_t)8)

/* Elements whose largest difference is known before its place is looked for. Both runs of them, 16 KiB, are still in
 * the first-level cache. */
#define SL_DIFFERENCE_BLOCK ((size_t)1024)

/* Sums, of element i in lane i % SL_DIFFERENCE_LANES. Where an element is not finite, norm_a or norm_b is not finite
 * either. */
typedef struct sl_difference_lanes {
    double norm_a[SL_DIFFERENCE_LANES], norm_b[SL_DIFFERENCE_LANES], dot[SL_DIFFERENCE_LANES];
    double squares[SL_DIFFERENCE_LANES]; /* of a - b */
    double unequal[SL_DIFFERENCE_LANES]; /* how many differ */
} sl_difference_lanes;

/* |a - b| */
static inline double sl_distance(double a, double b) { return a < b ? b - a : a - b; }

/* Adds an element to a lane; returns |a - b|. */
static inline double sl_difference_add(sl_difference_lanes *sums, size_t lane, double a, double b) {
    double difference = sl_distance(a, b);
    sums->norm_a[lane] += a * a;
    sums->norm_b[lane] += b * b;
    sums->dot[lane] += a * b;
    sums->squares[lane] += difference * difference;
    sums->unequal[lane] += difference != 0.0 ? 1.0 : 0.0;
    return difference;
}

/* Adds `count` elements from lane 0 on; returns the largest |a - b| of them, which is unspecified where an
 * element is not finite. */
typedef double (*sl_difference_fn)(const double *a, const double *b, size_t count, sl_difference_lanes *sums);

double sl_difference_scalar(const double *a, const double *b, size_t count, sl_difference_lanes *sums);
double sl_difference_avx2(const double *a, const double *b, size_t count, sl_difference_lanes *sums);
double sl_difference_avx512(const double *a, const double *b, size_t count, sl_difference_lanes *sums);
double sl_difference_neon(const double *a, const double *b, size_t count, sl_difference_lanes *sums);

#endif
