/* Quantization for other engines in terms of 16 f32. Blocks end in overlapping vectors: extremes see a value twice, and
 * codes past the end of a block are overwritten by those of the next one. Included only by the files of the tiers,
 * hence no prefix. The including file must define:
 *
 *   TARGET                          marks functions of its instruction set
 *   NAME(stem)                      the name of a step
 *   lanes, load, store, same        16 f32; from memory, to memory, with a number in all lanes
 *   minus, times, plus, over        operations on two vectors
 *   smaller, larger                 of finite numbers
 *   to_bf16, to_f16                 rounded, as f32; no NaN
 *   sizes, sizes_of, larger_size    magnitudes as bits
 *   highest_size(sizes)             as a number
 *   lowest(lanes), highest(lanes)   of all lanes
 *   put_integers(codes, lanes, n)   the low bytes of nearest integers plus n
 *   table, load_table(bounds, map)  15 bounds and 16 codes
 *   put_ranks(codes, lanes, table)  codes[number of bounds below the lane]
 *   put_e4m3(codes, lanes)          magnitudes are at most 448 */
#ifndef SL_ENCODE_LANES_H
#define SL_ENCODE_LANES_H

#include "kernels/encode.h"

#define WIDTH ((size_t)SL_ENCODE_LANES)

TARGET static void NAME(extremes)(const float *values, size_t count, size_t group, float *absmax, float *least,
                                  float *most) {
    for (size_t begin = 0, k = 0; begin < count; begin += group, k++) {
        size_t end = count - begin < group ? count : begin + group;
        if (end - begin < WIDTH) {
            bool both = least != NULL;
            sl_encode_scalar.extremes(values + begin, end - begin, WIDTH, absmax + k, both ? least + k : NULL,
                                      both ? most + k : NULL);
            continue;
        }
        lanes last = load(values + end - WIDTH), low = last, high = last;
        sizes top = sizes_of(last), own = sizes_of(same(absmax[k]));
        if (least == NULL) {
            for (size_t i = begin; i < end - WIDTH; i += WIDTH) top = larger_size(top, sizes_of(load(values + i)));
        } else {
            for (size_t i = begin; i < end - WIDTH; i += WIDTH) {
                lanes value = load(values + i);
                top = larger_size(top, sizes_of(value));
                low = smaller(value, low);
                high = larger(value, high);
            }
            least[k] = lowest(smaller(low, same(least[k])));
            most[k] = highest(larger(high, same(most[k])));
        }
        absmax[k] = highest_size(larger_size(top, own));
    }
}

TARGET SL_INLINE lanes rounded(lanes value, int32_t from) {
    return from == SL_BF16 ? to_bf16(value) : from == SL_F16 ? to_f16(value) : value;
}

TARGET static void NAME(quotients)(const float *values, size_t count, float divisor, int32_t from, float *results) {
    size_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) store(results + i, rounded(over(load(values + i), same(divisor)), from));
    sl_encode_scalar.quotients(values + i, count - i, divisor, from, results + i);
}

/* The code of each value, with a loop for each dtype; `value` is that of 16 lanes in terms of `from`. */
#define EACH(from, value, put) \
    for (size_t i = begin; i < end; i += WIDTH) put(codes + i, value(load(values + i), from))
#define EACH_DTYPE(value, put)       \
    if (blocks->from == SL_BF16)     \
        EACH(SL_BF16, value, put);   \
    else if (blocks->from == SL_F16) \
        EACH(SL_F16, value, put);    \
    else                             \
        EACH(SL_F32, value, put)

#define DIVIDED(value, from) rounded(over(value, scale), from)
#define WITH_ZERO(value, from) rounded(plus(DIVIDED(value, from), zero), from)
#define WITH_BIAS(value, from) DIVIDED(minus(value, bias), from)
#define MULTIPLIED(value, from) times(value, scale)

TARGET static void NAME(integers)(const float *values, size_t count, const sl_encode_blocks *blocks, float least,
                                  float most, int32_t offset, uint8_t *codes) {
#define PUT(at, value) put_integers(at, smaller(larger(value, same(least)), same(most)), offset)
    for (size_t begin = 0, k = 0; begin < count; begin += blocks->group, k++) {
        size_t end = count - begin < blocks->group ? count : begin + blocks->group;
        lanes scale = same(blocks->scales[k]);
        if (blocks->biases != NULL) {
            lanes bias = same(blocks->biases[k]);
            EACH_DTYPE(WITH_BIAS, PUT);
        } else if (blocks->zeros != NULL) {
            lanes zero = same(blocks->zeros[k]);
            EACH_DTYPE(WITH_ZERO, PUT);
        } else {
            EACH_DTYPE(DIVIDED, PUT);
        }
    }
#undef PUT
}

/* The codes of blocks that have only scales. */
#define EACH_SCALED(put)                                                            \
    for (size_t begin = 0, k = 0; begin < count; begin += blocks->group, k++) {     \
        size_t end = count - begin < blocks->group ? count : begin + blocks->group; \
        lanes scale = same(blocks->scales[k]);                                      \
        if (blocks->multiplies)                                                     \
            EACH(SL_F32, MULTIPLIED, put);                                          \
        else                                                                        \
            EACH_DTYPE(DIVIDED, put);                                               \
    }

TARGET static void NAME(ranks)(const float *values, size_t count, const sl_encode_blocks *blocks,
                               const float bounds[15], const uint8_t map[16], uint8_t *codes) {
#define PUT(at, value) put_ranks(at, value, &all)
    const table all = load_table(bounds, map);
    EACH_SCALED(PUT)
#undef PUT
}

TARGET static void NAME(e4m3)(const float *values, size_t count, const sl_encode_blocks *blocks, uint8_t *codes) {
#define PUT(at, value) put_e4m3(at, smaller(larger(value, same(-448.0f)), same(448.0f)))
    EACH_SCALED(PUT)
#undef PUT
}

#endif
