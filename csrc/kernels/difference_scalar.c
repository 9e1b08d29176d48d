/* Differences element by element: the reference for all tiers. */
#include "kernels/difference.h"

double sl_difference_scalar(const double *a, const double *b, size_t count, sl_difference_lanes *sums) {
    double largest = 0.0;
    for (size_t i = 0; i < count; i++) {
        size_t k = i % SL_DIFFERENCE_LANES;
        double difference = sl_distance(a[i], b[i]);
        sums->norm_a[k] += a[i] * a[i];
        sums->norm_b[k] += b[i] * b[i];
        sums->dot[k] += a[i] * b[i];
        sums->squares[k] += difference * difference;
        sums->unequal[k] += difference != 0.0 ? 1.0 : 0.0;
        largest = difference > largest ? difference : largest;
    }
    return largest;
}
