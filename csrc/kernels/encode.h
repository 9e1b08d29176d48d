/* Quantization to the formats of other engines: a scale for each block of a matrix, and codes that pack_codes joins to
 * bytes. Each step rounds exactly as in the engine's own tool, see safeload/base/preset.py for their names.
 *
 * Scalar C is the reference; every other tier produces the same bits.
 */
#ifndef SL_ENCODE_H
#define SL_ENCODE_H

#include "base/base.h"

/* The extremes of the values of a block. */
typedef struct sl_extremes {
    uint32_t absmax; /* the bits of the largest magnitude */
    float least, most;
} sl_extremes;

/* Steps over the values of blocks of `group` values each, of which the last may be smaller. `from` is the dtype of the
 * weights: a result that the engine computes in that dtype is rounded to it. */
typedef struct sl_encode_steps {
    sl_extremes (*range)(const float *values, size_t count); /* count > 0 */
    /* (values - biases) / scales, rounded to `from`; no biases if NULL. */
    void (*divide)(const float *values, size_t count, size_t group, const float *biases, const float *scales,
                   int32_t from, float *results);
    /* values * factors, at most `limit` in magnitude. */
    void (*multiply)(const float *values, size_t count, size_t group, const float *factors, float limit,
                     float *results);
    /* The integer nearest to each value within [least, most], ties to even, plus `offset`. */
    void (*round)(const float *values, size_t count, float least, float most, int32_t offset, uint8_t *codes);
    /* E2M1. `even`: ties to the even code, and negative values keep their sign; otherwise ties to the smaller
     * magnitude, and a value that becomes 0 has no sign. */
    void (*e2m1)(const float *values, size_t count, bool even, uint8_t *codes);
    /* The number of `bounds`, ascending, below each value; `map` has a code for each number. */
    void (*bucket)(const float *values, size_t count, const float bounds[15], const uint8_t map[16], uint8_t *codes);
    /* E4M3, ties to even; values are at most 448 in magnitude. */
    void (*e4m3)(const float *values, size_t count, uint8_t *codes);
    /* Joins pairs of codes to bytes; count is even. */
    void (*nibbles)(const uint8_t *codes, size_t count, bool high_first, uint8_t *bytes);
} sl_encode_steps;

extern const sl_encode_steps sl_encode_scalar;
extern const sl_encode_steps sl_encode_avx2; /* exists only if isa.h defines it */

#endif
