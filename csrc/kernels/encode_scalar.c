/* The steps of quantization for other engines, element by element. */
#include "kernels/encode.h"
#include "kernels/scalar.h"

/* The largest E4M3. */
#define MOST 448.0f

static float rounded(float value, int32_t from) {
    uint32_t bits;
    if (from == SL_F32 || value != value) return value;
    memcpy(&bits, &value, sizeof bits);
    if (from == SL_F16) return float_of(f16_to_f32(f32_to_f16(bits)));
    return float_of((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
}

static void extremes(const float *values, size_t count, size_t group, float *absmax, float *least, float *most) {
    for (size_t i = 0; i < count; i++) {
        size_t k = i / group;
        uint32_t bits, top;
        memcpy(&bits, &values[i], sizeof bits);
        memcpy(&top, &absmax[k], sizeof top);
        if ((bits & 0x7fffffff) > top) absmax[k] = float_of(bits & 0x7fffffff);
        if (least == NULL) continue;
        least[k] = values[i] < least[k] ? values[i] : least[k];
        most[k] = values[i] > most[k] ? values[i] : most[k];
    }
}

static void quotients(const float *values, size_t count, float divisor, int32_t from, float *results) {
    for (size_t i = 0; i < count; i++) results[i] = rounded(values[i] / divisor, from);
}

/* A value of block k before it is rounded to a code. */
static float scaled(float value, const sl_encode_blocks *blocks, size_t k) {
    if (blocks->multiplies) return value * blocks->scales[k];
    if (blocks->biases != NULL) value -= blocks->biases[k];
    value = rounded(value / blocks->scales[k], blocks->from);
    return blocks->zeros == NULL ? value : rounded(value + blocks->zeros[k], blocks->from);
}

static void integers(const float *values, size_t count, const sl_encode_blocks *blocks, float least, float most,
                     int32_t offset, uint8_t *codes) {
    for (size_t i = 0; i < count; i++) {
        float value = scaled(values[i], blocks, i / blocks->group);
        value = value < least ? least : value;
        value = value > most ? most : value;
        codes[i] = (uint8_t)(nearest_int(value) + offset);
    }
}

static void ranks(const float *values, size_t count, const sl_encode_blocks *blocks, const float bounds[15],
                  const uint8_t map[16], uint8_t *codes) {
    for (size_t i = 0; i < count; i++) {
        float value = scaled(values[i], blocks, i / blocks->group);
        int below = 0;
        for (int k = 0; k < 15; k++) below += bounds[k] < value;
        codes[i] = map[below];
    }
}

/* Adding 2^14, whose last bit is worth 2^-9, rounds to a subnormal. */
static void e4m3(const float *values, size_t count, const sl_encode_blocks *blocks, uint8_t *codes) {
    for (size_t i = 0; i < count; i++) {
        float value = scaled(values[i], blocks, i / blocks->group);
        value = value < -MOST ? -MOST : value;
        value = value > MOST ? MOST : value;
        uint32_t bits, subnormal;
        memcpy(&bits, &value, sizeof bits);
        uint32_t size = bits & 0x7fffffff, code = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120u << 3);
        if (size < 0x3c800000) { /* 2^-6, the smallest normal */
            float sum = float_of(size) + 0x1p14f;
            memcpy(&subnormal, &sum, sizeof subnormal);
            code = subnormal - 0x46800000;
        }
        codes[i] = (uint8_t)(code | (bits >> 24 & 0x80));
    }
}

/* Moves 8 codes of a byte each together; the bits above are 0. */
static uint64_t joined(uint64_t codes, uint32_t bits) {
    codes = (codes & 0x00ff00ff00ff00ffu) | (codes & 0xff00ff00ff00ff00u) >> (8 - bits);
    codes = (codes & 0x0000ffff0000ffffu) | (codes & 0xffff0000ffff0000u) >> (16 - 2 * bits);
    return (codes & 0x00000000ffffffffu) | (codes & 0xffffffff00000000u) >> (32 - 4 * bits);
}

static void pack(const uint8_t *codes, size_t count, uint32_t bits, bool high_first, uint8_t *bytes) {
    int first = high_first ? 4 : 0;
    if (bits == 4) {
        for (size_t i = 0; i < count; i += 2) *bytes++ = (uint8_t)(codes[i] << first | codes[i + 1] << (4 - first));
        return;
    }
    for (size_t i = 0; i < count; i += 8) {
        uint64_t all = joined(sl_load_le64(codes + i), bits);
        for (uint32_t k = 0; k < bits; k++) *bytes++ = (uint8_t)(all >> 8 * k);
    }
}

const sl_encode_steps sl_encode_scalar = {extremes, quotients, integers, ranks, e4m3, pack};
