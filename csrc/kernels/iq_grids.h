/* The grids of ggml's IQ types, and the values of codes. An index in a file stands for all codes of an entry: 8 codes
 * of 2 bits or 4 of 3 bits, each in its own byte, the first in the lowest.
 *
 * The values are deliberately not in the file of the kernels: a compiler that sees both 4 * d and -4 * d negates a
 * product, which also flips the sign of a NaN. */
#ifndef SL_IQ_GRIDS_H
#define SL_IQ_GRIDS_H

#include "base/base.h"

extern const uint64_t sl_grid_iq2_xxs[256];
extern const uint64_t sl_grid_iq2_xs[512];
extern const uint64_t sl_grid_iq2_s[1024];
extern const uint32_t sl_grid_iq3_xxs[256];
extern const uint32_t sl_grid_iq3_s[512];
extern const uint64_t sl_grid_iq1[2048]; /* for IQ1_S and IQ1_M */

/* Values of codes 0 to 7, then their negatives (8 to 15), which a sign bit of the file selects. */
extern const int8_t sl_values_iq2[16];
extern const int8_t sl_values_iq3_xxs[16];
extern const int8_t sl_values_iq3_s[16];
/* Eight times the grid's code, -1, 0 or 1, plus one; from 8 on, minus one. */
extern const int8_t sl_values_iq1[16];

#endif
