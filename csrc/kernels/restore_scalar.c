/* Dequantization in scalar C: the reference for all tiers. */
#include "kernels/restore.h"
#include "kernels/scalar.h"

/* Values [0, count) with a single scale. */
static void scale_values(void *values, size_t count, const sl_scaling *one) {
    for (size_t i = 0; i < count; i++) {
        float value = float_of(load32(values, i));
        if (one->zeros != NULL) value -= *one->zeros;
        value *= *one->scales;
        if (one->biases != NULL) value += *one->biases;
        store_float(values, i, value);
    }
}

static void sl_scale_scalar(void *values, size_t count, const sl_scaling *scaling) {
    size_t block = scaling->block, at = 0, end = block - scaling->first;
    for (size_t i = 0; i < count; i = end, end += block, at++) {
        const sl_scaling one = sl_scaling_at(scaling, at);
        scale_values((uint8_t *)values + 4 * i, (end < count ? end : count) - i, &one);
    }
}

static void sl_nibbles_scalar(const uint8_t *codes, size_t first, bool high_first, size_t count, const float *table,
                              const sl_scaling *scaling, void *values) {
    size_t turned = high_first ? 1 : 0;
    for (size_t i = 0; i < count; i++) {
        size_t k = first + i;
        store_float(values, i, table[codes[k / 2] >> (4 * ((k & 1) ^ turned)) & 15]);
    }
    if (scaling != NULL) sl_scale_scalar(values, count, scaling);
}

static void sl_plane_scalar(const uint8_t *bytes, int shift, int bits, size_t count, const float *table,
                            const sl_scaling *scaling, void *values) {
    int mask = (1 << bits) - 1;
    for (size_t i = 0; i < count; i++) store_float(values, i, table[bytes[i] >> shift & mask]);
    if (scaling != NULL) sl_scale_scalar(values, count, scaling);
}

static void sl_words_scalar(const uint8_t *words, int shift, size_t count, const float *table,
                            const sl_scaling *scaling, void *values) {
    for (size_t i = 0; i < count; i++) store_float(values, i, table[load32(words, i) >> shift & 15]);
    if (scaling != NULL) sl_scale_scalar(values, count, scaling);
}

static void sl_grouped_scalar(const sl_grouped *codes, size_t begin, size_t end, size_t columns, void *values,
                              size_t line) {
    size_t bits = (size_t)codes->bits;
    uint32_t mask = (1u << bits) - 1;
    for (size_t row = begin; row < end; row++) {
        size_t shift = row * bits % 32, at = codes->groups[row] * codes->step;
        const uint8_t *words = codes->words + row * bits / 32 * codes->pitch;
        for (size_t c = 0; c < columns; c++) {
            uint32_t code = load32(words, c) >> shift;
            if (shift + bits > 32) code |= load32(words + codes->pitch, c) << (32 - shift); /* spans two words */
            float value = codes->first + (float)(code & mask);
            if (codes->zeros != NULL) value -= codes->zeros[at + c];
            value *= codes->scales[at + c];
            if (codes->biases != NULL) value += codes->biases[at + c];
            store_float((uint8_t *)values + c * line, row - begin, value);
        }
    }
}

static void sl_expand_scalar(const uint8_t *mask, size_t first, size_t count, const void *stored, size_t held,
                             void *values) {
    size_t i = 0;
    /* No branch per bit, because the bits are unpredictable. */
    for (size_t at = 0; at < held && i < count; i++) {
        uint32_t bit = (uint32_t)mask[(first + i) / 8] >> (first + i) % 8 & 1;
        store32(values, i, load32(stored, at) & (0u - bit));
        at += bit;
    }
    memset((uint8_t *)values + 4 * i, 0, 4 * (count - i));
}

static void sl_narrow_scalar(const void *values, size_t count, uint8_t *bytes) {
    for (size_t i = 0; i < count; i++) {
        float sum = float_of(load32(values, i)) + SL_TO_INTEGER;
        uint32_t bits;
        memcpy(&bits, &sum, sizeof bits);
        bytes[i] = (uint8_t)bits;
    }
}

void sl_restore_stream(const uint8_t *codes, size_t first, int bits, size_t count, const float *table, void *values) {
    uint32_t mask = (1u << bits) - 1, held = 0;
    int available = 0;
    if (count == 0) return;
    codes += first / 8;
    if (first % 8 != 0) {
        held = (uint32_t)*codes++ >> first % 8;
        available = 8 - (int)(first % 8);
    }
    size_t i = 0;
    /* Eight codes fill `bits` bytes, and are extracted from a single load if all of its bytes are codes too. */
    if (available == 0)
        for (; i + 8 <= count && (count - i) * (size_t)bits >= 64; i += 8, codes += bits) {
            uint64_t eight = sl_load_le64(codes);
            for (size_t k = 0; k < 8; k++, eight >>= bits) store_float(values, i + k, table[eight & mask]);
        }
    for (; i < count; i++) {
        if (available < bits) {
            held |= (uint32_t)*codes++ << available;
            available += 8;
        }
        store_float(values, i, table[held & mask]);
        held >>= bits;
        available -= bits;
    }
}

void sl_restore_words(const uint8_t *codes, size_t first, int bits, size_t word_codes, size_t count, const float *table,
                      void *values) {
    uint32_t mask = (1u << bits) - 1;
    for (size_t i = 0; i < count; i++) {
        size_t k = first + i;
        uint32_t word = load32(codes, k / word_codes);
        store_float(values, i, table[word >> (size_t)bits * (k % word_codes) & mask]);
    }
}

void sl_restore_divide(void *values, size_t count, const sl_scaling *scaling) {
    size_t at = 0, end = scaling->block - scaling->first;
    for (size_t i = 0; i < count; end += scaling->block, at++) {
        float scale = scaling->scales[at];
        for (size_t last = end < count ? end : count; i < last; i++)
            store_float(values, i, float_of(load32(values, i)) / scale);
    }
}

static uint64_t count_set(uint64_t bits) {
    bits -= bits >> 1 & UINT64_C(0x5555555555555555);
    bits = (bits & UINT64_C(0x3333333333333333)) + (bits >> 2 & UINT64_C(0x3333333333333333));
    bits = (bits + (bits >> 4)) & UINT64_C(0x0f0f0f0f0f0f0f0f);
    return bits * UINT64_C(0x0101010101010101) >> 56;
}

uint64_t sl_restore_count_bits(const uint8_t *mask, uint64_t first, uint64_t count) {
    uint64_t found = 0, end = first + count, last = end / 8, at = first / 8;
    if (count == 0) return 0;
    for (; at + 8 <= last; at += 8) found += count_set(sl_load_le64(mask + at));
    for (; at < last; at++) found += count_set(mask[at]);
    if (end % 8 != 0) found += count_set(mask[last] & ((1u << end % 8) - 1));
    return found - count_set(mask[first / 8] & ((1u << first % 8) - 1)); /* subtracts the bits before `first` */
}

size_t sl_restore_find_pair(const uint8_t *bytes, int shift, size_t count, uint8_t code) {
    const uint64_t ones = UINT64_C(0x0101010101010101);
    uint64_t differing = (uint64_t)(code ^ 3) * ones; /* pair ^ differing is 3 if the pair is `code` */
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        uint64_t pair = (sl_load_le64(bytes + i) >> shift & 3 * ones) ^ differing;
        if ((pair & pair >> 1 & ones) != 0) break;
    }
    while (i < count && (bytes[i] >> shift & 3) != code) i++;
    return i;
}

const sl_restore sl_restore_scalar = {sl_nibbles_scalar, sl_plane_scalar,  sl_words_scalar, sl_scale_scalar,
                                      sl_grouped_scalar, sl_expand_scalar, sl_narrow_scalar};
