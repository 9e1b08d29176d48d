/* Dequantization with NEON: a table of 16 numbers takes four registers, with byte by byte lookups. */
#include "kernels/isa.h"
#include "kernels/restore.h"

#ifdef SL_NEON

/* Indices of the four bytes of each number, from the code in the low byte of a lane: 4 * code + (0, 1, 2, 3). */
static uint8x16_t places(uint32x4_t codes) {
    uint32x4_t spread = vmulq_n_u32(codes, 0x04040404u);
    return vreinterpretq_u8_u32(vaddq_u32(spread, vdupq_n_u32(0x03020100u)));
}

static void store4(uint8_t *out, uint16x4_t codes, uint8x16x4_t all) {
    vst1q_u8(out, vqtbl4q_u8(all, places(vmovl_u16(codes))));
}

typedef float32x4_t lanes;
typedef uint8x16x4_t numbers;

#define TARGET
#define NAME(stem) sl_##stem##_neon
#define WIDTH ((size_t)4)
#define load(memory) vreinterpretq_f32_u8(vld1q_u8((const uint8_t *)(memory)))
#define store(memory, value) vst1q_u8((uint8_t *)(memory), vreinterpretq_u8_f32(value))
#define same vdupq_n_f32
#define minus vsubq_f32
#define times vmulq_f32
#define plus vaddq_f32

static inline numbers load_numbers(const float *table) {
    const uint8_t *bytes = (const uint8_t *)table;
    return (numbers){{vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}};
}

static inline void store_numbers(float *table, numbers all) {
    for (size_t i = 0; i < 4; i++) vst1q_u8((uint8_t *)(table + 4 * i), all.val[i]);
}

static inline numbers repeat_four(const float *table) {
    uint8x16_t four = vld1q_u8((const uint8_t *)table);
    return (numbers){{four, four, four, four}};
}

static inline numbers scaled(numbers all, const sl_scaling *scaling, size_t at) {
    for (size_t i = 0; i < 4; i++) {
        lanes some = vreinterpretq_f32_u8(all.val[i]);
        if (scaling->zeros != NULL) some = minus(some, same(scaling->zeros[at]));
        some = times(some, same(scaling->scales[at]));
        if (scaling->biases != NULL) some = plus(some, same(scaling->biases[at]));
        all.val[i] = vreinterpretq_u8_f32(some);
    }
    return all;
}

static void nibbles_run(const uint8_t *codes, size_t first, bool high_first, size_t count, numbers all, uint8_t *out) {
    float table[16];
    store_numbers(table, all);
    if (first != 0 && count > 0) {
        sl_restore_scalar.nibbles(codes++, 1, high_first, 1, table, NULL, out);
        out += 4;
        count--;
    }
    size_t i = 0;
    for (; i + 16 <= count; i += 16, codes += 8) {
        uint8x8_t bytes = vld1_u8(codes), low = vand_u8(bytes, vdup_n_u8(15)), high = vshr_n_u8(bytes, 4);
        uint8x8x2_t in_order = high_first ? vzip_u8(high, low) : vzip_u8(low, high);
        uint16x8_t a = vmovl_u8(in_order.val[0]), b = vmovl_u8(in_order.val[1]);
        store4(out + 4 * i, vget_low_u16(a), all);
        store4(out + 4 * i + 16, vget_high_u16(a), all);
        store4(out + 4 * i + 32, vget_low_u16(b), all);
        store4(out + 4 * i + 48, vget_high_u16(b), all);
    }
    if (i < count) sl_restore_scalar.nibbles(codes, 0, high_first, count - i, table, NULL, out + 4 * i);
}

/* A table of 4 numbers is repeated four times, so that codes of 2 bits never read beyond it. */
static void plane_run(const uint8_t *bytes, int shift, int bits, size_t count, numbers all, uint8_t *out) {
    uint8x8_t mask = vdup_n_u8((uint8_t)((1 << bits) - 1));
    int8x8_t by = vdup_n_s8((int8_t)-shift);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        uint16x8_t codes = vmovl_u8(vand_u8(vshl_u8(vld1_u8(bytes + i), by), mask));
        store4(out + 4 * i, vget_low_u16(codes), all);
        store4(out + 4 * i + 16, vget_high_u16(codes), all);
    }
    if (i == count) return;
    float table[16];
    store_numbers(table, all);
    sl_restore_scalar.plane(bytes + i, shift, bits, count - i, table, NULL, out + 4 * i);
}

static lanes word_lanes(const uint8_t *words, int shift, numbers all) {
    uint32x4_t codes = vshlq_u32(vreinterpretq_u32_u8(vld1q_u8(words)), vdupq_n_s32(-shift));
    return vreinterpretq_f32_u8(vqtbl4q_u8(all, places(vandq_u32(codes, vdupq_n_u32(15)))));
}

static void words_run(const uint8_t *words, int shift, size_t count, numbers all, uint8_t *out) {
    size_t i = 0;
    for (; i + 4 <= count; i += 4) store(out + 4 * i, word_lanes(words + 4 * i, shift, all));
    if (i == count) return;
    float table[16];
    store_numbers(table, all);
    sl_restore_scalar.words(words + 4 * i, shift, count - i, table, NULL, out + 4 * i);
}

/* Returns the values of 4 columns of a row. */
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

/* Transposes 4 rows of 4 columns. */
static inline void square(const sl_grouped *all, size_t row, uint8_t *out, size_t line) {
    float rows[16];
    for (size_t i = 0; i < 4; i++) vst1q_f32(rows + 4 * i, grouped_row(all, row + i));
    float32x4x4_t turned = vld4q_f32(rows);
    for (size_t i = 0; i < 4; i++) store(out + i * line, turned.val[i]);
}

#define nibbles_whole(codes, high_first, count, all, out) nibbles_run(codes, 0, high_first, count, all, out)

#include "kernels/restore_lanes.h"

/* Returns 4 integers, cut to their lowest 16 bits. */
static inline uint16x4_t lowest(const uint8_t *values) {
    return vmovn_u32(vreinterpretq_u32_f32(vaddq_f32(load(values), vdupq_n_f32(SL_TO_INTEGER))));
}

static void sl_narrow_neon(const void *values, size_t count, uint8_t *bytes) {
    const uint8_t *in = values;
    size_t i = 0;
    for (; i + 8 <= count; i += 8, in += 32) vst1_u8(bytes + i, vmovn_u16(vcombine_u16(lowest(in), lowest(in + 16))));
    sl_restore_scalar.narrow(in, count - i, bytes + i);
}

const sl_restore sl_restore_neon = {.nibbles = sl_nibbles_neon,
                                    .plane = sl_plane_neon,
                                    .words = sl_words_neon,
                                    .scale = sl_scale_neon,
                                    .grouped = sl_grouped_neon,
                                    .narrow = sl_narrow_neon};

#endif
