/* Kernels that add products of two matrices to values: W + scaling * (left * right). Scalar C is the reference; every
 * other tier produces the same bits, except for the bits of a NaN.
 *
 * The product of a value is summed over the rank in order, starting with zero, and each step is fused: it rounds the
 * exact sum of the previous result and the exact product once, like C's fmaf. A fused step of `scaling` adds the
 * product to the value. */
#ifndef SL_MERGE_H
#define SL_MERGE_H

#include "base/base.h"

/* Adds a product to `rows` rows of `panels` * SL_MERGE_PANEL f32 at any alignment, in file byte order; rows are `line`
 * bytes apart. `update` begins with the first row and the first panel. */
typedef void (*sl_merge_fn)(uint8_t *values, size_t line, size_t rows, size_t panels, const sl_update *update);

void sl_merge_scalar(uint8_t *values, size_t line, size_t rows, size_t panels, const sl_update *update);
/* Each exists only if isa.h defines it. */
void sl_merge_avx2(uint8_t *values, size_t line, size_t rows, size_t panels, const sl_update *update);
void sl_merge_avx512(uint8_t *values, size_t line, size_t rows, size_t panels, const sl_update *update);
void sl_merge_neon(uint8_t *values, size_t line, size_t rows, size_t panels, const sl_update *update);

#endif
