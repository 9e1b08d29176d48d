/* Quantization to ggml's K-quants, for the tiers; see quant_runs.h. `importance` has a weight for each element in this
 * machine's byte order, or is NULL. */
#ifndef SL_QUANT_K_H
#define SL_QUANT_K_H

#include "kernels/quant_runs.h"

/* ---- codes in bytes ---- */

/* Packs 256 codes of 2 bits: a byte holds the codes of elements 32 apart. */
SL_INLINE void pack_pairs(const uint8_t *codes, uint8_t packed[64]) {
    for (size_t i = 0; i < 64; i++) {
        const uint8_t *code = codes + i / 32 * 128 + i % 32;
        packed[i] = (uint8_t)((code[0] & 3) | (code[32] & 3) << 2 | (code[64] & 3) << 4 | (code[96] & 3) << 6);
    }
}

/* Sets the codes of eight runs for their final scales and minima; codes of runs without a scale stay. */
TARGET SL_INLINE void final_codes(const lanes *x, const search *how, const float *scales, const float *minima,
                                  uint8_t *codes) {
    for (size_t i = 0; i < how->length; i++) {
        float values[LANES];
        lanes code = nearest(over(plus(x[i], lanes_at(minima)), lanes_at(scales)));
        put(values, within(code, 0.0f, how->most));
        for (size_t k = 0; k < LANES; k++)
            if (scales[k] != 0.0f) codes[how->length * k + i] = (uint8_t)values[k];
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

/* Sets the weights of eight runs without importance: their mean magnitude, plus |x|. */
TARGET SL_INLINE void usual_weights(const lanes *x, lanes *weights) {
    lanes squares = all_of(0.0f);
    for (size_t i = 0; i < 32; i++) squares = plus(squares, times(x[i], x[i]));
    lanes mean = root(over(squares, all_of(32.0f)));
    for (size_t i = 0; i < 32; i++) weights[i] = plus(mean, size_of(x[i]));
}

/* Sets the codes and scales of a super-block that begins with d, dmin and the scales. Returns false if an element is
 * NaN or infinite. `limited`: the codes of scales are at most 63, which ggml omits for Q4_K with importance. */
TARGET static bool quantize_affine(const uint8_t *x, const float *importance, const search *how, bool limited,
                                   uint8_t *block, uint8_t codes[SUPER]) {
    uint8_t *d = block, *dmin = block + 2, *packed = block + 4;
    if (!all_finite(x)) {
        store16(d, 0, SL_NOT_FINITE);
        return false;
    }
    lanes runs[32], weights[32];
    affine_runs found;
    float scales[LANES], minima[LANES], sums[LANES];
    uint8_t scale_codes[LANES], minimum_codes[LANES];
    transposed(x, 32, runs);
    if (importance != NULL) {
        float doubled = 2.0f * squares_of(x, SUPER);
        weigh(runs, importance, 32, doubled / 256.0f, weights);
        put(sums, sum_of(weights, 32));
    } else
        usual_weights(runs, weights);
    find_affine(runs, weights, how, &found);
    put(scales, found.scale);
    put(minima, found.minimum);
    put_codes(found.codes, 32, codes);
    for (size_t k = 0; k < LANES; k++) minima[k] = -minima[k];
    if (importance != NULL) {
        store_scale(d, scale_of_scales(scales, sums, LANES, 63, scale_codes));
        store_scale(dmin, scale_of_scales(minima, sums, LANES, 63, minimum_codes));
    } else {
        store_scale(d, scale_by_largest(scales, 63.0f, scale_codes, LANES));
        store_scale(dmin, scale_by_largest(minima, 63.0f, minimum_codes, LANES));
    }
    for (size_t k = 0; k < LANES; k++) {
        uint8_t scale = scale_codes[k], minimum = minimum_codes[k];
        if (limited && scale > 63) scale = 63;
        if (limited && minimum > 63) minimum = 63;
        pack_scales(packed, k, scale, minimum);
    }
    for (size_t k = 0; k < LANES; k++) {
        uint8_t scale, minimum;
        unpack_scales(packed, k, &scale, &minimum);
        scales[k] = load_half(d, 0) * (float)scale;
        minima[k] = load_half(dmin, 0) * (float)minimum;
    }
    final_codes(runs, how, scales, minima, codes);
    return true;
}

static const search SEARCH_Q4_K[2] = {{32, 15.0f, -1.0f, 0.1f, 20, false}, {32, 15.0f, -0.9f, 0.05f, 36, false}};
static const search SEARCH_Q5_K[2] = {{32, 31.0f, -0.5f, 0.1f, 15, false}, {32, 31.0f, -0.9f, 0.05f, 36, false}};

TARGET SL_INLINE void quantize_q4_k(const uint8_t *x, const float *importance, sl_q4_k *block) {
    uint8_t codes[SUPER];
    const search *how = &SEARCH_Q4_K[importance != NULL];
    if (!quantize_affine(x, importance, how, importance == NULL, (uint8_t *)block, codes)) return;
    for (size_t i = 0; i < 128; i++) {
        size_t first = i / 32 * 64 + i % 32;
        block->codes[i] = (uint8_t)(codes[first] | codes[first + 32] << 4);
    }
}

TARGET SL_INLINE void quantize_q5_k(const uint8_t *x, const float *importance, sl_q5_k *block) {
    uint8_t codes[SUPER];
    if (!quantize_affine(x, importance, &SEARCH_Q5_K[importance != NULL], true, (uint8_t *)block, codes)) return;
    for (size_t i = 0; i < 128; i++) {
        size_t first = i / 32 * 64 + i % 32;
        block->codes[i] = (uint8_t)((codes[first] & 15) | (codes[first + 32] & 15) << 4);
    }
    for (size_t i = 0; i < SUPER; i++) block->high[i % 32] |= (uint8_t)(codes[i] >> 4 << i / 32);
}

/* ---- q2_k: runs of 16 with a scale and a minimum of 4 bits ---- */

static const search SEARCH_Q2_K[2] = {{16, 3.0f, -0.5f, 0.1f, 15, true}, {16, 3.0f, -0.9f, 0.05f, 36, false}};

TARGET static void quantize_q2_k(const uint8_t *x, const float *importance, sl_q2_k *block) {
    if (!all_finite(x)) {
        store16(block->d, 0, SL_NOT_FINITE);
        return;
    }
    const search *how = &SEARCH_Q2_K[importance != NULL];
    float mean = importance == NULL ? 0.0f : squares_of(x, SUPER) / 256.0f;
    lanes runs[2][16], weights[16];
    float scales[16], minima[16], sums[16];
    uint8_t codes[SUPER], scale_codes[16], minimum_codes[16];
    for (size_t half = 0; half < 2; half++) {
        affine_runs found;
        transposed(x + 512 * half, 16, runs[half]);
        if (importance != NULL)
            weigh(runs[half], importance + 128 * half, 16, mean, weights);
        else
            for (size_t i = 0; i < 16; i++) weights[i] = size_of(runs[half][i]);
        put(sums + 8 * half, sum_of(weights, 16));
        find_affine(runs[half], weights, how, &found);
        put(scales + 8 * half, found.scale);
        put(minima + 8 * half, found.minimum);
        put_codes(found.codes, 16, codes + 128 * half);
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
    for (size_t half = 0; half < 2; half++)
        final_codes(runs[half], how, scales + 8 * half, minima + 8 * half, codes + 128 * half);
    pack_pairs(codes, block->codes);
}

/* ---- q3_k, q6_k: runs of 16 with a scale ---- */

/* Sets the codes, from 0 to 2 * most - 1, of eight runs of 16 for their final scales; codes of runs without a scale
 * stay. */
TARGET SL_INLINE void final_signed_codes(const lanes *x, float most, const float *scales, uint8_t *codes) {
    for (size_t i = 0; i < 16; i++) {
        float values[LANES];
        put(values, plus(within(nearest(over(x[i], lanes_at(scales))), -most, most - 1.0f), all_of(most)));
        for (size_t k = 0; k < LANES; k++)
            if (scales[k] != 0.0f) codes[16 * k + i] = (uint8_t)values[k];
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
    if (!all_finite(x)) {
        store16(block->d, 0, SL_NOT_FINITE);
        return;
    }
    float doubled = importance == NULL ? 0.0f : 2.0f * squares_of(x, SUPER), mean = doubled / 256.0f;
    lanes runs[2][16], weights[16], found[16];
    float scales[16], sums[16];
    uint8_t codes[SUPER], six[16];
    for (size_t half = 0; half < 2; half++) {
        transposed(x + 512 * half, 16, runs[half]);
        if (importance != NULL) {
            weigh(runs[half], importance + 128 * half, 16, mean, weights);
            put(sums + 8 * half, sum_of(weights, 16));
            put(scales + 8 * half, find_linear(runs[half], weights, 16, 4.0f, found));
        } else
            put(scales + 8 * half, find_by_moving(runs[half], 16, 4.0f, found));
        put_codes(found, 16, codes + 128 * half);
    }
    store_scale(block->d, scale_of_q3_k(scales, importance == NULL ? NULL : sums, six));
    for (size_t k = 0; k < 16; k++) {
        block->scales[k % 8] |= (uint8_t)((six[k] & 15) << (k < 8 ? 0 : 4));
        block->scales[8 + k % 4] |= (uint8_t)(six[k] >> 4 << 2 * (k / 4));
        scales[k] = load_half(block->d, 0) * (float)((int32_t)six[k] - 32);
    }
    for (size_t half = 0; half < 2; half++) final_signed_codes(runs[half], 4.0f, scales + 8 * half, codes + 128 * half);
    for (size_t i = 0; i < SUPER; i++) block->high[i % 32] |= (uint8_t)((codes[i] > 3) << i / 32);
    pack_pairs(codes, block->codes);
}

TARGET static void quantize_q6_k(const uint8_t *x, const float *importance, sl_q6_k *block) {
    if (!all_finite(x)) {
        store16(block->d, 0, SL_NOT_FINITE);
        return;
    }
    lanes runs[2][16], weights[16], found[16];
    float scales[16], own[16];
    uint8_t codes[SUPER];
    for (size_t half = 0; half < 2; half++) {
        transposed(x + 512 * half, 16, runs[half]);
        for (size_t i = 0; i < 16; i++) {
            float values[LANES];
            for (size_t k = 0; importance != NULL && k < LANES; k++) values[k] = importance[128 * half + 16 * k + i];
            weights[i] = importance != NULL ? lanes_at(values) : times(runs[half][i], runs[half][i]);
        }
        put(scales + 8 * half, find_linear(runs[half], weights, 16, 32.0f, found));
        put_codes(found, 16, codes + 128 * half);
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
    for (size_t half = 0; half < 2; half++) final_signed_codes(runs[half], 32.0f, own + 8 * half, codes + 128 * half);
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

#define DEFINE_K(type)                                                                                     \
    TARGET static void KERNEL(type)(const void *source, void *destination, size_t count) {                 \
        sl_##type *blocks = destination;                                                                   \
        memset(blocks, 0, count / SUPER * sizeof *blocks);                                                 \
        for (size_t b = 0; b < count / SUPER; b++)                                                         \
            quantize_##type((const uint8_t *)source + 4 * SUPER * b, NULL, &blocks[b]);                    \
    }                                                                                                      \
    TARGET static void WEIGHTED(type)(const void *row, const float *importance, void *out, size_t count) { \
        sl_##type *blocks = out;                                                                           \
        memset(blocks, 0, count / SUPER * sizeof *blocks);                                                 \
        for (size_t b = 0; b < count / SUPER; b++)                                                         \
            quantize_##type((const uint8_t *)row + 4 * SUPER * b, importance + SUPER * b, &blocks[b]);     \
    }

DEFINE_K(q2_k)
DEFINE_K(q3_k)
DEFINE_K(q4_k)
DEFINE_K(q5_k)
DEFINE_K(q6_k)

/* The rows of a tier, without its end. */
#define QUANT_K_KERNELS                                                                                \
    {SL_F32, SL_Q2_K, KERNEL(q2_k)}, {SL_F32, SL_Q3_K, KERNEL(q3_k)}, {SL_F32, SL_Q4_K, KERNEL(q4_k)}, \
        {SL_F32, SL_Q5_K, KERNEL(q5_k)}, {SL_F32, SL_Q6_K, KERNEL(q6_k)},
#define WEIGHTED_K_KERNELS                                                                                      \
    {SL_Q2_K, WEIGHTED(q2_k)}, {SL_Q3_K, WEIGHTED(q3_k)}, {SL_Q4_K, WEIGHTED(q4_k)}, {SL_Q5_K, WEIGHTED(q5_k)}, \
        {SL_Q6_K, WEIGHTED(q6_k)},

#endif
