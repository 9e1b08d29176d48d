/* Conversions element by element: the reference for all tiers. */
#include "kernels/convert_lanes.h"
#include "kernels/scalar.h"

/* ---- 16-bit floats to f32 ---- */

static void sl_bf16_to_f32_scalar(const void *source, void *destination, size_t count) {
    for (size_t i = 0; i < count; i++) store32(destination, i, bf16_to_f32(load16(source, i)));
}

static void sl_f16_to_f32_scalar(const void *source, void *destination, size_t count) {
    for (size_t i = 0; i < count; i++) store32(destination, i, f16_to_f32(load16(source, i)));
}

/* ---- small floats ---- */

static uint32_t decode(const small_float *format, uint32_t code) {
    int mantissa_bits = format->mantissa_bits, exponent_bits = format->exponent_bits;
    uint32_t sign_bit = 1u << (exponent_bits + mantissa_bits), ones = sign_bit - 1;
    uint32_t sign = (code & sign_bit) != 0 ? 0x80000000 : 0, rest = code & ones;
    uint32_t exponent = rest >> mantissa_bits, mantissa = rest & ((1u << mantissa_bits) - 1);
    if (format->special == MINUS_ZERO_IS_NAN && code == sign_bit)
        return 0xffc00000; /* with the sign bit, as in ml_dtypes */
    if (format->special == ONE_NAN && rest == ones) return sign | 0x7fc00000;
    if (format->special == IEEE && exponent == (1u << exponent_bits) - 1)
        return sign | (mantissa == 0 ? 0x7f800000 : 0x7fc00000);
    if (exponent != 0)
        return sign | (uint32_t)((int)exponent - format->bias + 127) << 23 | mantissa << (23 - mantissa_bits);
    uint32_t bits;
    float value = (float)mantissa * float_of(power_of_two(1 - format->bias - mantissa_bits));
    memcpy(&bits, &value, sizeof bits);
    return sign | bits;
}

/* Converts bytes through a table of 256 results: a load per element. Filling the table costs as much as 256 elements.
 */
static void convert_bytes(const small_float *format, const void *source, void *destination, size_t count) {
    uint32_t table[256];
    const uint8_t *bytes = source;
    for (uint32_t code = 0; code < 256; code++) table[code] = decode(format, code);
    for (size_t i = 0; i < count; i++) store32(destination, i, table[bytes[i]]);
}

static void sl_f8_e4m3_to_f32_scalar(const void *source, void *destination, size_t count) {
    convert_bytes(&E4M3FN, source, destination, count);
}

static void sl_f8_e5m2_to_f32_scalar(const void *source, void *destination, size_t count) {
    convert_bytes(&E5M2, source, destination, count);
}

static void sl_f8_e4m3fnuz_to_f32_scalar(const void *source, void *destination, size_t count) {
    convert_bytes(&E4M3FNUZ, source, destination, count);
}

static void sl_f8_e5m2fnuz_to_f32_scalar(const void *source, void *destination, size_t count) {
    convert_bytes(&E5M2FNUZ, source, destination, count);
}

/* 2^(code - 127); 255 is NaN, and only code 0 gives a subnormal. */
static void sl_f8_e8m0_to_f32_scalar(const void *source, void *destination, size_t count) {
    const uint8_t *codes = source;
    for (size_t i = 0; i < count; i++)
        store32(destination, i, codes[i] == 255 ? 0x7fc00000 : codes[i] == 0 ? 0x00400000 : (uint32_t)codes[i] << 23);
}

/* Converts elements of `bits` bits; the first is in the low bits of the first byte. */
static void convert_packed(const small_float *format, uint32_t bits, const void *source, void *destination,
                           size_t count) {
    uint32_t table[64], mask = (1u << bits) - 1, held = 0, have = 0;
    const uint8_t *bytes = source;
    for (uint32_t code = 0; code <= mask; code++) table[code] = decode(format, code);
    for (size_t i = 0; i < count; i++) {
        if (have < bits) {
            held |= (uint32_t)*bytes++ << have;
            have += 8;
        }
        store32(destination, i, table[held & mask]);
        held >>= bits;
        have -= bits;
    }
}

static void sl_f4_to_f32_scalar(const void *source, void *destination, size_t count) {
    convert_packed(&E2M1, 4, source, destination, count);
}

static void sl_f6_e2m3_to_f32_scalar(const void *source, void *destination, size_t count) {
    convert_packed(&E2M3, 6, source, destination, count);
}

static void sl_f6_e3m2_to_f32_scalar(const void *source, void *destination, size_t count) {
    convert_packed(&E3M2, 6, source, destination, count);
}

/* ---- integers to f32 ---- */

static void sl_i8_to_f32_scalar(const void *source, void *destination, size_t count) {
    for (size_t i = 0; i < count; i++) store_float(destination, i, (float)((const int8_t *)source)[i]);
}

static void sl_u8_to_f32_scalar(const void *source, void *destination, size_t count) {
    for (size_t i = 0; i < count; i++) store_float(destination, i, (float)((const uint8_t *)source)[i]);
}

static void sl_bool_to_f32_scalar(const void *source, void *destination, size_t count) {
    for (size_t i = 0; i < count; i++) store_float(destination, i, ((const uint8_t *)source)[i] != 0 ? 1.0f : 0.0f);
}

static void sl_i16_to_f32_scalar(const void *source, void *destination, size_t count) {
    for (size_t i = 0; i < count; i++) store_float(destination, i, (float)(int16_t)load16(source, i));
}

static void sl_u16_to_f32_scalar(const void *source, void *destination, size_t count) {
    for (size_t i = 0; i < count; i++) store_float(destination, i, (float)load16(source, i));
}

static void sl_i32_to_f32_scalar(const void *source, void *destination, size_t count) {
    for (size_t i = 0; i < count; i++) store_float(destination, i, (float)(int32_t)load32(source, i));
}

static void sl_u32_to_f32_scalar(const void *source, void *destination, size_t count) {
    for (size_t i = 0; i < count; i++) store_float(destination, i, (float)load32(source, i));
}

static void sl_i64_to_f32_scalar(const void *source, void *destination, size_t count) {
    for (size_t i = 0; i < count; i++) store_float(destination, i, (float)(int64_t)load64(source, i));
}

static void sl_u64_to_f32_scalar(const void *source, void *destination, size_t count) {
    for (size_t i = 0; i < count; i++) store_float(destination, i, (float)load64(source, i));
}

/* ---- narrowing ---- */

/* A NaN becomes the canonical NaN with its sign, as in ml_dtypes. */
static uint16_t f32_to_bf16(uint32_t bits) {
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16 & 0x8000) | 0x7fc0);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void sl_f32_to_f16_scalar(const void *source, void *destination, size_t count) {
    for (size_t i = 0; i < count; i++) store16(destination, i, f32_to_f16(load32(source, i)));
}

static void sl_f32_to_bf16_scalar(const void *source, void *destination, size_t count) {
    for (size_t i = 0; i < count; i++) store16(destination, i, f32_to_bf16(load32(source, i)));
}

/* Beyond the largest finite number e4m3fn, which has no infinity, gives NaN, and e5m2 gives infinity. */
static void sl_f32_to_f8_e4m3_scalar(const void *source, void *destination, size_t count) {
    uint8_t *codes = destination;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = load32(source, i), sign = bits >> 24 & 0x80;
        uint64_t code = narrow(bits & 0x7fffffff, 23, 127, 3, 7);
        codes[i] = (uint8_t)(sign | (code > 0x7f ? 0x7f : code));
    }
}

static void sl_f32_to_f8_e5m2_scalar(const void *source, void *destination, size_t count) {
    uint8_t *codes = destination;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = load32(source, i), sign = bits >> 24 & 0x80;
        uint64_t code = narrow(bits & 0x7fffffff, 23, 127, 2, 15);
        if ((bits & 0x7fffffff) > 0x7f800000)
            code = 0x7e;
        else if (code > 0x7c)
            code = 0x7c;
        codes[i] = (uint8_t)(sign | code);
    }
}

/* ---- f64 and wide integers ---- */

static void sl_f64_to_f32_scalar(const void *source, void *destination, size_t count) {
    for (size_t i = 0; i < count; i++) store_float(destination, i, (float)double_of(load64(source, i)));
}

/* Rounds to SL_F32_ODD: an inexact result is the odd one of the two nearest f32. It lies on the same side of every tie
 * of a narrower type as `value`, so rounding it again equals a single rounding of `value`. The largest f32 is odd, so
 * overflow gives this number, not infinity. */
static void store_odd(void *destination, size_t i, double value) {
    float nearest = (float)value;
    uint32_t bits;
    memcpy(&bits, &nearest, sizeof bits);
    double back = nearest;
    uint32_t above = back > value, below = back < value, away = (above & (value > 0.0)) | (below & (value < 0.0));
    store32(destination, i, (bits - away) | above | below);
}

/* Rounds an integer too large for f64 to odd at bit 11, which leaves 53 bits. */
static uint64_t odd_at_11(uint64_t value) {
    return (value & ~UINT64_C(0x7ff)) | (uint64_t)((value & 0x7ff) != 0) << 11;
}

static double odd_of_u64(uint64_t value) { return (double)(value >> 53 == 0 ? value : odd_at_11(value)); }

static double odd_of_i64(int64_t value) {
    uint64_t bits = (uint64_t)value;
    return (double)(int64_t)((bits + (UINT64_C(1) << 53)) >> 54 == 0 ? bits : odd_at_11(bits));
}

#define TO_ODD(name, value)                                                                          \
    static void sl_##name##_to_f32_odd_scalar(const void *source, void *destination, size_t count) { \
        for (size_t i = 0; i < count; i++) store_odd(destination, i, value);                         \
    }

TO_ODD(f64, double_of(load64(source, i)))
TO_ODD(i32, (double)(int32_t)load32(source, i))
TO_ODD(u32, (double)load32(source, i))
TO_ODD(i64, odd_of_i64((int64_t)load64(source, i)))
TO_ODD(u64, odd_of_u64(load64(source, i)))

static void sl_f32_to_f64_scalar(const void *source, void *destination, size_t count) {
    for (size_t i = 0; i < count; i++) store_double(destination, i, (double)float_of(load32(source, i)));
}

static void sl_f16_to_f64_scalar(const void *source, void *destination, size_t count) {
    for (size_t i = 0; i < count; i++) store_double(destination, i, (double)float_of(f16_to_f32(load16(source, i))));
}

static void sl_bf16_to_f64_scalar(const void *source, void *destination, size_t count) {
    for (size_t i = 0; i < count; i++) store_double(destination, i, (double)float_of(bf16_to_f32(load16(source, i))));
}

const sl_kernel sl_kernels_scalar[] = {
    {SL_BF16, SL_F32, sl_bf16_to_f32_scalar},
    {SL_F16, SL_F32, sl_f16_to_f32_scalar},
    {SL_F8_E4M3, SL_F32, sl_f8_e4m3_to_f32_scalar},
    {SL_F8_E5M2, SL_F32, sl_f8_e5m2_to_f32_scalar},
    {SL_F8_E4M3FNUZ, SL_F32, sl_f8_e4m3fnuz_to_f32_scalar},
    {SL_F8_E5M2FNUZ, SL_F32, sl_f8_e5m2fnuz_to_f32_scalar},
    {SL_F8_E8M0, SL_F32, sl_f8_e8m0_to_f32_scalar},
    {SL_F4, SL_F32, sl_f4_to_f32_scalar},
    {SL_F6_E2M3, SL_F32, sl_f6_e2m3_to_f32_scalar},
    {SL_F6_E3M2, SL_F32, sl_f6_e3m2_to_f32_scalar},
    {SL_BOOL, SL_F32, sl_bool_to_f32_scalar},
    {SL_U8, SL_F32, sl_u8_to_f32_scalar},
    {SL_I8, SL_F32, sl_i8_to_f32_scalar},
    {SL_U16, SL_F32, sl_u16_to_f32_scalar},
    {SL_I16, SL_F32, sl_i16_to_f32_scalar},
    {SL_U32, SL_F32, sl_u32_to_f32_scalar},
    {SL_I32, SL_F32, sl_i32_to_f32_scalar},
    {SL_U64, SL_F32, sl_u64_to_f32_scalar},
    {SL_I64, SL_F32, sl_i64_to_f32_scalar},
    {SL_F32, SL_BF16, sl_f32_to_bf16_scalar},
    {SL_F32, SL_F16, sl_f32_to_f16_scalar},
    {SL_F32, SL_F8_E4M3, sl_f32_to_f8_e4m3_scalar},
    {SL_F32, SL_F8_E5M2, sl_f32_to_f8_e5m2_scalar},
    {SL_F64, SL_F32, sl_f64_to_f32_scalar},
    {SL_F64, SL_F32_ODD, sl_f64_to_f32_odd_scalar},
    {SL_I32, SL_F32_ODD, sl_i32_to_f32_odd_scalar},
    {SL_U32, SL_F32_ODD, sl_u32_to_f32_odd_scalar},
    {SL_I64, SL_F32_ODD, sl_i64_to_f32_odd_scalar},
    {SL_U64, SL_F32_ODD, sl_u64_to_f32_odd_scalar},
    {SL_F32, SL_F64, sl_f32_to_f64_scalar},
    {SL_F16, SL_F64, sl_f16_to_f64_scalar},
    {SL_BF16, SL_F64, sl_bf16_to_f64_scalar},
    {-1, -1, NULL},
};

void sl_convert_rest(int32_t from, int32_t to, const void *source, void *destination, size_t count) {
    static const sl_kernel *const TABLES[] = {sl_kernels_scalar, sl_quant_kernels_scalar};
    for (size_t k = 0; k < sizeof TABLES / sizeof *TABLES && count > 0; k++)
        for (const sl_kernel *kernel = TABLES[k]; kernel->from >= 0; kernel++)
            if (kernel->from == from && kernel->to == to) {
                kernel->convert(source, destination, count);
                return;
            }
}
