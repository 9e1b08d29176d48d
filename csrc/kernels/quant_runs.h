/* Searches for the scales of runs of elements, for the tiers: one run in each lane. The steps are those
 * of ggml (https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c), each rounded to f32 and none fused, so that
 * the bytes equal ggml compiled without contraction.
 *
 * Included only by the files of the tiers, hence no prefix. The including file must define:
 *
 *   TARGET                  marks functions of its instruction set
 *   KERNEL(type)            the name of a kernel
 *   WEIGHTED(type)          the name of a kernel with importance
 *   LANES                   8 or 16
 *   lanes                   this many f32
 *   truths                  this many truth values
 *   all_of(value)           the value in each lane
 *   lanes_at(values), put(out, lanes)   load and store of an array of LANES
 *   put_bytes(out, lanes)   stores integers from 0 to 255 as bytes
 *   transposed(x, length, runs)         see below; optional, with OWN_TRANSPOSED
 *   plus(a, b), minus(a, b), times(a, b), over(a, b)
 *   root(lanes)             square roots
 *   size_of(lanes)          |x|
 *   least_of(a, b), most_of(a, b)       of numbers that are not NaN; of zeros with both signs, either
 *   nearest(lanes)          rounded to an integer like ggml: half to even for |x| < 2^22, otherwise some integer
 *   below(a, b), same(a, b) a < b, a == b
 *   both(p, q), either(p, q)
 *   all_true(p), any_true(p)
 *   choose(p, a, b)         a if p, otherwise b */
#ifndef SL_QUANT_RUNS_H
#define SL_QUANT_RUNS_H

#include "kernels/blocks.h"
#include "kernels/quant.h"
#include "kernels/scalar.h"

#define SUPER 256
#define LONGEST 32 /* elements of a run */

/* Below this magnitude ggml treats all elements of a run as zeros (GROUP_MAX_EPS). */
#define ALL_ZEROS 1e-15f

/* Limits values that are not NaN. */
TARGET SL_INLINE lanes within(lanes values, float least, float most) {
    return least_of(most_of(values, all_of(least)), all_of(most));
}

/* Codes must be below this magnitude for `nearest` to be a rounding. */
#define ROUNDS_BELOW 0x1p22f

/* Like nearest, for |x| < ROUNDS_BELOW: the sum is rounded to an integer, and the difference exact. */
TARGET SL_INLINE lanes nearest_small(lanes values) {
    const lanes shift = all_of(12582912.0f);
    return minus(plus(values, shift), shift);
}

#ifndef OWN_TRANSPOSED
/* Transposes runs of 16 or 32: runs[i] holds element i of each. */
TARGET SL_INLINE void transposed(const uint8_t *x, size_t length, lanes *runs) {
    for (size_t i = 0; i < length; i++) {
        float values[LANES];
        for (size_t k = 0; k < LANES; k++) values[k] = float_of(load32(x, length * k + i));
        runs[i] = lanes_at(values);
    }
}
#endif

/* Returns true for runs without NaN or infinity. */
TARGET SL_INLINE truths finite_runs(const lanes *x, size_t length) {
    const lanes infinity = all_of(float_of(SL_F32_INFINITY));
    truths finite = below(size_of(x[0]), infinity);
    for (size_t i = 1; i < length; i++) finite = both(finite, below(size_of(x[i]), infinity));
    return finite;
}

/* Exchanges the bytes of a and b that `mask` selects after shifting a. */
SL_INLINE void exchange(uint64_t *a, uint64_t *b, int shift, uint64_t mask) {
    uint64_t difference = ((*a >> shift) ^ *b) & mask;
    *b ^= difference;
    *a ^= difference << shift;
}

/* Transposes a matrix of 8 x 8 bytes. */
SL_INLINE void transpose_bytes(const uint8_t *in, size_t step, uint8_t *out, size_t out_step) {
    uint64_t row[8];
    for (size_t k = 0; k < 8; k++) row[k] = sl_load_le64(in + step * k);
    for (size_t k = 0; k < 8; k += 2) exchange(&row[k], &row[k + 1], 8, UINT64_C(0x00ff00ff00ff00ff));
    for (size_t k = 0; k < 8; k += k % 4 == 1 ? 3 : 1) exchange(&row[k], &row[k + 2], 16, UINT64_C(0x0000ffff0000ffff));
    for (size_t k = 0; k < 4; k++) exchange(&row[k], &row[k + 4], 32, UINT64_C(0x00000000ffffffff));
    for (size_t k = 0; k < 8; k++) sl_store_le64(out + out_step * k, row[k]);
}

/* Stores the codes of runs of 16 or 32, each run's one after another. */
TARGET SL_INLINE void put_codes(const lanes *runs, size_t length, uint8_t *codes) {
    uint8_t bytes[LONGEST * LANES];
    for (size_t i = 0; i < length; i++) put_bytes(bytes + LANES * i, runs[i]);
    for (size_t i = 0; i < length; i += 8)
        for (size_t k = 0; k < LANES; k += 8)
            transpose_bytes(bytes + LANES * i + k, LANES, codes + length * k + i, length);
}

/* ---- runs of 32 ---- */

#define GROUP (LANES * SL_QK) /* elements of a group of runs, one in each lane */

/* A group of runs of 32; missing runs are zeros. */
typedef struct run_group {
    const uint8_t *x;
    const float *importance; /* NULL: none */
    size_t count;
    uint8_t padded[4 * GROUP];
    float padded_importance[GROUP];
} run_group;

SL_INLINE void take_runs(run_group *self, const void *row, const float *importance, size_t first, size_t count) {
    size_t left = (count - first) / SL_QK;
    self->x = (const uint8_t *)row + 4 * first;
    self->importance = importance == NULL ? NULL : importance + first;
    self->count = left < LANES ? left : LANES;
    if (left >= LANES) return;
    memset(self->padded, 0, sizeof self->padded);
    memcpy(self->padded, self->x, 4 * SL_QK * left);
    self->x = self->padded;
    if (importance == NULL) return;
    memset(self->padded_importance, 0, sizeof self->padded_importance);
    memcpy(self->padded_importance, self->importance, sizeof(float) * SL_QK * left);
    self->importance = self->padded_importance;
}

/* Stores a scale as f16. NaNs, of sums that overflowed, become the same NaN on every processor. */
SL_INLINE void store_scale(uint8_t *out, float value) {
    if (value == value)
        store_half(out, value);
    else
        store16(out, 0, SL_NOT_FINITE);
}

/* ---- weights from importance ---- */

/* Returns the sum of squares, in order. */
SL_INLINE float squares_of(const uint8_t *x, size_t count) {
    float sum = 0.0f;
    for (size_t i = 0; i < count; i++) {
        float value = float_of(load32(x, i)), square = value * value;
        sum = sum + square;
    }
    return sum;
}

/* Sets the weights of runs: importance * sqrt(mean + x^2). `importance` has this machine's byte order. */
TARGET SL_INLINE void weigh(const lanes *x, const float *importance, size_t length, lanes mean, lanes *weights) {
    for (size_t i = 0; i < length; i++) {
        float values[LANES];
        for (size_t k = 0; k < LANES; k++) values[k] = importance[length * k + i];
        weights[i] = times(lanes_at(values), root(plus(mean, times(x[i], x[i]))));
    }
}

TARGET SL_INLINE lanes sum_of(const lanes *values, size_t length) {
    lanes sum = all_of(0.0f);
    for (size_t i = 0; i < length; i++) sum = plus(sum, values[i]);
    return sum;
}

/* ---- a scale and a minimum: x = scale * code + minimum (make_qkx2_quants, make_qkx3_quants) ---- */

/* The search for the scale of a run: codes go from 0 to `most`, and each of `steps` + 1 attempts spreads the range over
 * most + first + step * k codes. The error is a sum of squares, or of magnitudes. */
typedef struct search {
    size_t length;
    float most, first, step;
    int steps;
    bool magnitudes;
} search;

/* The codes, scales and minima of runs. */
typedef struct affine_runs {
    lanes codes[LONGEST], scale, minimum;
} affine_runs;

/* Returns the weighted error of codes. */
TARGET SL_INLINE lanes error_of(const lanes *x, const lanes *weights, search how, const lanes *codes, lanes scale,
                                lanes minimum) {
    lanes error = all_of(0.0f);
    for (size_t i = 0; i < how.length; i++) {
        lanes difference = minus(plus(times(scale, codes[i]), minimum), x[i]);
        difference = how.magnitudes ? size_of(difference) : times(difference, difference);
        error = plus(error, times(weights[i], difference));
    }
    return error;
}

/* Returns the code of an element; `small`: it is below ROUNDS_BELOW. */
TARGET SL_INLINE lanes code_of(lanes x, lanes inverse, lanes minimum, float most, bool small) {
    lanes scaled = times(inverse, minus(x, minimum));
    return within(small ? nearest_small(scaled) : nearest(scaled), 0.0f, most);
}

/* Sums for a scale and a minimum. */
typedef struct affine_sums {
    lanes l, l2, xl;
} affine_sums;

/* Sets the codes of an attempt and sums them, weighted. */
TARGET SL_INLINE void try_codes(const lanes *x, const lanes *weights, search how, lanes inverse, lanes minimum,
                                bool small, lanes *codes, affine_sums *sums) {
    sums->l = sums->l2 = sums->xl = all_of(0.0f);
    for (size_t i = 0; i < how.length; i++) {
        lanes code = code_of(x[i], inverse, minimum, how.most, small), weighted = times(weights[i], code);
        codes[i] = code;
        sums->l = plus(sums->l, weighted);
        sums->l2 = plus(sums->l2, times(weighted, code));
        sums->xl = plus(sums->xl, times(weighted, x[i]));
    }
}

/* Returns true if all codes of an attempt are below ROUNDS_BELOW before they are limited, in runs that are not flat.
 * Rounded differences and products are monotonic, so the ends of a run suffice. */
TARGET SL_INLINE bool are_small(lanes least, lanes largest, lanes inverse, lanes minimum, truths flat) {
    const lanes limit = all_of(ROUNDS_BELOW);
    truths low = below(size_of(times(inverse, minus(least, minimum))), limit);
    truths high = below(size_of(times(inverse, minus(largest, minimum))), limit);
    return all_true(either(flat, both(low, high)));
}

TARGET static void find_affine(const lanes *x, const lanes *weights, search how, affine_runs *found) {
    const lanes zero = all_of(0.0f);
    const size_t length = how.length;
    lanes tried[LONGEST];
    affine_sums sums;
    lanes least = x[0], largest = x[0], sum_w = weights[0], sum_x = times(weights[0], x[0]);
    for (size_t i = 1; i < length; i++) {
        least = choose(below(x[i], least), x[i], least);
        largest = choose(below(largest, x[i]), x[i], largest);
        sum_w = plus(sum_w, weights[i]);
        sum_x = plus(sum_x, times(weights[i], x[i]));
    }
    least = choose(below(zero, least), zero, least);
    truths flat = same(largest, least);
    lanes minimum = least, inverse = over(all_of(how.most), minus(largest, least));
    lanes scale = over(all_of(1.0f), inverse);
    lanes best_inverse = inverse, best_minimum = minimum; /* of the best codes */
    for (size_t i = 0; i < length; i++) tried[i] = code_of(x[i], inverse, minimum, how.most, false);
    lanes best = error_of(x, weights, how, tried, scale, minimum);
    for (int k = 0; k <= how.steps; k++) {
        float step = how.step * (float)k, span = how.first + step;
        span = span + how.most;
        inverse = over(all_of(span), minus(largest, minimum));
        if (are_small(least, largest, inverse, minimum, flat))
            try_codes(x, weights, how, inverse, minimum, true, tried, &sums);
        else
            try_codes(x, weights, how, inverse, minimum, false, tried, &sums);
        lanes determinant = minus(times(sum_w, sums.l2), times(sums.l, sums.l));
        lanes new_scale = over(minus(times(sum_w, sums.xl), times(sum_x, sums.l)), determinant);
        lanes new_minimum = over(minus(times(sums.l2, sum_x), times(sums.l, sums.xl)), determinant);
        truths above = below(zero, new_minimum);
        new_scale = choose(above, over(sums.xl, sums.l2), new_scale);
        new_minimum = choose(above, zero, new_minimum);
        lanes error = error_of(x, weights, how, tried, new_scale, new_minimum);
        truths better = both(below(zero, determinant), below(error, best));
        best_inverse = choose(better, inverse, best_inverse);
        best_minimum = choose(better, minimum, best_minimum);
        best = choose(better, error, best);
        scale = choose(better, new_scale, scale);
        minimum = choose(better, new_minimum, minimum);
    }
    for (size_t i = 0; i < length; i++) {
        lanes code = code_of(x[i], best_inverse, best_minimum, how.most, false);
        found->codes[i] = choose(flat, zero, code);
    }
    found->scale = choose(flat, zero, scale);
    found->minimum = choose(flat, least, minimum);
}

/* ---- a scale: x = scale * (code - most) (make_qx_quants) ---- */

/* Returns the element with the largest magnitude of each run, and true for runs that count as zeros. */
TARGET SL_INLINE lanes largest_of(const lanes *x, size_t length, truths *nothing) {
    lanes size = all_of(0.0f), largest = all_of(0.0f);
    for (size_t i = 0; i < length; i++) {
        truths more = below(size, size_of(x[i]));
        size = choose(more, size_of(x[i]), size);
        largest = choose(more, x[i], largest);
    }
    *nothing = below(size, all_of(ALL_ZEROS));
    return largest;
}

/* Returns the code of an element, from -most to most - 1; any number in runs that count as zeros. `inverse` maps the
 * largest element to less than 2 * most. */
TARGET SL_INLINE lanes signed_code(lanes x, lanes inverse, float most) {
    return within(nearest_small(times(inverse, x)), -most, most - 1.0f);
}

/* Sums x * code and code^2 over the codes of an attempt. `weighted` has weight * x of each element. */
TARGET SL_INLINE void sums_of(const lanes *x, const lanes *weights, const lanes *weighted, size_t length, lanes inverse,
                              float most, lanes *sum_xl, lanes *sum_l2) {
    *sum_xl = *sum_l2 = all_of(0.0f);
    for (size_t i = 0; i < length; i++) {
        lanes code = signed_code(x[i], inverse, most);
        *sum_xl = plus(*sum_xl, times(weighted[i], code));
        *sum_l2 = plus(*sum_l2, times(times(weights[i], code), code));
    }
}

/* Returns the scale of each of several runs and sets the codes, from 0 to 2 * most - 1; codes are 0 if the scale is 0
 * because the run counts as zeros. */
TARGET static lanes find_linear(const lanes *x, const lanes *weights, size_t length, float most, lanes *codes) {
    const lanes zero = all_of(0.0f);
    lanes weighted[LONGEST], sum_xl, sum_l2;
    truths nothing;
    lanes largest = largest_of(x, length, &nothing), inverse = over(all_of(-most), largest), best_inverse = inverse;
    for (size_t i = 0; i < length; i++) weighted[i] = times(weights[i], x[i]);
    sums_of(x, weights, weighted, length, inverse, most, &sum_xl, &sum_l2);
    lanes scale = choose(same(sum_l2, zero), zero, over(sum_xl, sum_l2)), best = times(scale, sum_xl);
    for (int k = -9; k <= 9; k++) {
        if (k == 0) continue;
        float step = 0.1f * (float)k, span = most + step;
        inverse = over(all_of(-span), largest);
        sums_of(x, weights, weighted, length, inverse, most, &sum_xl, &sum_l2);
        truths better = both(below(zero, sum_l2), below(times(best, sum_l2), times(sum_xl, sum_xl)));
        best_inverse = choose(better, inverse, best_inverse);
        scale = choose(better, over(sum_xl, sum_l2), scale);
        best = choose(better, times(scale, sum_xl), best);
    }
    for (size_t i = 0; i < length; i++) {
        lanes code = signed_code(x[i], best_inverse, most);
        codes[i] = choose(nothing, zero, plus(code, all_of(most)));
    }
    return choose(nothing, zero, scale);
}

/* Like find_linear, but moves one code at a time while this improves the scale (make_q3_quants). */
TARGET static lanes find_by_moving(const lanes *x, size_t length, float most, lanes *codes) {
    const lanes zero = all_of(0.0f);
    lanes weights[LONGEST], weighted[LONGEST], sum_xl, sum_l2;
    truths nothing;
    lanes largest = largest_of(x, length, &nothing), inverse = over(all_of(-most), largest);
    for (size_t i = 0; i < length; i++) {
        weights[i] = times(x[i], x[i]);
        weighted[i] = times(weights[i], x[i]);
        codes[i] = signed_code(x[i], inverse, most);
    }
    sums_of(x, weights, weighted, length, inverse, most, &sum_xl, &sum_l2);
    bool moved = true;
    for (int k = 0; k < 5 && moved; k++) {
        moved = false;
        for (size_t i = 0; i < length; i++) {
            lanes xl = minus(sum_xl, times(weighted[i], codes[i]));
            lanes l2 = minus(sum_l2, times(times(weights[i], codes[i]), codes[i]));
            lanes code = within(nearest(over(times(x[i], l2), xl)), -most, most - 1.0f);
            truths moves = both(below(zero, xl), below(zero, size_of(minus(code, codes[i]))));
            if (!any_true(moves)) continue; /* the next element need not wait for this one's sums */
            xl = plus(xl, times(weighted[i], code));
            l2 = plus(l2, times(times(weights[i], code), code));
            truths better = below(times(times(sum_xl, sum_xl), l2), times(times(xl, xl), sum_l2));
            moves = both(moves, both(below(zero, l2), better));
            moved = moved || any_true(moves);
            codes[i] = choose(moves, code, codes[i]);
            sum_xl = choose(moves, xl, sum_xl);
            sum_l2 = choose(moves, l2, sum_l2);
        }
    }
    for (size_t i = 0; i < length; i++) codes[i] = choose(nothing, zero, plus(codes[i], all_of(most)));
    return choose(nothing, zero, choose(below(zero, sum_l2), over(sum_xl, sum_l2), zero));
}

/* ---- a scale of non-negative scales (make_qp_quants) ---- */

SL_INLINE float error_of_scales(const float *x, const float *weights, size_t count, float scale, const int32_t *codes) {
    float error = 0.0f;
    for (size_t i = 0; i < count; i++) {
        float product = scale * (float)codes[i], difference = x[i] - product;
        float weighted = weights[i] * difference;
        weighted = weighted * difference;
        error = error + weighted;
    }
    return error;
}

/* Returns the inverse of the scale that the search begins with. */
static float first_inverse(const float *x, const float *weights, size_t count, int32_t most, float largest) {
    int32_t tried[16];
    float inverse = (float)most / largest;
    /* ggml stores the first codes in bytes, without a limit. */
    for (size_t i = 0; i < count; i++) tried[i] = (uint8_t)nearest_int(inverse * x[i]);
    float best = error_of_scales(x, weights, count, 1.0f / inverse, tried);
    for (int k = -4; k <= 4; k++) {
        if (k == 0) continue;
        float step = 0.1f * (float)k, span = step + (float)most, own = span / largest;
        for (size_t i = 0; i < count; i++) {
            int32_t code = nearest_int(own * x[i]);
            tried[i] = code < most ? code : most;
        }
        float error = error_of_scales(x, weights, count, 1.0f / own, tried);
        if (error < best) {
            best = error;
            inverse = own;
        }
    }
    return inverse;
}

/* Sums with the weight of a code added or taken away. */
typedef struct code_sums {
    float xl, l2;
} code_sums;

SL_INLINE code_sums sums_with(code_sums sums, float x, float weight, float code, float sign) {
    float xl = weight * x, l2 = weight * code;
    xl = xl * code;
    l2 = l2 * code;
    code_sums out = {sums.xl + sign * xl, sums.l2 + sign * l2};
    return out;
}

/* Moves codes while this improves the scale. */
static code_sums move_codes(const float *x, const float *weights, size_t count, int32_t most, code_sums sums,
                            uint8_t *codes) {
    for (int k = 0; k < 5; k++) {
        bool moved = false;
        for (size_t i = 0; i < count; i++) {
            code_sums rest = sums_with(sums, x[i], weights[i], (float)codes[i], -1.0f);
            if (!(rest.xl > 0.0f && rest.l2 > 0.0f)) continue;
            float product = x[i] * rest.l2;
            int32_t code = nearest_int(product / rest.xl);
            code = code < most ? code : most;
            if (code == codes[i]) continue;
            rest = sums_with(rest, x[i], weights[i], (float)code, 1.0f);
            float own = rest.xl * rest.xl, old = sums.xl * sums.xl;
            own = own * sums.l2;
            old = old * rest.l2;
            if (!(own > old)) continue;
            codes[i] = (uint8_t)code;
            sums = rest;
            moved = true;
        }
        if (!moved) break;
    }
    return sums;
}

/* Returns the scale of at most 16 scales, and sets their codes, from 0 to `most`. */
static float scale_of_scales(const float *x, const float *weights, size_t count, int32_t most, uint8_t *codes) {
    float largest = 0.0f;
    for (size_t i = 0; i < count; i++) largest = largest > x[i] ? largest : x[i];
    memset(codes, 0, count);
    if (largest < ALL_ZEROS) return 0.0f;
    float inverse = first_inverse(x, weights, count, most, largest);
    code_sums sums = {0.0f, 0.0f};
    for (size_t i = 0; i < count; i++) {
        int32_t code = nearest_int(inverse * x[i]);
        code = code < most ? code : most;
        codes[i] = (uint8_t)code;
        sums = sums_with(sums, x[i], weights[i], (float)code, 1.0f);
    }
    sums = move_codes(x, weights, count, most, sums, codes);
    return sums.l2 > 0.0f ? sums.xl / sums.l2 : 0.0f;
}

#endif
