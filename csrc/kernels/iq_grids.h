/* The grids of ggml's IQ types: an index in a file stands for all codes of an entry at once, 8 of 2 bits or 4 of 3
 * bits, each in a byte of its own, the first one lowest; and what a code is worth.
 *
 * Values stand in another file than the kernels on purpose: a compiler that sees -4 * d beside 4 * d negates a product,
 * and the sign of a NaN with it. */
#ifndef SL_IQ_GRIDS_H
#define SL_IQ_GRIDS_H

#include "base/base.h"

extern const uint64_t sl_grid_iq2_xxs[256];
extern const uint64_t sl_grid_iq2_xs[512];
extern const uint64_t sl_grid_iq2_s[1024];
extern const uint32_t sl_grid_iq3_xxs[256];
extern const uint32_t sl_grid_iq3_s[512];
extern const uint64_t sl_grid_iq1[2048]; /* of IQ1_S and IQ1_M */

/* Of codes 0, 1, ..., and from 8 on those of the same codes where a bit of the file says "minus": their negatives. */
extern const int8_t sl_values_iq2[16];
extern const int8_t sl_values_iq3_xxs[16];
extern const int8_t sl_values_iq3_s[16];
/* Eight times the code of the grid, -1, 0 or 1, and one more; or, from 8 on, one less. */
extern const int8_t sl_values_iq1[16];

#endif
