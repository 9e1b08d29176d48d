/* Quantization to the formats of other engines: a scale for each block of a matrix, and codes that are packed into
 * bytes. Each step rounds exactly as in the engine's own tool, see safeload/base/preset.py for their names.
 *
 * Scalar C is the reference; every other tier produces the same bits.
 */
#ifndef SL_ENCODE_H
#define SL_ENCODE_H

#include "base/base.h"

/* Steps may read this many values past the last, less one, and write as many codes. */
#define SL_ENCODE_LANES 16

/* How values become codes: blocks of `group` values each, of which the last may be smaller. A value becomes
 * (value - bias) / scale, rounded to `from`, the dtype of the weights; then plus zero, rounded again. */
typedef struct sl_encode_blocks {
    size_t group;
    int32_t from;
    bool multiplies;     /* value * scale instead, not rounded to `from` */
    const float *scales; /* one per block, not zero */
    const float *biases; /* only of `integers`; NULL: none */
    const float *zeros;  /* likewise */
} sl_encode_blocks;

typedef struct sl_encode_steps {
    /* Widens the extremes of each block. A magnitude that is NaN exceeds infinity. least == NULL: only magnitudes. */
    void (*extremes)(const float *values, size_t count, size_t group, float *absmax, float *least, float *most);
    /* value / divisor, rounded to `from`. */
    void (*quotients)(const float *values, size_t count, float divisor, int32_t from, float *results);
    /* The integer nearest to each value within [least, most], ties to even, plus `offset`. */
    void (*integers)(const float *values, size_t count, const sl_encode_blocks *blocks, float least, float most,
                     int32_t offset, uint8_t *codes);
    /* The number of `bounds`, ascending, below each value; `map` has a code for each number. */
    void (*ranks)(const float *values, size_t count, const sl_encode_blocks *blocks, const float bounds[15],
                  const uint8_t map[16], uint8_t *codes);
    /* E4M3, ties to even; larger values become 448. */
    void (*e4m3)(const float *values, size_t count, const sl_encode_blocks *blocks, uint8_t *codes);
    /* Packs codes of 2 to 6 bits, the first in the lowest bits; with `high_first`, of 4 bits only, in the highest.
     * `count` is a multiple of 8, of 2 with 4 bits. Reads and writes nothing past the last. */
    void (*pack)(const uint8_t *codes, size_t count, uint32_t bits, bool high_first, uint8_t *bytes);
} sl_encode_steps;

extern const sl_encode_steps sl_encode_scalar;
extern const sl_encode_steps sl_encode_avx2;   /* each tier exists only if isa.h defines it; NULL steps: */
extern const sl_encode_steps sl_encode_avx512; /* those of the tier below */
extern const sl_encode_steps sl_encode_neon;

#endif
