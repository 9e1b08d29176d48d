/* The block types of ggml that are only read: to f32, in scalar C for every tier. Each block is described where it is
 * restored; the source of all is https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Products and sums are
 * rounded one by one in ggml's order, which is gguf-py's too. */
#include "kernel.h"
#include "scalar.h"

/* Elements of the small blocks, QK4_1 and the like, and of the super-blocks, QK_K. */
#define SMALL 32
#define SUPER 256

/* Values of a block to their place: written at once, so that compilers see loops over plain floats before. */
static void put(void *destination, size_t i, const float *values, size_t count) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    for (size_t k = 0; k < count; k++) store_float(destination, i + k, values[k]);
#else
    memcpy((uint8_t *)destination + 4 * i, values, count * sizeof *values);
#endif
}

static float half_at(const uint8_t *source) { return float_of(f16_to_f32(load16(source, 0))); }

/* ---- blocks of 32: one or two f16, then the codes of elements j (low nibbles) and j + 16 (high ones) ---- */

/* x = code * d + m. */
typedef struct sl_q4_1 {
    uint8_t d[2], m[2], codes[16];
} sl_q4_1;
_Static_assert(sizeof(sl_q4_1) == 20, "blocks lie in files without padding");

static void sl_q4_1_to_f32_scalar(const void *source, void *destination, size_t count) {
    const sl_q4_1 *block = source;
    float values[SMALL];
    for (size_t i = 0; i < count; i += SMALL, block++) {
        float d = half_at(block->d), m = half_at(block->m);
        for (size_t j = 0; j < 16; j++) {
            float low = (float)(block->codes[j] & 15) * d, high = (float)(block->codes[j] >> 4) * d;
            values[j] = low + m;
            values[j + 16] = high + m;
        }
        put(destination, i, values, SMALL);
    }
}

/* The fifth bit of element j is bit j of `high`. x = (code - 16) * d. */
typedef struct sl_q5_0 {
    uint8_t d[2], high[4], codes[16];
} sl_q5_0;
_Static_assert(sizeof(sl_q5_0) == 22, "blocks lie in files without padding");

static int32_t five_bits(uint32_t nibble, uint32_t high, size_t element) {
    return (int32_t)(nibble | (high >> element & 1) << 4);
}

static void sl_q5_0_to_f32_scalar(const void *source, void *destination, size_t count) {
    const sl_q5_0 *block = source;
    float values[SMALL];
    for (size_t i = 0; i < count; i += SMALL, block++) {
        float d = half_at(block->d);
        uint32_t high = load32(block->high, 0);
        for (size_t j = 0; j < 16; j++) {
            values[j] = (float)(five_bits(block->codes[j] & 15, high, j) - 16) * d;
            values[j + 16] = (float)(five_bits(block->codes[j] >> 4, high, j + 16) - 16) * d;
        }
        put(destination, i, values, SMALL);
    }
}

/* x = code * d + m. */
typedef struct sl_q5_1 {
    uint8_t d[2], m[2], high[4], codes[16];
} sl_q5_1;
_Static_assert(sizeof(sl_q5_1) == 24, "blocks lie in files without padding");

static void sl_q5_1_to_f32_scalar(const void *source, void *destination, size_t count) {
    const sl_q5_1 *block = source;
    float values[SMALL];
    for (size_t i = 0; i < count; i += SMALL, block++) {
        float d = half_at(block->d), m = half_at(block->m);
        uint32_t high = load32(block->high, 0);
        for (size_t j = 0; j < 16; j++) {
            float first = (float)five_bits(block->codes[j] & 15, high, j) * d;
            float second = (float)five_bits(block->codes[j] >> 4, high, j + 16) * d;
            values[j] = first + m;
            values[j + 16] = second + m;
        }
        put(destination, i, values, SMALL);
    }
}

/* Codes into a table of values. */
static void restore_from_table(const int8_t values[16], const uint8_t codes[16], float d, void *destination, size_t i) {
    float restored[SMALL];
    for (size_t j = 0; j < 16; j++) {
        restored[j] = (float)values[codes[j] & 15] * d;
        restored[j + 16] = (float)values[codes[j] >> 4] * d;
    }
    put(destination, i, restored, SMALL);
}

typedef struct sl_iq4_nl {
    uint8_t d[2], codes[16];
} sl_iq4_nl;
_Static_assert(sizeof(sl_iq4_nl) == 18, "blocks lie in files without padding");

static void sl_iq4_nl_to_f32_scalar(const void *source, void *destination, size_t count) {
    static const int8_t VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    const sl_iq4_nl *block = source;
    for (size_t i = 0; i < count; i += SMALL, block++)
        restore_from_table(VALUES, block->codes, half_at(block->d), destination, i);
}

/* The scale is 2^(exponent - 128), half of E8M0's, as the values are twice those of E2M1 (OCP Microscaling Formats v1.0). */
typedef struct sl_mxfp4 {
    uint8_t exponent, codes[16];
} sl_mxfp4;
_Static_assert(sizeof(sl_mxfp4) == 17, "blocks lie in files without padding");

static void sl_mxfp4_to_f32_scalar(const void *source, void *destination, size_t count) {
    static const int8_t VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const sl_mxfp4 *block = source;
    for (size_t i = 0; i < count; i += SMALL, block++) {
        uint32_t exponent = block->exponent; /* 0 and 1 are subnormal scales */
        float d = float_of(exponent < 2 ? (uint32_t)0x00200000 << exponent : (exponent - 1) << 23);
        restore_from_table(VALUES, block->codes, d, destination, i);
    }
}

/* ---- super-blocks of 256: an f16 scale of scales, and small integers that scale runs of 16 or 32 ---- */

/* 16 runs of 16: the low nibble of a run's scale is that of its codes, the high one that of its minimum.
 * x = (d * scale) * code - dmin * minimum. Codes have 2 bits: a byte holds those of elements 32 apart. */
typedef struct sl_q2_k {
    uint8_t scales[16], codes[64], d[2], dmin[2];
} sl_q2_k;
_Static_assert(sizeof(sl_q2_k) == 84, "blocks lie in files without padding");

static void sl_q2_k_to_f32_scalar(const void *source, void *destination, size_t count) {
    const sl_q2_k *block = source;
    float values[SUPER];
    for (size_t i = 0; i < count; i += SUPER, block++) {
        float d = half_at(block->d), dmin = half_at(block->dmin);
        for (size_t run = 0; run < 16; run++) {
            const uint8_t *codes = block->codes + run / 8 * 32 + run % 2 * 16;
            unsigned shift = (unsigned)(run % 8 / 2 * 2);
            float scale = d * (float)(block->scales[run] & 15), minimum = dmin * (float)(block->scales[run] >> 4);
            for (size_t l = 0; l < 16; l++) {
                float product = scale * (float)(codes[l] >> shift & 3);
                values[16 * run + l] = product - minimum;
            }
        }
        put(destination, i, values, SUPER);
    }
}

/* 16 runs of 16. x = (d * (scale - 32)) * (code - 4 unless its bit of `high` is set). Scales have 6 bits: the low 4 of runs
 * k and k + 8 share byte k, the high 2 of runs k, k + 4, k + 8 and k + 12 share byte 8 + k. */
typedef struct sl_q3_k {
    uint8_t high[32], codes[64], scales[12], d[2];
} sl_q3_k;
_Static_assert(sizeof(sl_q3_k) == 110, "blocks lie in files without padding");

static void sl_q3_k_to_f32_scalar(const void *source, void *destination, size_t count) {
    const sl_q3_k *block = source;
    float values[SUPER];
    for (size_t i = 0; i < count; i += SUPER, block++) {
        float d = half_at(block->d);
        for (size_t run = 0; run < 16; run++) {
            unsigned low = block->scales[run % 8] >> (run < 8 ? 0 : 4) & 15;
            unsigned top = block->scales[8 + run % 4] >> run / 4 * 2 & 3;
            float scale = d * (float)((int)(low | top << 4) - 32);
            const uint8_t *codes = block->codes + run / 8 * 32 + run % 2 * 16, *high = block->high + run % 2 * 16;
            unsigned shift = (unsigned)(run % 8 / 2 * 2), bit = (unsigned)(run / 2);
            for (size_t l = 0; l < 16; l++) {
                int code = (int)(codes[l] >> shift & 3) - ((high[l] >> bit & 1) != 0 ? 0 : 4);
                values[16 * run + l] = scale * (float)code;
            }
        }
        put(destination, i, values, SUPER);
    }
}

/* Scale and minimum of run k of 8, 6 bits each: of runs 0 to 3 they are the low bits of bytes k and k + 4; those of the
 * others have their low 4 bits in byte k + 4 and the high 2 on top of those. */
typedef struct scaled {
    float scale, minimum;
} scaled;

static scaled six_bits(const uint8_t scales[12], size_t run, float d, float dmin) {
    unsigned a, b;
    if (run < 4) {
        a = scales[run] & 63;
        b = scales[run + 4] & 63;
    } else {
        a = (unsigned)(scales[run + 4] & 15) | (unsigned)(scales[run - 4] >> 6) << 4;
        b = (unsigned)(scales[run + 4] >> 4) | (unsigned)(scales[run] >> 6) << 4;
    }
    return (scaled){d * (float)a, dmin * (float)b};
}

/* 8 runs of 32. x = (d * scale) * code - dmin * minimum. A byte holds the codes of elements 32 apart. */
typedef struct sl_q4_k {
    uint8_t d[2], dmin[2], scales[12], codes[128];
} sl_q4_k;
_Static_assert(sizeof(sl_q4_k) == 144, "blocks lie in files without padding");

static void sl_q4_k_to_f32_scalar(const void *source, void *destination, size_t count) {
    const sl_q4_k *block = source;
    float values[SUPER];
    for (size_t i = 0; i < count; i += SUPER, block++) {
        float d = half_at(block->d), dmin = half_at(block->dmin);
        for (size_t run = 0; run < 8; run += 2) { /* low nibbles, then high ones: shifts by a constant are vectors */
            const uint8_t *codes = block->codes + run * 16;
            scaled low = six_bits(block->scales, run, d, dmin), high = six_bits(block->scales, run + 1, d, dmin);
            for (size_t l = 0; l < 32; l++) values[32 * run + l] = low.scale * (float)(codes[l] & 15) - low.minimum;
            for (size_t l = 0; l < 32; l++) values[32 * run + 32 + l] = high.scale * (float)(codes[l] >> 4) - high.minimum;
        }
        put(destination, i, values, SUPER);
    }
}

/* As Q4_K, with a fifth bit: that of run k is bit k of `high`. */
typedef struct sl_q5_k {
    uint8_t d[2], dmin[2], scales[12], high[32], codes[128];
} sl_q5_k;
_Static_assert(sizeof(sl_q5_k) == 176, "blocks lie in files without padding");

static void sl_q5_k_to_f32_scalar(const void *source, void *destination, size_t count) {
    const sl_q5_k *block = source;
    float values[SUPER];
    uint8_t fives[32]; /* codes of a run */
    for (size_t i = 0; i < count; i += SUPER, block++) {
        float d = half_at(block->d), dmin = half_at(block->dmin);
        for (size_t run = 0; run < 8; run++) {
            const uint8_t *codes = block->codes + run / 2 * 32;
            scaled by = six_bits(block->scales, run, d, dmin);
            uint8_t bit = (uint8_t)(1u << run);
            if (run % 2 == 0)
                for (size_t l = 0; l < 32; l++) fives[l] = codes[l] & 15;
            else
                for (size_t l = 0; l < 32; l++) fives[l] = codes[l] >> 4;
            for (size_t l = 0; l < 32; l++) fives[l] |= (block->high[l] & bit) != 0 ? 16 : 0;
            for (size_t l = 0; l < 32; l++) values[32 * run + l] = by.scale * (float)fives[l] - by.minimum;
        }
        put(destination, i, values, SUPER);
    }
}

/* 16 runs of 16, scales of 8 bits. x = (d * scale) * (code - 32). Of each half of 128 elements `low` has the low 4 bits
 * (elements 64 apart in a byte), `high` the others (elements 32 apart). */
typedef struct sl_q6_k {
    uint8_t low[128], high[64];
    int8_t scales[16];
    uint8_t d[2];
} sl_q6_k;
_Static_assert(sizeof(sl_q6_k) == 210, "blocks lie in files without padding");

static void sl_q6_k_to_f32_scalar(const void *source, void *destination, size_t count) {
    const sl_q6_k *block = source;
    float values[SUPER];
    for (size_t i = 0; i < count; i += SUPER, block++) {
        float d = half_at(block->d);
        for (size_t run = 0; run < 16; run++) {
            size_t half = run / 8, at = run % 8 * 16; /* of the run among its 128 */
            const uint8_t *low = block->low + half * 64 + at % 64, *high = block->high + half * 32 + at % 32;
            unsigned low_shift = at < 64 ? 0 : 4, high_shift = (unsigned)(at / 32 * 2);
            float scale = d * (float)block->scales[run];
            for (size_t l = 0; l < 16; l++) {
                int code = (int)((low[l] >> low_shift & 15) | (high[l] >> high_shift & 3) << 4) - 32;
                values[16 * run + l] = scale * (float)code;
            }
        }
        put(destination, i, values, SUPER);
    }
}

const sl_kernel sl_dequant_kernels[] = {
    {SL_Q4_1, SL_F32, sl_q4_1_to_f32_scalar},   {SL_Q5_0, SL_F32, sl_q5_0_to_f32_scalar},
    {SL_Q5_1, SL_F32, sl_q5_1_to_f32_scalar},   {SL_Q2_K, SL_F32, sl_q2_k_to_f32_scalar},
    {SL_Q3_K, SL_F32, sl_q3_k_to_f32_scalar},   {SL_Q4_K, SL_F32, sl_q4_k_to_f32_scalar},
    {SL_Q5_K, SL_F32, sl_q5_k_to_f32_scalar},   {SL_Q6_K, SL_F32, sl_q6_k_to_f32_scalar},
    {SL_MXFP4, SL_F32, sl_mxfp4_to_f32_scalar}, {SL_IQ4_NL, SL_F32, sl_iq4_nl_to_f32_scalar},
    {-1, -1, NULL},
};
