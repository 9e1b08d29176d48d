/* Quantization to ggml's K-quants, for the tiers: eight runs of elements at a time, each in a lane. The steps are
 * ggml's reference (quantize_row_q4_K_ref and others without an importance matrix, in
 * https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c), each rounded to f32 and none fused, so that the
 * bytes equal the reference compiled without contraction.
 *
 * Included only by the files of the tiers, hence no prefix. The including file must define:
 *
 *   TARGET                  marks functions of its instruction set
 *   KERNEL(type)            the name of a kernel
 *   lanes                   8 f32
 *   truths                  8 truth values
 *   all_of(value)           the value in each lane
 *   lanes_at(values), put(out, lanes)   load and store of an array of 8
 *   plus(a, b), minus(a, b), times(a, b), over(a, b)
 *   root(lanes)             square roots
 *   size_of(lanes)          |x|
 *   nearest(lanes)          rounded to an integer like ggml, half to even, for |x| < 2^22
 *   below(a, b), same(a, b) a < b, a == b
 *   both(p, q)              p and q
 *   choose(p, a, b)         a if p, otherwise b */
#ifndef SL_QUANT_K_H
#define SL_QUANT_K_H

#include "kernels/quant.h"
#include "kernels/scalar.h"

#define SUPER 256
#define LANES 8

/* Below this magnitude ggml treats all elements of a run as zeros (GROUP_MAX_EPS). */
#define ALL_ZEROS 1e-15f

TARGET SL_INLINE lanes within(lanes values, float least, float most) {
    values = choose(below(values, all_of(least)), all_of(least), values);
    return choose(below(all_of(most), values), all_of(most), values);
}

/* Returns true if the super-block has no NaN or infinity. */
SL_INLINE bool all_finite(const uint8_t *x) { return sl_quant_scalar.absmax_f32(x, SUPER) < SL_F32_INFINITY; }

/* Transposes eight runs: runs[i] holds element i of each. */
TARGET SL_INLINE void transposed(const uint8_t *x, size_t length, lanes *runs) {
    for (size_t i = 0; i < length; i++) {
        float values[LANES];
        for (size_t k = 0; k < LANES; k++) values[k] = float_of(load32(x, length * k + i));
        runs[i] = lanes_at(values);
    }
}

/* ---- runs of 32 with a scale and a minimum: x = scale * code - minimum (make_qkx2_quants) ---- */

/* The search for the scale of a run: codes go from 0 to `most`, and each of `steps` + 1 attempts spreads the range over
 * most + first + step * k codes. */
typedef struct search {
    float most, first, step;
    int steps;
} search;

/* The scales and minima of eight runs. */
typedef struct affine_runs {
    lanes codes[32], scale, minimum;
} affine_runs;

/* Returns the weighted error of codes. */
TARGET SL_INLINE lanes error_of(const lanes *x, const lanes *weights, const lanes *codes, lanes scale, lanes minimum) {
    lanes error = all_of(0.0f);
    for (size_t i = 0; i < 32; i++) {
        lanes difference = minus(plus(times(scale, codes[i]), minimum), x[i]);
        error = plus(error, times(weights[i], times(difference, difference)));
    }
    return error;
}

TARGET SL_INLINE void codes_of_runs(const lanes *x, lanes inverse, lanes minimum, float most, lanes *codes) {
    for (size_t i = 0; i < 32; i++) codes[i] = within(nearest(times(inverse, minus(x[i], minimum))), 0.0f, most);
}

TARGET static void find_affine(const lanes *x, const search *how, affine_runs *found) {
    const lanes zero = all_of(0.0f);
    lanes weights[32], tried[32], squares = zero;
    for (size_t i = 0; i < 32; i++) squares = plus(squares, times(x[i], x[i]));
    lanes mean = root(over(squares, all_of(32.0f)));
    for (size_t i = 0; i < 32; i++) weights[i] = plus(mean, size_of(x[i]));
    lanes least = x[0], largest = x[0], sum_w = weights[0], sum_x = times(weights[0], x[0]);
    for (size_t i = 1; i < 32; i++) {
        least = choose(below(x[i], least), x[i], least);
        largest = choose(below(largest, x[i]), x[i], largest);
        sum_w = plus(sum_w, weights[i]);
        sum_x = plus(sum_x, times(weights[i], x[i]));
    }
    least = choose(below(zero, least), zero, least);
    truths flat = same(largest, least);
    lanes minimum = least, inverse = over(all_of(how->most), minus(largest, least));
    lanes scale = over(all_of(1.0f), inverse);
    codes_of_runs(x, inverse, minimum, how->most, found->codes);
    lanes best = error_of(x, weights, found->codes, scale, minimum);
    for (int k = 0; k <= how->steps; k++) {
        float step = how->step * (float)k, span = how->first + step;
        span = span + how->most;
        inverse = over(all_of(span), minus(largest, minimum));
        codes_of_runs(x, inverse, minimum, how->most, tried);
        lanes sum_l = zero, sum_l2 = zero, sum_xl = zero;
        for (size_t i = 0; i < 32; i++) {
            lanes weighted = times(weights[i], tried[i]);
            sum_l = plus(sum_l, weighted);
            sum_l2 = plus(sum_l2, times(weighted, tried[i]));
            sum_xl = plus(sum_xl, times(weighted, x[i]));
        }
        lanes determinant = minus(times(sum_w, sum_l2), times(sum_l, sum_l));
        lanes new_scale = over(minus(times(sum_w, sum_xl), times(sum_x, sum_l)), determinant);
        lanes new_minimum = over(minus(times(sum_l2, sum_x), times(sum_l, sum_xl)), determinant);
        truths above = below(zero, new_minimum);
        new_scale = choose(above, over(sum_xl, sum_l2), new_scale);
        new_minimum = choose(above, zero, new_minimum);
        lanes error = error_of(x, weights, tried, new_scale, new_minimum);
        truths better = both(below(zero, determinant), below(error, best));
        for (size_t i = 0; i < 32; i++) found->codes[i] = choose(better, tried[i], found->codes[i]);
        best = choose(better, error, best);
        scale = choose(better, new_scale, scale);
        minimum = choose(better, new_minimum, minimum);
    }
    for (size_t i = 0; i < 32; i++) found->codes[i] = choose(flat, zero, found->codes[i]);
    found->scale = choose(flat, zero, scale);
    found->minimum = minus(zero, choose(flat, least, minimum));
}

/* Packs scale and minimum of run k, 6 bits each; see scaling_of in dequant.h. */
SL_INLINE void pack_scales(uint8_t packed[12], size_t k, uint8_t scale, uint8_t minimum) {
    if (k < 4) {
        packed[k] = scale;
        packed[k + 4] = minimum;
    } else {
        packed[k + 4] = (uint8_t)((scale & 15) | (minimum & 15) << 4);
        packed[k - 4] |= (uint8_t)(scale >> 4 << 6);
        packed[k] |= (uint8_t)(minimum >> 4 << 6);
    }
}

/* Returns a scale in 63rds of the largest scale; values out of range behave like ggml's conversion to a byte. */
SL_INLINE uint8_t six_bits(float inverse, float value) {
    uint8_t code = (uint8_t)nearest_int(inverse * value);
    return code < 63 ? code : 63;
}

/* Sets the codes and scales of a super-block. Returns false if an element is NaN or infinite. */
TARGET static bool quantize_affine(const uint8_t *x, const search *how, uint8_t d[2], uint8_t dmin[2],
                                   uint8_t packed[12], uint8_t codes[SUPER]) {
    if (!all_finite(x)) {
        store16(d, 0, SL_NOT_FINITE);
        return false;
    }
    lanes runs[32];
    affine_runs found;
    float scales[LANES], minima[LANES], values[LANES], most_scale = 0.0f, most_minimum = 0.0f;
    transposed(x, 32, runs);
    find_affine(runs, how, &found);
    put(scales, found.scale);
    put(minima, found.minimum);
    for (size_t i = 0; i < 32; i++) {
        put(values, found.codes[i]);
        for (size_t k = 0; k < LANES; k++) codes[32 * k + i] = (uint8_t)values[k];
    }
    for (size_t k = 0; k < LANES; k++) {
        most_scale = scales[k] > most_scale ? scales[k] : most_scale;
        most_minimum = minima[k] > most_minimum ? minima[k] : most_minimum;
    }
    float inverse_scale = most_scale > 0.0f ? 63.0f / most_scale : 0.0f;
    float inverse_minimum = most_minimum > 0.0f ? 63.0f / most_minimum : 0.0f;
    store_half(d, most_scale / 63.0f);
    store_half(dmin, most_minimum / 63.0f);
    float own[LANES], less[LANES];
    for (size_t k = 0; k < LANES; k++) {
        uint8_t scale = six_bits(inverse_scale, scales[k]), minimum = six_bits(inverse_minimum, minima[k]);
        pack_scales(packed, k, scale, minimum);
        own[k] = load_half(d, 0) * (float)scale;
        less[k] = load_half(dmin, 0) * (float)minimum;
    }
    for (size_t i = 0; i < 32; i++) {
        lanes code = nearest(over(plus(runs[i], lanes_at(less)), lanes_at(own)));
        put(values, within(code, 0.0f, how->most));
        for (size_t k = 0; k < LANES; k++)
            if (own[k] != 0.0f) codes[32 * k + i] = (uint8_t)values[k];
    }
    return true;
}

static const search SEARCH_Q4_K = {15.0f, -1.0f, 0.1f, 20};
static const search SEARCH_Q5_K = {31.0f, -0.5f, 0.1f, 15};

TARGET SL_INLINE void quantize_q4_k(const uint8_t *x, sl_q4_k *block) {
    uint8_t codes[SUPER];
    if (!quantize_affine(x, &SEARCH_Q4_K, block->d, block->dmin, block->scales, codes)) return;
    for (size_t i = 0; i < 128; i++) {
        size_t first = i / 32 * 64 + i % 32;
        block->codes[i] = (uint8_t)(codes[first] | codes[first + 32] << 4);
    }
}

TARGET SL_INLINE void quantize_q5_k(const uint8_t *x, sl_q5_k *block) {
    uint8_t codes[SUPER];
    if (!quantize_affine(x, &SEARCH_Q5_K, block->d, block->dmin, block->scales, codes)) return;
    for (size_t i = 0; i < 128; i++) {
        size_t first = i / 32 * 64 + i % 32;
        block->codes[i] = (uint8_t)((codes[first] & 15) | (codes[first + 32] & 15) << 4);
    }
    for (size_t i = 0; i < SUPER; i++) block->high[i % 32] |= (uint8_t)(codes[i] >> 4 << i / 32);
}

/* ---- runs of 16 with a scale: x = scale * (code - 32) (make_qx_quants) ---- */

/* Sums x * code and code^2 over codes, weighted by x^2. */
TARGET SL_INLINE void sums_of(const lanes *x, const lanes *codes, lanes *sum_xl, lanes *sum_l2) {
    *sum_xl = *sum_l2 = all_of(0.0f);
    for (size_t i = 0; i < 16; i++) {
        lanes weight = times(x[i], x[i]);
        *sum_xl = plus(*sum_xl, times(times(weight, x[i]), codes[i]));
        *sum_l2 = plus(*sum_l2, times(times(weight, codes[i]), codes[i]));
    }
}

/* Returns the scale of each of eight runs and sets the codes, from 0 to 63; codes are 0 if the scale is 0. */
TARGET static lanes find_linear(const lanes *x, lanes *codes) {
    const lanes zero = all_of(0.0f);
    lanes size = zero, largest = zero, tried[16], sum_xl, sum_l2;
    for (size_t i = 0; i < 16; i++) {
        truths more = below(size, size_of(x[i]));
        size = choose(more, size_of(x[i]), size);
        largest = choose(more, x[i], largest);
    }
    truths nothing = below(size, all_of(ALL_ZEROS));
    lanes inverse = over(all_of(-32.0f), largest);
    for (size_t i = 0; i < 16; i++) codes[i] = within(nearest(times(inverse, x[i])), -32.0f, 31.0f);
    sums_of(x, codes, &sum_xl, &sum_l2);
    lanes scale = choose(same(sum_l2, zero), zero, over(sum_xl, sum_l2)), best = times(scale, sum_xl);
    for (int k = -9; k <= 9; k++) {
        if (k == 0) continue;
        float step = 0.1f * (float)k, span = 32.0f + step;
        inverse = over(all_of(-span), largest);
        for (size_t i = 0; i < 16; i++) tried[i] = within(nearest(times(inverse, x[i])), -32.0f, 31.0f);
        sums_of(x, tried, &sum_xl, &sum_l2);
        truths better = both(below(zero, sum_l2), below(times(best, sum_l2), times(sum_xl, sum_xl)));
        for (size_t i = 0; i < 16; i++) codes[i] = choose(better, tried[i], codes[i]);
        scale = choose(better, over(sum_xl, sum_l2), scale);
        best = choose(better, times(scale, sum_xl), best);
    }
    for (size_t i = 0; i < 16; i++) codes[i] = choose(nothing, zero, plus(codes[i], all_of(32.0f)));
    return choose(nothing, zero, scale);
}

TARGET static void quantize_q6_k(const uint8_t *x, sl_q6_k *block) {
    if (!all_finite(x)) {
        store16(block->d, 0, SL_NOT_FINITE);
        return;
    }
    lanes runs[2][16], found[16];
    float scales[16], values[LANES], most = 0.0f, largest = 0.0f;
    uint8_t codes[SUPER];
    for (size_t half = 0; half < 2; half++) {
        transposed(x + 512 * half, 16, runs[half]);
        put(scales + 8 * half, find_linear(runs[half], found));
        for (size_t i = 0; i < 16; i++) {
            put(values, found[i]);
            for (size_t k = 0; k < LANES; k++) codes[128 * half + 16 * k + i] = (uint8_t)values[k];
        }
    }
    for (size_t k = 0; k < 16; k++) {
        float size = scales[k] < 0.0f ? -scales[k] : scales[k];
        largest = size > most ? scales[k] : largest;
        most = size > most ? size : most;
    }
    if (most < ALL_ZEROS) return;
    float inverse = -128.0f / largest, own[16];
    store_half(block->d, 1.0f / inverse);
    for (size_t k = 0; k < 16; k++) {
        int32_t scale = nearest_int(inverse * scales[k]);
        block->scales[k] = (int8_t)(scale < 127 ? scale : 127);
        own[k] = load_half(block->d, 0) * (float)block->scales[k];
    }
    for (size_t half = 0; half < 2; half++)
        for (size_t i = 0; i < 16; i++) {
            put(values, within(nearest(over(runs[half][i], lanes_at(own + 8 * half))), -32.0f, 31.0f));
            for (size_t k = 0; k < LANES; k++)
                if (own[8 * half + k] != 0.0f) codes[128 * half + 16 * k + i] = (uint8_t)((int32_t)values[k] + 32);
        }
    for (size_t half = 0; half < 2; half++)
        for (size_t i = 0; i < 32; i++) {
            const uint8_t *code = codes + 128 * half + i;
            uint8_t *low = block->low + 64 * half + i;
            low[0] = (uint8_t)((code[0] & 15) | (code[64] & 15) << 4);
            low[32] = (uint8_t)((code[32] & 15) | (code[96] & 15) << 4);
            block->high[32 * half + i] = (uint8_t)(code[0] >> 4 | code[32] >> 4 << 2 | code[64] >> 4 << 4 |
                                                   code[96] >> 4 << 6);
        }
}

/* ---- kernels ---- */

#define DEFINE(type)                                                                       \
    TARGET static void KERNEL(type)(const void *source, void *destination, size_t count) { \
        sl_##type *blocks = destination;                                                   \
        memset(blocks, 0, count / SUPER * sizeof *blocks);                                 \
        for (size_t b = 0; b < count / SUPER; b++)                                         \
            quantize_##type((const uint8_t *)source + 4 * SUPER * b, &blocks[b]);          \
    }

DEFINE(q4_k)
DEFINE(q5_k)
DEFINE(q6_k)

/* The rows of a tier, without its end. */
#define QUANT_K_KERNELS \
    {SL_F32, SL_Q4_K, KERNEL(q4_k)}, {SL_F32, SL_Q5_K, KERNEL(q5_k)}, {SL_F32, SL_Q6_K, KERNEL(q6_k)},

#endif
