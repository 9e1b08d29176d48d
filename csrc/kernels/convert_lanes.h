/* The formats of small floats, and the loop of a vector kernel of conversions. Included only by the files of the tiers,
 * hence no prefix. A file with vector kernels must define TARGET, which marks functions of its instruction set. */
#ifndef SL_CONVERT_LANES_H
#define SL_CONVERT_LANES_H

#include "kernels/convert.h"

/* The meaning of the code of all ones and of the code of minus zero. */
enum { IEEE, ONE_NAN, MINUS_ZERO_IS_NAN, FINITE };

/* sign, exponent and mantissa, from high to low bits. F8_E4M3, F8_E5M2: arXiv:2209.05433. FNUZ: arXiv:2206.02915. F4,
 * F6: OCP Microscaling Formats v1.0. */
typedef struct small_float {
    int exponent_bits, mantissa_bits, bias, special;
} small_float;

static const small_float E5M2 = {5, 2, 15, IEEE}, E4M3FN = {4, 3, 7, ONE_NAN}, E5M2FNUZ = {5, 2, 16, MINUS_ZERO_IS_NAN},
                         E4M3FNUZ = {4, 3, 8, MINUS_ZERO_IS_NAN}, E2M1 = {2, 1, 1, FINITE}, E2M3 = {2, 3, 1, FINITE},
                         E3M2 = {3, 2, 3, FINITE};

/* 2^n as f32 bits; the result must be normal. */
static inline uint32_t power_of_two(int n) { return (uint32_t)(n + 127) << 23; }

/* Defines the kernel `name`: convert(in, out) takes `step` elements of `in_bytes` each to `out_bytes` each, and the
 * scalar kernel takes the remainder of a length. */
#define CONVERSION(name, convert, step, from, in_bytes, to, out_bytes)                    \
    TARGET static void name(const void *source, void *destination, size_t count) {        \
        const uint8_t *in = source;                                                       \
        uint8_t *out = destination;                                                       \
        size_t i = 0;                                                                     \
        for (; i + (step) <= count; i += (step)) {                                        \
            sl_prefetch_results(out + (out_bytes) * i, (out_bytes) * (step));             \
            convert(in + (in_bytes) * i, out + (out_bytes) * i);                          \
        }                                                                                 \
        sl_convert_rest(from, to, in + (in_bytes) * i, out + (out_bytes) * i, count - i); \
    }

#endif
