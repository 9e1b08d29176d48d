/* Dequantization of ggml blocks in scalar C: the reference for all tiers.
 *
 * The loops are written for vectorizing compilers: constant lengths, a single operation on adjacent bytes or floats per
 * body, and shifts that are constants after inlining. */
#include "kernels/convert.h"
#include "kernels/scalar.h"

#define TARGET
#define KERNEL(type) sl_##type##_to_f32_scalar

typedef struct codes {
    int8_t at[16];
} codes;

SL_INLINE codes codes_at(const void *bytes) {
    codes all;
    memcpy(all.at, bytes, sizeof all.at);
    return all;
}

/* A single store per word if possible, because compilers join single bytes only after they have split the words. */
SL_INLINE codes codes_of(uint64_t low, uint64_t high) {
    codes all;
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    sl_store_le64(all.at, low);
    sl_store_le64(all.at + 8, high);
#else
    memcpy(all.at, &low, sizeof low);
    memcpy(all.at + 8, &high, sizeof high);
#endif
    return all;
}

SL_INLINE codes take(codes all, int shift, uint8_t mask) {
    for (size_t l = 0; l < 16; l++) {
        unsigned byte = (uint8_t)all.at[l];
        all.at[l] = (int8_t)((shift < 0 ? byte << -shift : byte >> shift) & mask);
    }
    return all;
}

SL_INLINE codes spread(uint16_t bits, uint8_t weight) {
    static const uint16_t MASKS[16] = {0x0001, 0x0002, 0x0004, 0x0008, 0x0010, 0x0020, 0x0040, 0x0080,
                                       0x0100, 0x0200, 0x0400, 0x0800, 0x1000, 0x2000, 0x4000, 0x8000};
    uint16_t wide[16];
    codes all;
    for (size_t l = 0; l < 16; l++) wide[l] = (bits & MASKS[l]) != 0 ? weight : 0;
    for (size_t l = 0; l < 16; l++) all.at[l] = (int8_t)wide[l];
    return all;
}

SL_INLINE codes either(codes a, codes b) {
    for (size_t l = 0; l < 16; l++) a.at[l] = (int8_t)(a.at[l] | b.at[l]);
    return a;
}

SL_INLINE codes less(codes all, int8_t bias) {
    for (size_t l = 0; l < 16; l++) all.at[l] = (int8_t)(all.at[l] - bias);
    return all;
}

SL_INLINE codes thrice(codes all) {
    for (size_t l = 0; l < 16; l++) all.at[l] = (int8_t)(uint8_t)(3 * (unsigned)(uint8_t)all.at[l]);
    return all;
}

SL_INLINE codes top_digit(codes all) {
    for (size_t l = 0; l < 16; l++) all.at[l] = (int8_t)(3 * (unsigned)(uint8_t)all.at[l] >> 8);
    return all;
}

SL_INLINE void scales_of(float floats[16], codes all, float factor) {
    for (size_t l = 0; l < 16; l++) floats[l] = (float)all.at[l] * factor;
}

/* Stores 16 values in a single copy, because compilers do not vectorize stores of single bytes. */
SL_INLINE void store_all(uint8_t *out, const float values[16]) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    for (size_t l = 0; l < 16; l++) store_float(out, l, values[l]);
#else
    memcpy(out, values, 16 * sizeof *values);
#endif
}

SL_INLINE void put(uint8_t *out, codes all, float scale) {
    float values[16];
    scales_of(values, all, scale);
    store_all(out, values);
}

SL_INLINE void put_plus(uint8_t *out, codes all, float scale, float more) {
    float values[16];
    for (size_t l = 0; l < 16; l++) {
        float product = (float)all.at[l] * scale;
        values[l] = product + more;
    }
    store_all(out, values);
}

SL_INLINE void put_nibbles(uint8_t *out, codes all, int8_t bias, float scale) { put(out, less(all, bias), scale); }

SL_INLINE void put_from(uint8_t *out, const int8_t table[16], codes all, float scale) {
    float numbers[16], values[16];
    for (size_t l = 0; l < 16; l++) numbers[l] = (float)table[l] * scale;
    for (size_t l = 0; l < 16; l++) values[l] = numbers[all.at[l]];
    store_all(out, values);
}

static float half_at(const uint8_t bytes[2]) { return load_half(bytes, 0); }

#include "kernels/dequant.h"

const sl_kernel sl_dequant_kernels_scalar[] = {DEQUANT_KERNELS{-1, -1, NULL}};
