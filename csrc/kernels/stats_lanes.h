/* The loop of a vector kernel of statistics. Included only by the files of the tiers, hence no prefix. The including
 * file must define TARGET, which marks functions of its instruction set, the type `sums`, start(sums) and
 * finish(sums, lanes). */
#ifndef SL_STATS_LANES_H
#define SL_STATS_LANES_H

#include "kernels/stats.h"

/* Defines the kernel `name`: add(sums, in) adds SL_STATS_LANES elements of `size` bytes each. */
#define LANES_OF(name, add, from, size)                                                      \
    TARGET static void name(const void *source, size_t count, sl_lanes *lanes) {             \
        const uint8_t *in = source;                                                          \
        sums all;                                                                            \
        size_t i = 0;                                                                        \
        start(&all);                                                                         \
        for (; i + SL_STATS_LANES <= count; i += SL_STATS_LANES) add(&all, in + (size) * i); \
        finish(&all, lanes);                                                                 \
        sl_lanes_rest(from, in + (size) * i, count - i, lanes);                              \
    }

#endif
