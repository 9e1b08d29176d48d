/* Block types of ggml to f32, in scalar C for every tier. Each block is described where it is dequantized; the source
 * of all is https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Products and sums are rounded one by one in
 * the order of ggml and gguf-py.
 *
 * The speed comes from loops that compilers vectorize: their lengths are constants, their bodies apply one operation to
 * adjacent bytes or floats, and shifts are constants after inlining. */
#include "kernels/quant.h"
#include "kernels/scalar.h"

/* Elements of small blocks (QK4_1 and others) and of super-blocks (QK_K). */
#define SMALL 32
#define SUPER 256

/* Stores `count` values in one copy: compilers do not vectorize stores of single bytes. */
SL_INLINE void put(uint8_t *destination, const float *values, size_t count) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    for (size_t k = 0; k < count; k++) store_float(destination, k, values[k]);
#else
    memcpy(destination, values, count * sizeof *values);
#endif
}

/* Stores 16 codes times their scale. */
SL_INLINE void put_scaled(uint8_t *destination, const int8_t codes[16], float scale) {
    float values[16];
    for (size_t l = 0; l < 16; l++) values[l] = (float)codes[l] * scale;
    put(destination, values, 16);
}

/* Stores 16 codes times their scale, plus a constant. */
SL_INLINE void put_scaled_plus(uint8_t *destination, const int8_t codes[16], float scale, float constant) {
    float values[16];
    for (size_t l = 0; l < 16; l++) {
        float product = (float)codes[l] * scale;
        values[l] = product + constant;
    }
    put(destination, values, 16);
}

/* Extracts the same bits of each of 16 bytes. */
SL_INLINE void take_bits(int8_t codes[16], const uint8_t bytes[16], unsigned shift, unsigned mask) {
    for (size_t l = 0; l < 16; l++) codes[l] = (int8_t)(bytes[l] >> shift & mask);
}

/* Adds `weight` to the codes whose byte has the bit of `mask`, and subtracts `bias` from all. */
SL_INLINE void add_bit(int8_t codes[16], const uint8_t bytes[16], uint8_t mask, int8_t weight, int8_t bias) {
    for (size_t l = 0; l < 16; l++) codes[l] = (int8_t)(codes[l] + ((bytes[l] & mask) != 0 ? weight : 0) - bias);
}

static float half_at(const uint8_t *source) { return float_of(f16_to_f32(load16(source, 0))); }

/* ---- blocks of 32 (quant.h) ---- */

static void sl_q4_1_to_f32_scalar(const void *source, void *destination, size_t count) {
    const sl_q4_1 *block = source;
    uint8_t *out = destination;
    float values[SMALL];
    for (size_t i = 0; i < count; i += SMALL, block++, out += 4 * SMALL) {
        float d = half_at(block->d), m = half_at(block->m);
        for (size_t j = 0; j < 16; j++) {
            float low = (float)(block->codes[j] & 15) * d, high = (float)(block->codes[j] >> 4) * d;
            values[j] = low + m;
            values[j + 16] = high + m;
        }
        put(out, values, SMALL);
    }
}

/* Adds the fifth bits of 16 codes, and subtracts `bias` from all. */
SL_INLINE void add_fifth(int8_t codes[16], const uint8_t high[2], int8_t bias) {
    static const uint16_t masks[16] = {0x0001, 0x0002, 0x0004, 0x0008, 0x0010, 0x0020, 0x0040, 0x0080,
                                       0x0100, 0x0200, 0x0400, 0x0800, 0x1000, 0x2000, 0x4000, 0x8000};
    uint16_t bits = load16(high, 0), fifth[16];
    for (size_t l = 0; l < 16; l++) fifth[l] = (bits & masks[l]) != 0 ? 16 : 0;
    for (size_t l = 0; l < 16; l++) codes[l] = (int8_t)(codes[l] + (int8_t)fifth[l] - bias);
}

static void sl_q5_0_to_f32_scalar(const void *source, void *destination, size_t count) {
    const sl_q5_0 *block = source;
    uint8_t *out = destination;
    int8_t codes[16];
    for (size_t i = 0; i < count; i += SMALL, block++, out += 4 * SMALL) {
        float d = half_at(block->d);
        take_bits(codes, block->codes, 0, 15);
        add_fifth(codes, block->high, 16);
        put_scaled(out, codes, d);
        take_bits(codes, block->codes, 4, 15);
        add_fifth(codes, block->high + 2, 16);
        put_scaled(out + 64, codes, d);
    }
}

static void sl_q5_1_to_f32_scalar(const void *source, void *destination, size_t count) {
    const sl_q5_1 *block = source;
    uint8_t *out = destination;
    int8_t codes[16];
    for (size_t i = 0; i < count; i += SMALL, block++, out += 4 * SMALL) {
        float d = half_at(block->d), m = half_at(block->m);
        take_bits(codes, block->codes, 0, 15);
        add_fifth(codes, block->high, 0);
        put_scaled_plus(out, codes, d, m);
        take_bits(codes, block->codes, 4, 15);
        add_fifth(codes, block->high + 2, 0);
        put_scaled_plus(out + 64, codes, d, m);
    }
}

/* Codes are indices into a table of values, which is scaled once per block. */
SL_INLINE void put_from_table(uint8_t *destination, const float table[16], const uint8_t codes[16], float d) {
    float scaled[16], values[SMALL];
    for (size_t k = 0; k < 16; k++) scaled[k] = table[k] * d;
    for (size_t j = 0; j < 16; j++) {
        values[j] = scaled[codes[j] & 15];
        values[j + 16] = scaled[codes[j] >> 4];
    }
    put(destination, values, SMALL);
}

typedef struct sl_iq4_nl {
    uint8_t d[2], codes[16];
} sl_iq4_nl;
_Static_assert(sizeof(sl_iq4_nl) == 18, "blocks have no padding in files");

static void sl_iq4_nl_to_f32_scalar(const void *source, void *destination, size_t count) {
    static const float TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    const sl_iq4_nl *block = source;
    uint8_t *out = destination;
    for (size_t i = 0; i < count; i += SMALL, block++, out += 4 * SMALL)
        put_from_table(out, TABLE, block->codes, half_at(block->d));
}

/* The scale is 2^(exponent - 128), half that of E8M0, as the values are twice those of E2M1 (OCP Microscaling Formats
 * v1.0). */
typedef struct sl_mxfp4 {
    uint8_t exponent, codes[16];
} sl_mxfp4;
_Static_assert(sizeof(sl_mxfp4) == 17, "blocks have no padding in files");

static void sl_mxfp4_to_f32_scalar(const void *source, void *destination, size_t count) {
    static const float TABLE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const sl_mxfp4 *block = source;
    uint8_t *out = destination;
    for (size_t i = 0; i < count; i += SMALL, block++, out += 4 * SMALL) {
        uint32_t exponent = block->exponent; /* 0 and 1 are subnormal scales */
        float d = float_of(exponent < 2 ? (uint32_t)0x00200000 << exponent : (exponent - 1) << 23);
        put_from_table(out, TABLE, block->codes, d);
    }
}

/* ---- super-blocks of 256: an f16 scale of scales, and small integers that scale runs of 16 or 32 ---- */

/* 16 runs of 16: the low nibble of a run's entry in `scales` scales its codes, the high one its minimum. x = (d *
 * scale) * code - dmin * minimum. Codes have 2 bits: a byte holds those of elements 32 apart. */
typedef struct sl_q2_k {
    uint8_t scales[16], codes[64], d[2], dmin[2];
} sl_q2_k;
_Static_assert(sizeof(sl_q2_k) == 84, "blocks have no padding in files");

/* Two runs, whose codes are the same bits of 32 bytes. */
SL_INLINE void q2_k_runs(uint8_t *out, const uint8_t bytes[32], unsigned shift, const uint8_t scales[2], float d,
                         float dmin) {
    int8_t codes[16];
    for (size_t k = 0; k < 2; k++) {
        float scale = d * (float)(scales[k] & 15), minimum = dmin * (float)(scales[k] >> 4);
        take_bits(codes, bytes + 16 * k, shift, 3);
        put_scaled_plus(out + 64 * k, codes, scale, -minimum);
    }
}

static void sl_q2_k_to_f32_scalar(const void *source, void *destination, size_t count) {
    const sl_q2_k *block = source;
    uint8_t *out = destination;
    for (size_t i = 0; i < count; i += SUPER, block++) {
        float d = half_at(block->d), dmin = half_at(block->dmin);
        for (size_t half = 0; half < 2; half++, out += 2 * SUPER) {
            const uint8_t *bytes = block->codes + 32 * half, *scales = block->scales + 8 * half;
            q2_k_runs(out, bytes, 0, scales, d, dmin);
            q2_k_runs(out + 128, bytes, 2, scales + 2, d, dmin);
            q2_k_runs(out + 256, bytes, 4, scales + 4, d, dmin);
            q2_k_runs(out + 384, bytes, 6, scales + 6, d, dmin);
        }
    }
}

/* 16 runs of 16. x = (d * (scale - 32)) * (code - 4 unless its bit of `high` is set). Scales have 6 bits: the low 4 of
 * runs k and k + 8 share byte k, the high 2 of runs k, k + 4, k + 8 and k + 12 share byte 8 + k. */
typedef struct sl_q3_k {
    uint8_t high[32], codes[64], scales[12], d[2];
} sl_q3_k;
_Static_assert(sizeof(sl_q3_k) == 110, "blocks have no padding in files");

/* Two runs, whose codes are the same bits of 32 bytes. */
SL_INLINE void q3_k_runs(uint8_t *out, const uint8_t bytes[32], unsigned shift, const sl_q3_k *block, size_t run,
                         float d) {
    int8_t codes[16];
    for (size_t k = 0; k < 2; k++, run++) {
        unsigned low = block->scales[run % 8] >> (run < 8 ? 0 : 4) & 15;
        unsigned top = block->scales[8 + run % 4] >> run / 4 * 2 & 3;
        float scale = d * (float)((int)(low | top << 4) - 32);
        take_bits(codes, bytes + 16 * k, shift, 3);
        add_bit(codes, block->high + 16 * k, (uint8_t)(1 << run / 2), 4, 4);
        put_scaled(out + 64 * k, codes, scale);
    }
}

static void sl_q3_k_to_f32_scalar(const void *source, void *destination, size_t count) {
    const sl_q3_k *block = source;
    uint8_t *out = destination;
    for (size_t i = 0; i < count; i += SUPER, block++) {
        float d = half_at(block->d);
        for (size_t half = 0; half < 2; half++, out += 2 * SUPER) {
            const uint8_t *bytes = block->codes + 32 * half;
            q3_k_runs(out, bytes, 0, block, 8 * half, d);
            q3_k_runs(out + 128, bytes, 2, block, 8 * half + 2, d);
            q3_k_runs(out + 256, bytes, 4, block, 8 * half + 4, d);
            q3_k_runs(out + 384, bytes, 6, block, 8 * half + 6, d);
        }
    }
}

/* Scale and minimum of run k of 8, 6 bits each: for runs 0 to 3 they are the low bits of bytes k and k + 4; for the
 * others the low 4 bits are in byte k + 4 and the high 2 are the top bits of the bytes of runs 0 to 3. */
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
_Static_assert(sizeof(sl_q4_k) == 144, "blocks have no padding in files");

/* A run: the nibbles of 32 bytes, and a fifth bit out of `high` unless that is NULL. */
SL_INLINE void q4_k_run(uint8_t *out, const uint8_t bytes[32], unsigned shift, const uint8_t *high, size_t run,
                        scaled by) {
    int8_t codes[16];
    for (size_t k = 0; k < 2; k++) {
        take_bits(codes, bytes + 16 * k, shift, 15);
        if (high != NULL) add_bit(codes, high + 16 * k, (uint8_t)(1 << run), 16, 0);
        put_scaled_plus(out + 64 * k, codes, by.scale, -by.minimum);
    }
}

static void sl_q4_k_to_f32_scalar(const void *source, void *destination, size_t count) {
    const sl_q4_k *block = source;
    uint8_t *out = destination;
    for (size_t i = 0; i < count; i += SUPER, block++) {
        float d = half_at(block->d), dmin = half_at(block->dmin);
        for (size_t run = 0; run < 8; run += 2, out += 256) {
            q4_k_run(out, block->codes + 16 * run, 0, NULL, run, six_bits(block->scales, run, d, dmin));
            q4_k_run(out + 128, block->codes + 16 * run, 4, NULL, run + 1, six_bits(block->scales, run + 1, d, dmin));
        }
    }
}

/* Like Q4_K, with a fifth bit: bit k of `high` for run k. */
typedef struct sl_q5_k {
    uint8_t d[2], dmin[2], scales[12], high[32], codes[128];
} sl_q5_k;
_Static_assert(sizeof(sl_q5_k) == 176, "blocks have no padding in files");

static void sl_q5_k_to_f32_scalar(const void *source, void *destination, size_t count) {
    const sl_q5_k *block = source;
    uint8_t *out = destination;
    for (size_t i = 0; i < count; i += SUPER, block++) {
        float d = half_at(block->d), dmin = half_at(block->dmin);
        for (size_t run = 0; run < 8; run += 2, out += 256) {
            q4_k_run(out, block->codes + 16 * run, 0, block->high, run, six_bits(block->scales, run, d, dmin));
            q4_k_run(out + 128, block->codes + 16 * run, 4, block->high, run + 1,
                     six_bits(block->scales, run + 1, d, dmin));
        }
    }
}

/* 16 runs of 16, scales of 8 bits. x = (d * scale) * (code - 32). For each half of 128 elements `low` has the low 4
 * bits (elements 64 apart share a byte), `high` the others (elements 32 apart). */
typedef struct sl_q6_k {
    uint8_t low[128], high[64];
    int8_t scales[16];
    uint8_t d[2];
} sl_q6_k;
_Static_assert(sizeof(sl_q6_k) == 210, "blocks have no padding in files");

/* Two runs, whose codes are the same bits of 32 bytes each. */
SL_INLINE void q6_k_runs(uint8_t *out, const uint8_t low[32], unsigned low_shift, const uint8_t high[32],
                         unsigned high_shift, const int8_t scales[2], float d) {
    int8_t codes[16], top[16];
    for (size_t k = 0; k < 2; k++) {
        float scale = d * (float)scales[k];
        take_bits(codes, low + 16 * k, low_shift, 15);
        take_bits(top, high + 16 * k, high_shift, 3);
        for (size_t l = 0; l < 16; l++) codes[l] = (int8_t)(codes[l] + top[l] * 16 - 32);
        put_scaled(out + 64 * k, codes, scale);
    }
}

static void sl_q6_k_to_f32_scalar(const void *source, void *destination, size_t count) {
    const sl_q6_k *block = source;
    uint8_t *out = destination;
    for (size_t i = 0; i < count; i += SUPER, block++) {
        float d = half_at(block->d);
        for (size_t half = 0; half < 2; half++, out += 2 * SUPER) {
            const uint8_t *low = block->low + 64 * half, *high = block->high + 32 * half;
            const int8_t *scales = block->scales + 8 * half;
            q6_k_runs(out, low, 0, high, 0, scales, d);
            q6_k_runs(out + 128, low + 32, 0, high, 2, scales + 2, d);
            q6_k_runs(out + 256, low, 4, high, 4, scales + 4, d);
            q6_k_runs(out + 384, low + 32, 4, high, 6, scales + 6, d);
        }
    }
}

const sl_kernel sl_dequant_kernels[] = {
    {SL_Q4_1, SL_F32, sl_q4_1_to_f32_scalar},
    {SL_Q5_0, SL_F32, sl_q5_0_to_f32_scalar},
    {SL_Q5_1, SL_F32, sl_q5_1_to_f32_scalar},
    {SL_Q2_K, SL_F32, sl_q2_k_to_f32_scalar},
    {SL_Q3_K, SL_F32, sl_q3_k_to_f32_scalar},
    {SL_Q4_K, SL_F32, sl_q4_k_to_f32_scalar},
    {SL_Q5_K, SL_F32, sl_q5_k_to_f32_scalar},
    {SL_Q6_K, SL_F32, sl_q6_k_to_f32_scalar},
    {SL_MXFP4, SL_F32, sl_mxfp4_to_f32_scalar},
    {SL_IQ4_NL, SL_F32, sl_iq4_nl_to_f32_scalar},
    {-1, -1, NULL},
};
