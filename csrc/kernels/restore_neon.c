/* Dequantization with NEON: a table of 16 numbers is four registers, which are looked up byte by byte. */
#include "kernels/isa.h"
#include "kernels/restore.h"

#ifdef SL_NEON

/* The four bytes of the number of each code in the low byte of a lane: 4 * code + (0, 1, 2, 3). */
static uint8x16_t places(uint32x4_t codes) {
    uint32x4_t spread = vmulq_n_u32(codes, 0x04040404u);
    return vreinterpretq_u8_u32(vaddq_u32(spread, vdupq_n_u32(0x03020100u)));
}

static void store4(uint8_t *out, uint16x4_t codes, uint8x16x4_t numbers) {
    vst1q_u8(out, vqtbl4q_u8(numbers, places(vmovl_u16(codes))));
}

static uint8x16x4_t table_of(const float *table) {
    const uint8_t *bytes = (const uint8_t *)table;
    return (uint8x16x4_t){{vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}};
}

static float32x4_t load(const uint8_t *memory) { return vreinterpretq_f32_u8(vld1q_u8(memory)); }
static void store(uint8_t *memory, float32x4_t lanes) { vst1q_u8(memory, vreinterpretq_u8_f32(lanes)); }

/* Values [0, count) with one scale; the remainder of a length in scalar C. */
static void scale_run(uint8_t *out, size_t count, const sl_scaling *one) {
    float zero = one->zeros != NULL ? *one->zeros : 0, bias = one->biases != NULL ? *one->biases : 0;
    float32x4_t less = vdupq_n_f32(zero), factor = vdupq_n_f32(*one->scales), more = vdupq_n_f32(bias);
    size_t i = 0;
    for (; i + 4 <= count; i += 4) {
        float32x4_t value = load(out + 4 * i);
        if (one->zeros != NULL) value = vsubq_f32(value, less);
        value = vmulq_f32(value, factor);
        if (one->biases != NULL) value = vaddq_f32(value, more);
        store(out + 4 * i, value);
    }
    if (i < count) sl_restore_scalar.scale(out + 4 * i, count - i, one);
}

/* Each value has a scale of its own. */
static void scale_each(uint8_t *out, size_t count, const sl_scaling *all) {
    size_t i = 0;
    for (; i + 4 <= count; i += 4) {
        float32x4_t value = load(out + 4 * i);
        if (all->zeros != NULL) value = vsubq_f32(value, vld1q_f32(all->zeros + i));
        value = vmulq_f32(value, vld1q_f32(all->scales + i));
        if (all->biases != NULL) value = vaddq_f32(value, vld1q_f32(all->biases + i));
        store(out + 4 * i, value);
    }
    const sl_scaling rest = sl_scaling_at(all, i);
    sl_restore_scalar.scale(out + 4 * i, count - i, &rest);
}

static void sl_scale_neon(void *values, size_t count, const sl_scaling *scaling) {
    uint8_t *out = values;
    if (scaling->block == 1) {
        scale_each(out, count, scaling);
        return;
    }
    size_t at = 0, end = scaling->block - scaling->first;
    for (size_t i = 0; i < count; i = end, end += scaling->block, at++) {
        const sl_scaling one = sl_scaling_at(scaling, at);
        scale_run(out + 4 * i, (end < count ? end : count) - i, &one);
    }
}

/* Numbers of a table. Where as many values share a scale, the table is scaled instead of them. */
#define TABLE ((size_t)16)

/* The table of element `at` of a scaling. */
static void scale_table(const float *table, size_t numbers, const sl_scaling *scaling, size_t at, float *scaled) {
    const sl_scaling one = sl_scaling_at(scaling, at);
    memcpy(scaled, table, numbers * sizeof(float));
    scale_run((uint8_t *)scaled, numbers, &one);
}

static void nibbles_run(const uint8_t *codes, size_t first, bool high_first, size_t count, const float *table,
                        uint8_t *out) {
    if (first != 0 && count > 0) {
        sl_restore_scalar.nibbles(codes++, 1, high_first, 1, table, NULL, out);
        out += 4;
        count--;
    }
    uint8x16x4_t numbers = table_of(table);
    size_t i = 0;
    for (; i + 16 <= count; i += 16, codes += 8) {
        uint8x8_t bytes = vld1_u8(codes), low = vand_u8(bytes, vdup_n_u8(15)), high = vshr_n_u8(bytes, 4);
        uint8x8x2_t in_order = high_first ? vzip_u8(high, low) : vzip_u8(low, high);
        uint16x8_t a = vmovl_u8(in_order.val[0]), b = vmovl_u8(in_order.val[1]);
        store4(out + 4 * i, vget_low_u16(a), numbers);
        store4(out + 4 * i + 16, vget_high_u16(a), numbers);
        store4(out + 4 * i + 32, vget_low_u16(b), numbers);
        store4(out + 4 * i + 48, vget_high_u16(b), numbers);
    }
    if (i < count) sl_restore_scalar.nibbles(codes, 0, high_first, count - i, table, NULL, out + 4 * i);
}

static void sl_nibbles_neon(const uint8_t *codes, size_t first, bool high_first, size_t count, const float *table,
                            const sl_scaling *scaling, void *values) {
    uint8_t *out = values;
    if (scaling == NULL || scaling->block < TABLE) {
        nibbles_run(codes, first, high_first, count, table, out);
        if (scaling != NULL) sl_scale_neon(values, count, scaling);
        return;
    }
    size_t at = 0, end = scaling->block - scaling->first;
    for (size_t i = 0; i < count; i = end, end += scaling->block, at++) {
        float own[TABLE];
        scale_table(table, TABLE, scaling, at, own);
        nibbles_run(codes + (first + i) / 2, (first + i) % 2, high_first, (end < count ? end : count) - i, own,
                    out + 4 * i);
    }
}

/* A table of 4 numbers is that of 16 four times, so that no code of 2 bits reads beyond it. */
static void plane_run(const uint8_t *bytes, int shift, int bits, size_t count, const float *table, uint8_t *out) {
    uint8x16_t four = vld1q_u8((const uint8_t *)table);
    uint8x16x4_t numbers = bits == 4 ? table_of(table) : (uint8x16x4_t){{four, four, four, four}};
    uint8x8_t mask = vdup_n_u8((uint8_t)((1 << bits) - 1));
    int8x8_t by = vdup_n_s8((int8_t)-shift);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        uint16x8_t codes = vmovl_u8(vand_u8(vshl_u8(vld1_u8(bytes + i), by), mask));
        store4(out + 4 * i, vget_low_u16(codes), numbers);
        store4(out + 4 * i + 16, vget_high_u16(codes), numbers);
    }
    sl_restore_scalar.plane(bytes + i, shift, bits, count - i, table, NULL, out + 4 * i);
}

static void sl_plane_neon(const uint8_t *bytes, int shift, int bits, size_t count, const float *table,
                          const sl_scaling *scaling, void *values) {
    uint8_t *out = values;
    if (scaling == NULL || scaling->block < TABLE) {
        plane_run(bytes, shift, bits, count, table, out);
        if (scaling != NULL) sl_scale_neon(values, count, scaling);
        return;
    }
    size_t at = 0, end = scaling->block - scaling->first;
    for (size_t i = 0; i < count; i = end, end += scaling->block, at++) {
        float own[TABLE];
        scale_table(table, (size_t)1 << bits, scaling, at, own);
        plane_run(bytes + i, shift, bits, (end < count ? end : count) - i, own, out + 4 * i);
    }
}

static void words_run(const uint8_t *words, int shift, size_t count, const float *table, uint8_t *out) {
    uint8x16x4_t numbers = table_of(table);
    uint32x4_t mask = vdupq_n_u32(15);
    int32x4_t by = vdupq_n_s32(-shift);
    size_t i = 0;
    for (; i + 4 <= count; i += 4) {
        uint32x4_t codes = vandq_u32(vshlq_u32(vreinterpretq_u32_u8(vld1q_u8(words + 4 * i)), by), mask);
        vst1q_u8(out + 4 * i, vqtbl4q_u8(numbers, places(codes)));
    }
    sl_restore_scalar.words(words + 4 * i, shift, count - i, table, NULL, out + 4 * i);
}

static void sl_words_neon(const uint8_t *words, int shift, size_t count, const float *table, const sl_scaling *scaling,
                          void *values) {
    uint8_t *out = values;
    if (scaling == NULL || scaling->block < TABLE) {
        words_run(words, shift, count, table, out);
        if (scaling != NULL) sl_scale_neon(values, count, scaling);
        return;
    }
    size_t at = 0, end = scaling->block - scaling->first;
    for (size_t i = 0; i < count; i = end, end += scaling->block, at++) {
        float own[TABLE];
        scale_table(table, TABLE, scaling, at, own);
        words_run(words + 4 * i, shift, (end < count ? end : count) - i, own, out + 4 * i);
    }
}

/* The values of 4 columns of a row. */
static inline float32x4_t grouped_row(const sl_grouped *all, size_t row) {
    size_t bits = (size_t)all->bits, shift = row * bits % 32, at = all->groups[row] * all->step;
    const uint8_t *words = all->words + row * bits / 32 * all->pitch;
    uint32x4_t codes = vshlq_u32(vreinterpretq_u32_u8(vld1q_u8(words)), vdupq_n_s32(-(int32_t)shift));
    if (shift + bits > 32) {
        uint32x4_t more = vreinterpretq_u32_u8(vld1q_u8(words + all->pitch));
        codes = vorrq_u32(codes, vshlq_u32(more, vdupq_n_s32((int32_t)(32 - shift))));
    }
    codes = vandq_u32(codes, vdupq_n_u32((1u << bits) - 1));
    float32x4_t value = vaddq_f32(vdupq_n_f32(all->first), vcvtq_f32_u32(codes));
    if (all->zeros != NULL) value = vsubq_f32(value, vld1q_f32(all->zeros + at));
    value = vmulq_f32(value, vld1q_f32(all->scales + at));
    if (all->biases != NULL) value = vaddq_f32(value, vld1q_f32(all->biases + at));
    return value;
}

static void sl_grouped_neon(const sl_grouped *codes, size_t begin, size_t end, size_t columns, void *values,
                            size_t line) {
    size_t c = 0;
    for (; c + 4 <= columns; c += 4) {
        const sl_grouped some = sl_grouped_at(codes, c);
        uint8_t *out = (uint8_t *)values + c * line;
        size_t row = begin;
        for (; row + 4 <= end; row += 4, out += 16) {
            float rows[16];
            for (size_t i = 0; i < 4; i++) vst1q_f32(rows + 4 * i, grouped_row(&some, row + i));
            float32x4x4_t turned = vld4q_f32(rows);
            for (size_t i = 0; i < 4; i++) store(out + i * line, turned.val[i]);
        }
        sl_restore_scalar.grouped(&some, row, end, 4, out, line);
    }
    if (c == columns) return;
    const sl_grouped rest = sl_grouped_at(codes, c);
    sl_restore_scalar.grouped(&rest, begin, end, columns - c, (uint8_t *)values + c * line, line);
}

const sl_restore sl_restore_neon = {.nibbles = sl_nibbles_neon,
                                    .plane = sl_plane_neon,
                                    .words = sl_words_neon,
                                    .scale = sl_scale_neon,
                                    .grouped = sl_grouped_neon};

#endif
