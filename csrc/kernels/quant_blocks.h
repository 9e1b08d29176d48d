/* Quantization to ggml's types with blocks of 32, for the tiers; see quant_runs.h. LANES blocks are quantized at a
 * time, each in a lane. Without importance, other types are in quant_scalar.c, quant_avx2.c and so on. */
#ifndef SL_QUANT_BLOCKS_H
#define SL_QUANT_BLOCKS_H

#include "kernels/quant_runs.h"

/* Returns true if the block has no NaN or infinity. */
SL_INLINE bool block_finite(const uint8_t *x) { return sl_quant_scalar.absmax_f32(x, SL_QK) < SL_F32_INFINITY; }

/* ---- with importance: codes and scales of a group of blocks ---- */

typedef struct group_results {
    uint8_t codes[GROUP];
    float scales[LANES], minima[LANES];
} group_results;

TARGET SL_INLINE void quantize_linear(const run_group *blocks, float mean, float most, group_results *out) {
    lanes x[SL_QK], weights[SL_QK], codes[SL_QK];
    transposed(blocks->x, SL_QK, x);
    weigh(x, blocks->importance, SL_QK, all_of(mean), weights);
    put(out->scales, find_linear(x, weights, SL_QK, most, codes));
    put_codes(codes, SL_QK, out->codes);
}

TARGET SL_INLINE void quantize_range(const run_group *blocks, float mean, search how, group_results *out) {
    lanes x[SL_QK], weights[SL_QK];
    affine_runs found;
    transposed(blocks->x, SL_QK, x);
    weigh(x, blocks->importance, SL_QK, all_of(mean), weights);
    find_affine(x, weights, how, &found);
    put(out->scales, found.scale);
    put(out->minima, found.minimum);
    put_codes(found.codes, SL_QK, out->codes);
}

SL_INLINE void store_q4_0(sl_q4_0 *block, const group_results *found, size_t k) {
    store_scale(block->d, found->scales[k]);
    store_nibbles(found->codes + SL_QK * k, block->codes);
}

SL_INLINE void store_q4_1(sl_q4_1 *block, const group_results *found, size_t k) {
    store_scale(block->d, found->scales[k]);
    store_scale(block->m, found->minima[k]);
    store_nibbles(found->codes + SL_QK * k, block->codes);
}

SL_INLINE void store_q5_0(sl_q5_0 *block, const group_results *found, size_t k) {
    store_scale(block->d, found->scales[k]);
    store_five_bits(found->codes + SL_QK * k, block->high, block->codes);
}

SL_INLINE void store_q5_1(sl_q5_1 *block, const group_results *found, size_t k) {
    store_scale(block->d, found->scales[k]);
    store_scale(block->m, found->minima[k]);
    store_five_bits(found->codes + SL_QK * k, block->high, block->codes);
}

static const search SEARCH_Q4_1 = {SL_QK, 15.0f, -0.9f, 0.05f, 36, false};
static const search SEARCH_Q5_1 = {SL_QK, 31.0f, -0.9f, 0.05f, 36, false};

/* The weights of a row depend on its mean square. */
#define DEFINE_WEIGHTED(type, quantize)                                                                    \
    TARGET static void WEIGHTED(type)(const void *row, const float *importance, void *out, size_t count) { \
        sl_##type *blocks = out;                                                                           \
        float mean = squares_of(row, count) / (float)count;                                                \
        for (size_t first = 0; first < count; first += GROUP) {                                            \
            run_group group;                                                                               \
            group_results found;                                                                           \
            take_runs(&group, row, importance, first, count);                                              \
            quantize;                                                                                      \
            for (size_t k = 0; k < group.count; k++) store_##type(&blocks[first / SL_QK + k], &found, k);  \
        }                                                                                                  \
    }

DEFINE_WEIGHTED(q4_0, quantize_linear(&group, mean, 8.0f, &found))
DEFINE_WEIGHTED(q4_1, quantize_range(&group, mean, SEARCH_Q4_1, &found))
DEFINE_WEIGHTED(q5_0, quantize_linear(&group, mean, 16.0f, &found))
DEFINE_WEIGHTED(q5_1, quantize_range(&group, mean, SEARCH_Q5_1, &found))

/* ---- iq4_nl, iq4_xs: x = scale * IQ4_TABLE[code] ---- */

/* The borders between neighbours of IQ4_TABLE. A border belongs to the larger neighbour, and a NaN to the largest, like
 * in ggml's best_index_int8. */
static const float IQ4_BORDERS[15] = {-115.5f, -93.5f, -74.0f, -57.0f, -42.0f, -28.5f, -16.0f, -4.5f,
                                      7.0f,    19.0f,  31.5f,  45.5f,  61.0f,  79.0f,  101.0f};

/* Returns the nearest entries of the table. */
TARGET SL_INLINE lanes entries_of(lanes values) {
    lanes out = all_of((float)IQ4_TABLE[15]);
    for (size_t k = 15; k-- > 0;) out = choose(below(values, all_of(IQ4_BORDERS[k])), all_of((float)IQ4_TABLE[k]), out);
    return out;
}

/* Returns the codes of the nearest entries. */
TARGET SL_INLINE lanes table_codes(lanes values) {
    lanes out = all_of(15.0f);
    for (size_t k = 15; k-- > 0;) out = choose(below(values, all_of(IQ4_BORDERS[k])), all_of((float)k), out);
    return out;
}

/* Sums x * entry and entry^2, weighted. */
TARGET SL_INLINE void table_sums(const lanes *x, const lanes *weights, lanes inverse, lanes *sum_xq, lanes *sum_q2) {
    *sum_xq = *sum_q2 = all_of(0.0f);
    for (size_t i = 0; i < SL_QK; i++) {
        lanes entry = entries_of(times(inverse, x[i])), weighted = times(weights[i], entry);
        *sum_xq = plus(*sum_xq, times(weighted, x[i]));
        *sum_q2 = plus(*sum_q2, times(weighted, entry));
    }
}

/* Returns the scales of runs of 32. `means` has a mean square for each, used with importance only. */
TARGET static lanes find_table_scale(const lanes *x, const float *importance, const float means[LANES]) {
    const lanes zero = all_of(0.0f);
    lanes weights[SL_QK], sum_xq, sum_q2;
    truths nothing;
    for (size_t i = 0; i < SL_QK; i++) {
        lanes square = times(x[i], x[i]);
        float values[LANES];
        for (size_t k = 0; importance != NULL && k < LANES; k++) values[k] = importance[SL_QK * k + i];
        weights[i] = importance == NULL ? square : times(lanes_at(values), root(plus(lanes_at(means), square)));
    }
    lanes largest = largest_of(x, SL_QK, &nothing);
    lanes scale = over(largest, all_of(-(float)IQ4_TABLE[0]));
    table_sums(x, weights, over(all_of(1.0f), scale), &sum_xq, &sum_q2);
    scale = choose(below(zero, sum_q2), over(sum_xq, sum_q2), zero);
    lanes best = times(scale, sum_xq);
    for (int k = -7; k <= 7; k++) {
        table_sums(x, weights, over(all_of((float)(k + IQ4_TABLE[0])), largest), &sum_xq, &sum_q2);
        truths better = both(below(zero, sum_q2), below(times(best, sum_q2), times(sum_xq, sum_xq)));
        scale = choose(better, over(sum_xq, sum_q2), scale);
        best = choose(better, times(scale, sum_xq), best);
    }
    return choose(nothing, zero, scale);
}

/* Sets the codes of runs of 32 for their final scales. */
TARGET SL_INLINE void final_table_codes(const lanes *x, const float scales[LANES], uint8_t codes[GROUP]) {
    float inverses[LANES];
    lanes found[SL_QK];
    for (size_t k = 0; k < LANES; k++) inverses[k] = scales[k] != 0.0f ? 1.0f / scales[k] : 0.0f;
    for (size_t i = 0; i < SL_QK; i++) found[i] = table_codes(times(lanes_at(inverses), x[i]));
    put_codes(found, SL_QK, codes);
}

TARGET static void quantize_iq4_nl(const void *row, const float *importance, sl_iq4_nl *blocks, size_t count) {
    for (size_t first = 0; first < count; first += GROUP, blocks += LANES) {
        run_group group;
        lanes x[SL_QK];
        float scales[LANES], means[LANES] = {0.0f};
        uint8_t codes[GROUP];
        take_runs(&group, row, importance, first, count);
        for (size_t k = 0; importance != NULL && k < group.count; k++)
            means[k] = squares_of(group.x + 4 * SL_QK * k, SL_QK) * (2.0f / 32.0f);
        transposed(group.x, SL_QK, x);
        put(scales, find_table_scale(x, group.importance, means));
        final_table_codes(x, scales, codes);
        for (size_t k = 0; k < group.count; k++) {
            store_scale(blocks[k].d, scales[k]);
            store_nibbles(codes + SL_QK * k, blocks[k].codes);
            if (!block_finite(group.x + 4 * SL_QK * k)) store16(blocks[k].d, 0, SL_NOT_FINITE);
        }
    }
}

/* Sets the scales of a super-block of eight runs. `scales` become those that values are restored with. */
SL_INLINE void store_iq4_xs_scales(sl_iq4_xs *block, float *scales) {
    float largest = 0.0f, most = 0.0f;
    for (size_t k = 0; k < 8; k++) {
        float size = scales[k] < 0.0f ? -scales[k] : scales[k];
        largest = size > most ? scales[k] : largest;
        most = size > most ? size : most;
    }
    float d = -largest / 32.0f, inverse = d != 0.0f ? 1.0f / d : 0.0f;
    store_scale(block->d, d);
    uint32_t high = 0;
    for (size_t k = 0; k < 8; k++) {
        int32_t six = nearest_int(inverse * scales[k]);
        six = six < -32 ? -32 : six < 31 ? six : 31;
        scales[k] = d * (float)six;
        six += 32;
        block->low[k / 2] |= (uint8_t)((six & 15) << (k % 2 == 0 ? 0 : 4));
        high |= (uint32_t)six >> 4 << 2 * k;
    }
    store16(block->high, 0, (uint16_t)high);
}

TARGET static void quantize_iq4_xs(const void *row, const float *importance, sl_iq4_xs *blocks, size_t count) {
    memset(blocks, 0, count / SUPER * sizeof *blocks);
    for (size_t first = 0; first < count; first += GROUP, blocks += LANES / 8) {
        run_group group;
        lanes x[SL_QK];
        float scales[LANES], means[LANES] = {0.0f};
        uint8_t codes[GROUP];
        take_runs(&group, row, importance, first, count);
        for (size_t k = 0; importance != NULL && k < group.count; k++)
            means[k] = k % 8 == 0 ? squares_of(group.x + 4 * SL_QK * k, SUPER) * (2.0f / 256.0f) : means[k - 1];
        transposed(group.x, SL_QK, x);
        put(scales, find_table_scale(x, group.importance, means));
        for (size_t k = 0; k < group.count; k += 8) store_iq4_xs_scales(&blocks[k / 8], scales + k);
        final_table_codes(x, scales, codes);
        for (size_t k = 0; k < group.count; k++) store_nibbles(codes + SL_QK * k, blocks[k / 8].codes + 16 * (k % 8));
        for (size_t k = 0; k < group.count; k += 8) {
            if (sl_quant_scalar.absmax_f32(group.x + 4 * SL_QK * k, SUPER) < SL_F32_INFINITY) continue;
            memset(&blocks[k / 8], 0, sizeof *blocks);
            store16(blocks[k / 8].d, 0, SL_NOT_FINITE);
        }
    }
}

/* ---- mxfp4: x = 2^(exponent - 128) * E2M1_TABLE[code] ---- */

/* Returns floor(log2f(x)) of a positive x. Like the C library's log2f, whose result is rounded, it counts numbers just
 * below 2^k as 2^k: those less than half of the last place of k away from k. */
SL_INLINE int32_t floor_log2(uint32_t bits) {
    int32_t exponent = (int32_t)(bits >> 23) - 127;
    uint32_t mantissa = bits & 0x7fffff;
    if (exponent == -127) { /* subnormal */
        if (mantissa == 0) return -150;
        for (exponent = -126; (mantissa & 0x800000) == 0; exponent--) mantissa <<= 1;
    }
    /* x = 2^next * (1 - missing * 2^-24), with the logarithm next - missing * 1.4427 * 2^-24. */
    uint32_t missing = 0x800000 - (mantissa & 0x7fffff), place = 0;
    int32_t next = exponent + 1, size = next < 0 ? -next : next - 1; /* logarithms have this integer part */
    if (size == 0 || next == 0 || missing > 64) return exponent;
    while (size >> place > 1) place++;
    /* Half of the last place is 2^(place - 24). */
    return (float)missing * 1.44269504f < (float)(1u << place) ? next : exponent;
}

TARGET static void quantize_mxfp4(const uint8_t *x, sl_mxfp4 *block) {
    uint32_t absmax = sl_quant_scalar.absmax_f32(x, SL_QK);
    if (absmax >= SL_F32_INFINITY) {
        block->exponent = SL_E8M0_NAN;
        return;
    }
    /* ggml converts exponents below 0 to a byte, which leaves codes of 0. 255 is a NaN, which it refuses itself. */
    uint8_t exponent = absmax == 0 ? 0 : (uint8_t)(floor_log2(absmax) - 2 + 127);
    block->exponent = exponent = exponent == SL_E8M0_NAN ? 0 : exponent;
    lanes borders[7];
    float scale = float_of(exponent < 2 ? (uint32_t)0x00200000 << exponent : (uint32_t)(exponent - 1) << 23);
    for (size_t k = 0; k < 7; k++) borders[k] = all_of((float)(E2M1_TABLE[k] + E2M1_TABLE[k + 1]) * 0.5f * scale);
    uint8_t codes[SL_QK];
    for (size_t i = 0; i < SL_QK; i += LANES) {
        float values[LANES];
        for (size_t k = 0; k < LANES; k++) values[k] = float_of(load32(x, i + k));
        /* A border belongs to the smaller magnitude, and 0 has no sign. */
        lanes own = lanes_at(values), size = size_of(own), code = all_of(0.0f);
        for (size_t k = 0; k < 7; k++) code = choose(below(borders[k], size), all_of((float)(k + 1)), code);
        truths negative = both(below(own, all_of(0.0f)), below(all_of(0.0f), code));
        put(values, choose(negative, plus(code, all_of(8.0f)), code));
        for (size_t k = 0; k < LANES; k++) codes[i + k] = (uint8_t)values[k];
    }
    store_nibbles(codes, block->codes);
}

/* ---- nvfp4: x = half_ue4m3(scale) * E2M1_TABLE[code] ---- */

#define NVFP4_RUN ((size_t)16)

/* Returns the code of E4M3 for a number of at least 0 as ggml rounds it: halves up, and from 256 on the largest. */
SL_INLINE uint8_t ue4m3_of(float x) {
    if (x < 0x1p-6f) { /* subnormal */
        uint32_t units = (uint32_t)(x * 512.0f + 0.5f);
        return (uint8_t)(units > 7 ? 7 : units);
    }
    if (x >= 256.0f) return 0x7e;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = ((bits >> 19) + 1) >> 1; /* a carry goes to the exponent */
    uint32_t code = bits - ((127 - 7) << 3);
    return (uint8_t)(code > 0x77 ? 0x7e : code);
}

/* A code has the smallest error, and of equal errors the smallest magnitude: in f32 all errors of numbers far beyond
 * the largest code are equal. 0 has no sign. */
TARGET static void quantize_nvfp4(const uint8_t *x, sl_nvfp4 *block) {
    for (size_t run = 0; run < 4; run++) {
        uint32_t absmax = sl_quant_scalar.absmax_f32(x + 4 * NVFP4_RUN * run, NVFP4_RUN);
        if (absmax >= SL_F32_INFINITY) {
            memset(block->scales, SL_UE4M3_NOT_FINITE, sizeof block->scales);
            return;
        }
        float scale = half_ue4m3(block->scales[run] = ue4m3_of(float_of(absmax) / 6.0f));
        uint8_t codes[NVFP4_RUN];
        for (size_t i = 0; i < NVFP4_RUN; i += LANES) {
            float values[LANES];
            for (size_t k = 0; k < LANES; k++) values[k] = float_of(load32(x, NVFP4_RUN * run + i + k));
            lanes own = lanes_at(values), size = size_of(own), least = size, code = all_of(0.0f);
            for (size_t k = 1; k < 8; k++) {
                lanes error = size_of(minus(all_of((float)E2M1_TABLE[k] * scale), size));
                truths less = below(error, least);
                least = choose(less, error, least);
                code = choose(less, all_of((float)k), code);
            }
            truths negative = both(below(own, all_of(0.0f)), below(all_of(0.0f), code));
            put(values, choose(negative, plus(code, all_of(8.0f)), code));
            for (size_t k = 0; k < LANES; k++) codes[i + k] = (uint8_t)values[k];
        }
        for (size_t k = 0; k < 8; k++) block->codes[8 * run + k] = (uint8_t)(codes[k] | codes[k + 8] << 4);
    }
}

/* ---- kernels ---- */

TARGET static void KERNEL(iq4_nl)(const void *source, void *destination, size_t count) {
    quantize_iq4_nl(source, NULL, destination, count);
}

TARGET static void WEIGHTED(iq4_nl)(const void *row, const float *importance, void *out, size_t count) {
    quantize_iq4_nl(row, importance, out, count);
}

TARGET static void KERNEL(iq4_xs)(const void *source, void *destination, size_t count) {
    quantize_iq4_xs(source, NULL, destination, count);
}

TARGET static void WEIGHTED(iq4_xs)(const void *row, const float *importance, void *out, size_t count) {
    quantize_iq4_xs(row, importance, out, count);
}

TARGET static void KERNEL(mxfp4)(const void *source, void *destination, size_t count) {
    sl_mxfp4 *blocks = destination;
    memset(blocks, 0, count / SL_QK * sizeof *blocks);
    for (size_t b = 0; b < count / SL_QK; b++) quantize_mxfp4((const uint8_t *)source + 4 * SL_QK * b, &blocks[b]);
}

TARGET static void KERNEL(nvfp4)(const void *source, void *destination, size_t count) {
    sl_nvfp4 *blocks = destination;
    memset(blocks, 0, count / 64 * sizeof *blocks);
    for (size_t b = 0; b < count / 64; b++) quantize_nvfp4((const uint8_t *)source + 4 * 64 * b, &blocks[b]);
}

/* The rows of a tier, without its end. */
#define QUANT_BLOCK_KERNELS                                                                                      \
    {SL_F32, SL_IQ4_NL, KERNEL(iq4_nl)}, {SL_F32, SL_IQ4_XS, KERNEL(iq4_xs)}, {SL_F32, SL_MXFP4, KERNEL(mxfp4)}, \
        {SL_F32, SL_NVFP4, KERNEL(nvfp4)},
#define WEIGHTED_BLOCK_KERNELS                                                                                  \
    {SL_Q4_0, WEIGHTED(q4_0)}, {SL_Q4_1, WEIGHTED(q4_1)}, {SL_Q5_0, WEIGHTED(q5_0)}, {SL_Q5_1, WEIGHTED(q5_1)}, \
        {SL_IQ4_NL, WEIGHTED(iq4_nl)}, {SL_IQ4_XS, WEIGHTED(iq4_xs)},

#endif
