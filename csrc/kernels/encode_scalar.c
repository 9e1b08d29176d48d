/* The steps of quantization for other engines, element by element. */
#include "kernels/encode.h"
#include "kernels/scalar.h"

static float bf16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return value;
    return float_of((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
}

static float f16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return float_of(f16_to_f32(f32_to_f16(bits)));
}

static sl_extremes range(const float *values, size_t count) {
    sl_extremes found = {0, values[0], values[0]};
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        bits &= 0x7fffffff;
        found.absmax = bits > found.absmax ? bits : found.absmax;
        found.least = values[i] < found.least ? values[i] : found.least;
        found.most = values[i] > found.most ? values[i] : found.most;
    }
    return found;
}

static void divide(const float *values, size_t count, size_t group, const float *biases, const float *scales,
                   int32_t from, float *results) {
    for (size_t begin = 0, k = 0; begin < count; begin += group, k++) {
        size_t end = count - begin < group ? count : begin + group;
        float bias = biases == NULL ? 0.0f : biases[k], scale = scales[k];
        if (from == SL_BF16)
            for (size_t i = begin; i < end; i++) results[i] = bf16_of((values[i] - bias) / scale);
        else if (from == SL_F16)
            for (size_t i = begin; i < end; i++) results[i] = f16_of((values[i] - bias) / scale);
        else
            for (size_t i = begin; i < end; i++) results[i] = (values[i] - bias) / scale;
    }
}

static void multiply(const float *values, size_t count, size_t group, const float *factors, float limit,
                     float *results) {
    for (size_t begin = 0, k = 0; begin < count; begin += group, k++) {
        size_t end = count - begin < group ? count : begin + group;
        for (size_t i = begin; i < end; i++) {
            float product = values[i] * factors[k];
            product = product < -limit ? -limit : product;
            results[i] = product > limit ? limit : product;
        }
    }
}

static void round_all(const float *values, size_t count, float least, float most, int32_t offset, uint8_t *codes) {
    for (size_t i = 0; i < count; i++) {
        float value = values[i] < least ? least : values[i];
        value = value > most ? most : value;
        codes[i] = (uint8_t)(nearest_int(value) + offset);
    }
}

static void e2m1(const float *values, size_t count, bool even, uint8_t *codes) {
    for (size_t i = 0; i < count; i++) {
        float x = values[i] < 0 ? -values[i] : values[i];
        int code = (x > 0.25f) + (x > 1.25f) + (x > 2.5f) + (x > 5.0f);
        if (even)
            code += (x >= 0.75f) + (x >= 1.75f) + (x >= 3.5f);
        else
            code += (x > 0.75f) + (x > 1.75f) + (x > 3.5f);
        bool negative = values[i] < 0 && (even || code > 0);
        codes[i] = (uint8_t)(code | (negative ? 8 : 0));
    }
}

static void bucket(const float *values, size_t count, const float bounds[15], const uint8_t map[16], uint8_t *codes) {
    for (size_t i = 0; i < count; i++) {
        int below = 0;
        for (int k = 0; k < 15; k++) below += bounds[k] < values[i];
        codes[i] = map[below];
    }
}

/* Adding 2^14, whose last bit is worth 2^-9, rounds to a subnormal. */
static void e4m3(const float *values, size_t count, uint8_t *codes) {
    for (size_t i = 0; i < count; i++) {
        uint32_t bits, subnormal;
        memcpy(&bits, &values[i], sizeof bits);
        uint32_t size = bits & 0x7fffffff, code = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120u << 3);
        if (size < 0x3c800000) { /* 2^-6, the smallest normal */
            float sum = float_of(size) + 0x1p14f;
            memcpy(&subnormal, &sum, sizeof subnormal);
            code = subnormal - 0x46800000;
        }
        codes[i] = (uint8_t)(code | (bits >> 24 & 0x80));
    }
}

static void nibbles(const uint8_t *codes, size_t count, bool high_first, uint8_t *bytes) {
    int first = high_first ? 4 : 0;
    for (size_t i = 0; i < count; i += 2) bytes[i / 2] = (uint8_t)(codes[i] << first | codes[i + 1] << (4 - first));
}

const sl_encode_steps sl_encode_scalar = {range, divide, multiply, round_all, e2m1, bucket, e4m3, nibbles};
