/* Differences between two runs of f64, in vectors of eight f64. Included only by the files of the tiers, hence no
 * prefix. The including file must define:
 *
 *   TARGET               marks functions of its instruction set
 *   KERNEL               the name of the kernel
 *   lanes                8 f64
 *   lanes_at(values)     loads from memory
 *   put(out, lanes)      stores to memory
 *   plus(a, b), less(a, b), times(a, b), larger(a, b)
 *   size_of(lanes)       |x|
 *   ones(lanes)          1.0 if the lane is not zero, otherwise 0 */
#ifndef SL_DIFFERENCE_LANES_H
#define SL_DIFFERENCE_LANES_H

#include "kernels/difference.h"

TARGET double KERNEL(const double *a, const double *b, size_t count, sl_difference_lanes *sums) {
    lanes norm_a = lanes_at(sums->norm_a), norm_b = lanes_at(sums->norm_b), dot = lanes_at(sums->dot);
    lanes squares = lanes_at(sums->squares), unequal = lanes_at(sums->unequal);
    double most[SL_DIFFERENCE_LANES] = {0}, found = 0.0;
    size_t whole = count - count % SL_DIFFERENCE_LANES;
    lanes largest = lanes_at(most);
    for (size_t i = 0; i < whole; i += SL_DIFFERENCE_LANES) {
        lanes x = lanes_at(a + i), y = lanes_at(b + i), difference = size_of(less(x, y));
        norm_a = plus(norm_a, times(x, x));
        norm_b = plus(norm_b, times(y, y));
        dot = plus(dot, times(x, y));
        squares = plus(squares, times(difference, difference));
        unequal = plus(unequal, ones(difference));
        largest = larger(difference, largest);
    }
    put(sums->norm_a, norm_a);
    put(sums->norm_b, norm_b);
    put(sums->dot, dot);
    put(sums->squares, squares);
    put(sums->unequal, unequal);
    put(most, largest);
    for (size_t i = whole; i < count; i++) {
        double difference = sl_difference_add(sums, i - whole, a[i], b[i]);
        found = difference > found ? difference : found;
    }
    for (size_t k = 0; k < SL_DIFFERENCE_LANES; k++) found = most[k] > found ? most[k] : found;
    return found;
}

#endif
