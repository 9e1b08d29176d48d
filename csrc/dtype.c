#include "dtype.h"

/* Formats of the 4-, 6- and 8-bit floats: OCP Microscaling Formats (MX) v1.0, arXiv:2209.05433 (F8_E4M3, F8_E5M2)
 * and arXiv:2206.02915 (FNUZ). In the order of the SL_* indices. */
static const struct {
    sl_dtype_info info;
    size_t code_size;
} TABLE[] = {
#define ROW(code, name, bits) {{code, name, bits}, sizeof(code) - 1}
    ROW("BOOL", "bool", 8),
    ROW("F4", "float4_e2m1fn", 4),
    ROW("F6_E2M3", "float6_e2m3fn", 6),
    ROW("F6_E3M2", "float6_e3m2fn", 6),
    ROW("U8", "uint8", 8),
    ROW("I8", "int8", 8),
    ROW("F8_E5M2", "float8_e5m2", 8),
    ROW("F8_E4M3", "float8_e4m3fn", 8),
    ROW("F8_E8M0", "float8_e8m0fnu", 8),
    ROW("F8_E4M3FNUZ", "float8_e4m3fnuz", 8),
    ROW("F8_E5M2FNUZ", "float8_e5m2fnuz", 8),
    ROW("I16", "int16", 16),
    ROW("U16", "uint16", 16),
    ROW("F16", "float16", 16),
    ROW("BF16", "bfloat16", 16),
    ROW("I32", "int32", 32),
    ROW("U32", "uint32", 32),
    ROW("F32", "float32", 32),
    ROW("C64", "complex64", 64),
    ROW("F64", "float64", 64),
    ROW("I64", "int64", 64),
    ROW("U64", "uint64", 64),
#undef ROW
};

_Static_assert(sizeof TABLE / sizeof TABLE[0] == SL_DTYPE_COUNT, "one row for each SL_* index");

const sl_dtype_info *sl_dtype_get(int32_t dtype) {
    return dtype >= 0 && dtype < SL_DTYPE_COUNT ? &TABLE[dtype].info : NULL;
}

static bool is_code(int32_t dtype, const char *code, size_t size) {
    return TABLE[dtype].code_size == size && memcmp(TABLE[dtype].info.code, code, size) == 0;
}

int32_t sl_dtype_find(const char *code, size_t size, int32_t guess) {
    if (is_code(guess, code, size)) return guess;
    for (int32_t i = 0; i < SL_DTYPE_COUNT; i++)
        if (is_code(i, code, size)) return i;
    return -1;
}

bool sl_dtype_size(int32_t dtype, const uint64_t *dims, uint64_t rank, uint64_t *size, bool *whole_bytes) {
    uint64_t bits = 1;
    *whole_bytes = true;
    for (uint64_t i = 0; i < rank; i++)
        if (!sl_mul_u64(bits, dims[i], &bits)) return false;
    if (!sl_mul_u64(bits, (uint64_t)TABLE[dtype].info.bits, &bits)) return false;
    *whole_bytes = bits % 8 == 0;
    *size = bits / 8;
    return *whole_bytes;
}
