/* Differences element by element: the reference for all tiers. */
#include "kernels/difference.h"

double sl_difference_scalar(const double *a, const double *b, size_t count, sl_difference_lanes *sums) {
    double largest = 0.0;
    for (size_t i = 0; i < count; i++) {
        double difference = sl_difference_add(sums, i % SL_DIFFERENCE_LANES, a[i], b[i]);
        largest = difference > largest ? difference : largest;
    }
    return largest;
}
