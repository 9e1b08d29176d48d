/* The loop of a vector kernel of conversions. Included only by the files of the tiers, hence no prefix. The including
 * file must define TARGET, which marks functions of its instruction set. */
#ifndef SL_CONVERT_LANES_H
#define SL_CONVERT_LANES_H

#include "kernels/convert.h"

/* Defines the kernel `name`: convert(in, out) takes `step` elements of `in_bytes` each to `out_bytes` each, and the
 * scalar kernel takes the remainder of a length. */
#define CONVERSION(name, convert, step, from, in_bytes, to, out_bytes)                                \
    TARGET static void name(const void *source, void *destination, size_t count) {                    \
        const uint8_t *in = source;                                                                   \
        uint8_t *out = destination;                                                                   \
        size_t i = 0;                                                                                 \
        for (; i + (step) <= count; i += (step)) convert(in + (in_bytes) * i, out + (out_bytes) * i); \
        sl_convert_rest(from, to, in + (in_bytes) * i, out + (out_bytes) * i, count - i);             \
    }

#endif
