/* Quantization to ggml's K-quants, for the tiers; see quant_runs.h. `importance` has a weight for each element in this
 * machine's byte order, or is NULL. */
#ifndef SL_QUANT_K_H
#define SL_QUANT_K_H

#include "kernels/quant_runs.h"

/* Groups of runs in a super-block of 16 runs. */
#define PARTS (16 / LANES)

/* ---- codes in bytes ---- */

/* Packs 256 codes of 2 bits: a byte holds the codes of elements 32 apart. */
SL_INLINE void pack_pairs(const uint8_t *codes, uint8_t packed[64]) {
    for (size_t i = 0; i < 64; i++) {
        const uint8_t *code = codes + i / 32 * 128 + i % 32;
        packed[i] = (uint8_t)((code[0] & 3) | (code[32] & 3) << 2 | (code[64] & 3) << 4 | (code[96] & 3) << 6);
    }
}

/* Changes codes to those for the final scales and minima of runs; codes of runs without a scale stay. */
TARGET SL_INLINE void final_codes(const lanes *x, search how, const float *scales, const float *minima, lanes *codes) {
    const lanes scale = lanes_at(scales), minimum = lanes_at(minima);
    truths none = same(scale, all_of(0.0f));
    for (size_t i = 0; i < how.length; i++) {
        lanes code = within(nearest(over(plus(x[i], minimum), scale)), 0.0f, how.most);
        codes[i] = choose(none, codes[i], code);
    }
}

/* ---- q4_k, q5_k: runs of 32 with a scale and a minimum ---- */

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

SL_INLINE void unpack_scales(const uint8_t packed[12], size_t k, uint8_t *scale, uint8_t *minimum) {
    *scale = (uint8_t)(k < 4 ? packed[k] & 63 : (packed[k + 4] & 15) | packed[k - 4] >> 6 << 4);
    *minimum = (uint8_t)(k < 4 ? packed[k + 4] & 63 : packed[k + 4] >> 4 | packed[k] >> 6 << 4);
}

/* Sets the codes of eight scales, in 63rds of the largest, and returns their scale. */
SL_INLINE float scale_by_largest(const float *x, float most, uint8_t *codes, size_t count) {
    float largest = 0.0f;
    for (size_t k = 0; k < count; k++) largest = x[k] > largest ? x[k] : largest;
    float inverse = largest > 0.0f ? most / largest : 0.0f;
    for (size_t k = 0; k < count; k++) codes[k] = (uint8_t)nearest_int(inverse * x[k]);
    return largest > 0.0f ? largest / most : 0.0f;
}

/* Sets the weights of runs without importance: their mean magnitude, plus |x|. */
TARGET SL_INLINE void usual_weights(const lanes *x, lanes *weights) {
    lanes squares = all_of(0.0f);
    for (size_t i = 0; i < 32; i++) squares = plus(squares, times(x[i], x[i]));
    lanes mean = root(over(squares, all_of(32.0f)));
    for (size_t i = 0; i < 32; i++) weights[i] = plus(mean, size_of(x[i]));
}

/* The codes and scales of super-blocks of eight runs. `packed` has the scales as they are stored. */
typedef struct affine_group {
    uint8_t codes[GROUP];
    uint8_t d[LANES / 8][2], dmin[LANES / 8][2], packed[LANES / 8][12];
} affine_group;

/* Sets scales of super-block b, and changes `scales` and `minima` of its runs to those that values are restored with.
 * `sums`: of the weights, or NULL without importance. `limited`: the codes of scales are at most 63, which ggml omits
 * for Q4_K with importance. */
TARGET SL_INLINE void scale_super_block(size_t b, float *scales, float *minima, const float *sums, bool limited,
                                        affine_group *out) {
    uint8_t scale_codes[8], minimum_codes[8], *d = out->d[b], *dmin = out->dmin[b], *packed = out->packed[b];
    for (size_t k = 0; k < 8; k++) minima[k] = -minima[k];
    if (sums != NULL) {
        store_scale(d, scale_of_scales(scales, sums, 8, 63, scale_codes));
        store_scale(dmin, scale_of_scales(minima, sums, 8, 63, minimum_codes));
    } else {
        store_scale(d, scale_by_largest(scales, 63.0f, scale_codes, 8));
        store_scale(dmin, scale_by_largest(minima, 63.0f, minimum_codes, 8));
    }
    for (size_t k = 0; k < 8; k++) {
        uint8_t scale = scale_codes[k], minimum = minimum_codes[k];
        if (limited && scale > 63) scale = 63;
        if (limited && minimum > 63) minimum = 63;
        pack_scales(packed, k, scale, minimum);
    }
    for (size_t k = 0; k < 8; k++) {
        uint8_t scale, minimum;
        unpack_scales(packed, k, &scale, &minimum);
        scales[k] = load_half(d, 0) * (float)scale;
        minima[k] = load_half(dmin, 0) * (float)minimum;
    }
}

/* Quantizes a group of runs. Super-blocks with NaN or infinity get the scale SL_NOT_FINITE, and zeros. */
TARGET static void quantize_affine(const run_group *group, search how, bool limited, affine_group *out) {
    lanes runs[32], weights[32];
    affine_runs found;
    float scales[LANES], minima[LANES], sums[LANES], means[LANES];
    const uint8_t *x = group->x;
    transposed(x, 32, runs);
    if (group->importance != NULL) {
        for (size_t k = 0; k < LANES; k++) {
            float doubled = k % 8 == 0 ? 2.0f * squares_of(x + 128 * k, SUPER) : 0.0f;
            means[k] = k % 8 == 0 ? doubled / 256.0f : means[k - 1];
        }
        weigh(runs, group->importance, 32, lanes_at(means), weights);
        put(sums, sum_of(weights, 32));
    } else
        usual_weights(runs, weights);
    find_affine(runs, weights, how, &found);
    put(scales, found.scale);
    put(minima, found.minimum);
    memset(out->packed, 0, sizeof out->packed);
    for (size_t b = 0; b < LANES / 8; b++) {
        const float *own = group->importance == NULL ? NULL : sums + 8 * b;
        scale_super_block(b, scales + 8 * b, minima + 8 * b, own, limited, out);
    }
    final_codes(runs, how, scales, minima, found.codes);
    put_codes(found.codes, 32, out->codes);
    truths finite = finite_runs(runs, 32);
    if (all_true(finite)) return;
    put(sums, choose(finite, all_of(1.0f), all_of(0.0f)));
    for (size_t b = 0; b < LANES / 8; b++) {
        float least = 1.0f;
        for (size_t k = 0; k < 8; k++) least = sums[8 * b + k] < least ? sums[8 * b + k] : least;
        if (least == 1.0f) continue;
        store16(out->d[b], 0, SL_NOT_FINITE);
        memset(out->dmin[b], 0, sizeof out->dmin[b]);
        memset(out->packed[b], 0, sizeof out->packed[b]);
        memset(out->codes + SUPER * b, 0, SUPER);
    }
}

static const search SEARCH_Q4_K[2] = {{32, 15.0f, -1.0f, 0.1f, 20, false}, {32, 15.0f, -0.9f, 0.05f, 36, false}};
static const search SEARCH_Q5_K[2] = {{32, 31.0f, -0.5f, 0.1f, 15, false}, {32, 31.0f, -0.9f, 0.05f, 36, false}};

SL_INLINE void store_q4_k(sl_q4_k *block, const uint8_t *codes) {
    for (size_t i = 0; i < 128; i++) {
        size_t first = i / 32 * 64 + i % 32;
        block->codes[i] = (uint8_t)(codes[first] | codes[first + 32] << 4);
    }
}

SL_INLINE void store_q5_k(sl_q5_k *block, const uint8_t *codes) {
    for (size_t i = 0; i < 128; i++) {
        size_t first = i / 32 * 64 + i % 32;
        block->codes[i] = (uint8_t)((codes[first] & 15) | (codes[first + 32] & 15) << 4);
    }
    memset(block->high, 0, sizeof block->high);
    for (size_t i = 0; i < SUPER; i++) block->high[i % 32] |= (uint8_t)(codes[i] >> 4 << i / 32);
}

/* Quantizes a row; `importance` may be NULL. */
#define DEFINE_AFFINE(type, searches, limited)                                                                      \
    TARGET static void quantize_##type(const void *row, const float *importance, sl_##type *blocks, size_t count) { \
        for (size_t first = 0; first < count; first += GROUP) {                                                     \
            run_group group;                                                                                        \
            affine_group results;                                                                                   \
            take_runs(&group, row, importance, first, count);                                                       \
            quantize_affine(&group, searches[importance != NULL], limited, &results);                               \
            for (size_t b = 0; b < group.count / 8; b++) {                                                          \
                sl_##type *block = &blocks[first / SUPER + b];                                                      \
                memcpy(block->d, results.d[b], sizeof block->d);                                                    \
                memcpy(block->dmin, results.dmin[b], sizeof block->dmin);                                           \
                memcpy(block->scales, results.packed[b], sizeof block->scales);                                     \
                store_##type(block, results.codes + SUPER * b);                                                     \
            }                                                                                                       \
        }                                                                                                           \
    }

DEFINE_AFFINE(q4_k, SEARCH_Q4_K, importance == NULL)
DEFINE_AFFINE(q5_k, SEARCH_Q5_K, true)

/* ---- q2_k: runs of 16 with a scale and a minimum of 4 bits ---- */

/* Transposes the runs of a super-block. Returns false if an element is NaN or infinite. */
TARGET SL_INLINE bool take_super_block(const uint8_t *x, lanes runs[PARTS][16]) {
    bool finite = true;
    for (size_t part = 0; part < PARTS; part++) {
        transposed(x + 64 * LANES * part, 16, runs[part]);
        finite = finite && all_true(finite_runs(runs[part], 16));
    }
    return finite;
}

static const search SEARCH_Q2_K[2] = {{16, 3.0f, -0.5f, 0.1f, 15, true}, {16, 3.0f, -0.9f, 0.05f, 36, false}};

TARGET static void quantize_q2_k(const uint8_t *x, const float *importance, sl_q2_k *block) {
    search how = SEARCH_Q2_K[importance != NULL];
    float mean = importance == NULL ? 0.0f : squares_of(x, SUPER) / 256.0f;
    lanes runs[PARTS][16], weights[16];
    affine_runs found[PARTS];
    float scales[16], minima[16], sums[16];
    uint8_t codes[SUPER], scale_codes[16], minimum_codes[16];
    if (!take_super_block(x, runs)) {
        store16(block->d, 0, SL_NOT_FINITE);
        return;
    }
    for (size_t part = 0; part < PARTS; part++) {
        if (importance != NULL)
            weigh(runs[part], importance + 16 * LANES * part, 16, all_of(mean), weights);
        else
            for (size_t i = 0; i < 16; i++) weights[i] = size_of(runs[part][i]);
        put(sums + LANES * part, sum_of(weights, 16));
        find_affine(runs[part], weights, how, &found[part]);
        put(scales + LANES * part, found[part].scale);
        put(minima + LANES * part, found[part].minimum);
    }
    for (size_t k = 0; k < 16; k++) minima[k] = -minima[k];
    if (importance != NULL) {
        store_scale(block->d, scale_of_scales(scales, sums, 16, 15, scale_codes));
        store_scale(block->dmin, scale_of_scales(minima, sums, 16, 15, minimum_codes));
    } else {
        store_scale(block->d, scale_by_largest(scales, 15.0f, scale_codes, 16));
        store_scale(block->dmin, scale_by_largest(minima, 15.0f, minimum_codes, 16));
    }
    for (size_t k = 0; k < 16; k++) {
        block->scales[k] = (uint8_t)(scale_codes[k] | minimum_codes[k] << 4);
        scales[k] = load_half(block->d, 0) * (float)(block->scales[k] & 15);
        minima[k] = load_half(block->dmin, 0) * (float)(block->scales[k] >> 4);
    }
    for (size_t part = 0; part < PARTS; part++) {
        final_codes(runs[part], how, scales + LANES * part, minima + LANES * part, found[part].codes);
        put_codes(found[part].codes, 16, codes + 16 * LANES * part);
    }
    pack_pairs(codes, block->codes);
}

/* ---- q3_k, q6_k: runs of 16 with a scale ---- */

/* Changes codes to those from 0 to 2 * most - 1 for the final scales of runs; codes of runs without a scale stay. */
TARGET SL_INLINE void final_signed_codes(const lanes *x, float most, const float *scales, lanes *codes) {
    const lanes scale = lanes_at(scales);
    truths none = same(scale, all_of(0.0f));
    for (size_t i = 0; i < 16; i++) {
        lanes code = plus(within(nearest(over(x[i], scale)), -most, most - 1.0f), all_of(most));
        codes[i] = choose(none, codes[i], code);
    }
}

/* Returns the scale with the largest magnitude. */
SL_INLINE float largest_scale(const float scales[16]) {
    float most = 0.0f, largest = 0.0f;
    for (size_t k = 0; k < 16; k++) {
        float size = scales[k] < 0.0f ? -scales[k] : scales[k];
        largest = size > most ? scales[k] : largest;
        most = size > most ? size : most;
    }
    return largest;
}

/* Sets the codes of 16 scales, from 0 to 63, and returns their scale. */
TARGET SL_INLINE float scale_of_q3_k(const float scales[16], const float *weights, uint8_t codes[16]) {
    if (weights != NULL) { /* in every lane */
        lanes x[16], each[16], found[16];
        float values[LANES];
        for (size_t k = 0; k < 16; k++) {
            x[k] = all_of(scales[k]);
            each[k] = all_of(weights[k]);
        }
        put(values, find_linear(x, each, 16, 32.0f, found));
        float scale = values[0];
        for (size_t k = 0; k < 16; k++) {
            put(values, found[k]);
            codes[k] = (uint8_t)values[0];
        }
        return scale;
    }
    memset(codes, 0, 16);
    float largest = largest_scale(scales);
    if (largest == 0.0f) return 0.0f;
    float inverse = -32.0f / largest;
    for (size_t k = 0; k < 16; k++) {
        int32_t code = nearest_int(inverse * scales[k]);
        codes[k] = (uint8_t)((code < -32 ? -32 : code < 31 ? code : 31) + 32);
    }
    return 1.0f / inverse;
}

TARGET static void quantize_q3_k(const uint8_t *x, const float *importance, sl_q3_k *block) {
    float doubled = importance == NULL ? 0.0f : 2.0f * squares_of(x, SUPER), mean = doubled / 256.0f;
    lanes runs[PARTS][16], weights[16], found[PARTS][16];
    float scales[16], sums[16];
    uint8_t codes[SUPER], six[16];
    if (!take_super_block(x, runs)) {
        store16(block->d, 0, SL_NOT_FINITE);
        return;
    }
    for (size_t part = 0; part < PARTS; part++) {
        if (importance != NULL) {
            weigh(runs[part], importance + 16 * LANES * part, 16, all_of(mean), weights);
            put(sums + LANES * part, sum_of(weights, 16));
            put(scales + LANES * part, find_linear(runs[part], weights, 16, 4.0f, found[part]));
        } else
            put(scales + LANES * part, find_by_moving(runs[part], 16, 4.0f, found[part]));
    }
    store_scale(block->d, scale_of_q3_k(scales, importance == NULL ? NULL : sums, six));
    for (size_t k = 0; k < 16; k++) {
        block->scales[k % 8] |= (uint8_t)((six[k] & 15) << (k < 8 ? 0 : 4));
        block->scales[8 + k % 4] |= (uint8_t)(six[k] >> 4 << 2 * (k / 4));
        scales[k] = load_half(block->d, 0) * (float)((int32_t)six[k] - 32);
    }
    for (size_t part = 0; part < PARTS; part++) {
        final_signed_codes(runs[part], 4.0f, scales + LANES * part, found[part]);
        put_codes(found[part], 16, codes + 16 * LANES * part);
    }
    for (size_t i = 0; i < SUPER; i++) block->high[i % 32] |= (uint8_t)((codes[i] > 3) << i / 32);
    pack_pairs(codes, block->codes);
}

TARGET static void quantize_q6_k(const uint8_t *x, const float *importance, sl_q6_k *block) {
    lanes runs[PARTS][16], weights[16], found[PARTS][16];
    float scales[16], own[16];
    uint8_t codes[SUPER];
    if (!take_super_block(x, runs)) {
        store16(block->d, 0, SL_NOT_FINITE);
        return;
    }
    for (size_t part = 0; part < PARTS; part++) {
        for (size_t i = 0; i < 16; i++) {
            float values[LANES];
            for (size_t k = 0; importance != NULL && k < LANES; k++)
                values[k] = importance[16 * LANES * part + 16 * k + i];
            weights[i] = importance != NULL ? lanes_at(values) : times(runs[part][i], runs[part][i]);
        }
        put(scales + LANES * part, find_linear(runs[part], weights, 16, 32.0f, found[part]));
    }
    float largest = largest_scale(scales);
    if ((largest < 0.0f ? -largest : largest) < ALL_ZEROS) return;
    float inverse = -128.0f / largest;
    store_scale(block->d, 1.0f / inverse);
    for (size_t k = 0; k < 16; k++) {
        int32_t scale = nearest_int(inverse * scales[k]);
        block->scales[k] = (int8_t)(scale < 127 ? scale : 127);
        own[k] = load_half(block->d, 0) * (float)block->scales[k];
    }
    for (size_t part = 0; part < PARTS; part++) {
        final_signed_codes(runs[part], 32.0f, own + LANES * part, found[part]);
        put_codes(found[part], 16, codes + 16 * LANES * part);
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

/* Super-blocks of 16 runs: one at a time. */
#define DEFINE_SIGNED(type)                                                                             \
    TARGET static void quantize_row_##type(const void *row, const float *importance, sl_##type *blocks, \
                                           size_t count) {                                              \
        memset(blocks, 0, count / SUPER * sizeof *blocks);                                              \
        for (size_t b = 0; b < count / SUPER; b++) {                                                    \
            const float *own = importance == NULL ? NULL : importance + SUPER * b;                      \
            quantize_##type((const uint8_t *)row + 4 * SUPER * b, own, &blocks[b]);                     \
        }                                                                                               \
    }

#define DEFINE_K(type, quantize_row)                                                                       \
    TARGET static void KERNEL(type)(const void *source, void *destination, size_t count) {                 \
        quantize_row(source, NULL, destination, count);                                                    \
    }                                                                                                      \
    TARGET static void WEIGHTED(type)(const void *row, const float *importance, void *out, size_t count) { \
        quantize_row(row, importance, out, count);                                                         \
    }

DEFINE_SIGNED(q2_k)
DEFINE_SIGNED(q3_k)
DEFINE_SIGNED(q6_k)

DEFINE_K(q2_k, quantize_row_q2_k)
DEFINE_K(q3_k, quantize_row_q3_k)
DEFINE_K(q4_k, quantize_q4_k)
DEFINE_K(q5_k, quantize_q5_k)
DEFINE_K(q6_k, quantize_row_q6_k)

/* The rows of a tier, without its end. */
#define QUANT_K_KERNELS                                                                                \
    {SL_F32, SL_Q2_K, KERNEL(q2_k)}, {SL_F32, SL_Q3_K, KERNEL(q3_k)}, {SL_F32, SL_Q4_K, KERNEL(q4_k)}, \
        {SL_F32, SL_Q5_K, KERNEL(q5_k)}, {SL_F32, SL_Q6_K, KERNEL(q6_k)},
#define WEIGHTED_K_KERNELS                                                                                      \
    {SL_Q2_K, WEIGHTED(q2_k)}, {SL_Q3_K, WEIGHTED(q3_k)}, {SL_Q4_K, WEIGHTED(q4_k)}, {SL_Q5_K, WEIGHTED(q5_k)}, \
        {SL_Q6_K, WEIGHTED(q6_k)},

#endif
