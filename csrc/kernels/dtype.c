/* The table of dtypes. */
#include "kernels/dtype.h"

/* Formats of the 4-, 6- and 8-bit floats: OCP Microscaling Formats (MX) v1.0, arXiv:2209.05433 (F8_E4M3, F8_E5M2)
 * and arXiv:2206.02915 (FNUZ). Block types: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h */
static const sl_dtype_info TABLE[SL_DTYPE_LIMIT] = {
#define ELEMENT(code, name, kind, bits, swap, ggml) {code, name, SL_KIND_##kind, bits, 1, (bits) / 8, swap, ggml, 0, 0}
#define PACKED(code, name, bits, block) {code, name, SL_KIND_FLOAT, bits, block, (bits) * (block) / 8, 1, -1, 0, 0}
#define BLOCK(dtype, code, name, block, block_bytes, scale_at, scale_count) \
    [dtype] = {code, name, SL_KIND_BLOCKS, 0, block, block_bytes, 1, (dtype) - SL_GGML, scale_at, scale_count}
    [SL_BOOL] = ELEMENT("BOOL", "bool", BOOL, 8, 1, -1),
    [SL_F4] = PACKED("F4", "float4_e2m1fn", 4, 2),
    [SL_F6_E2M3] = PACKED("F6_E2M3", "float6_e2m3fn", 6, 4),
    [SL_F6_E3M2] = PACKED("F6_E3M2", "float6_e3m2fn", 6, 4),
    [SL_U8] = ELEMENT("U8", "uint8", INT, 8, 1, -1),
    [SL_I8] = ELEMENT("I8", "int8", INT, 8, 1, 24),
    [SL_F8_E5M2] = ELEMENT("F8_E5M2", "float8_e5m2", FLOAT, 8, 1, -1),
    [SL_F8_E4M3] = ELEMENT("F8_E4M3", "float8_e4m3fn", FLOAT, 8, 1, -1),
    [SL_F8_E8M0] = ELEMENT("F8_E8M0", "float8_e8m0fnu", FLOAT, 8, 1, -1),
    [SL_F8_E4M3FNUZ] = ELEMENT("F8_E4M3FNUZ", "float8_e4m3fnuz", FLOAT, 8, 1, -1),
    [SL_F8_E5M2FNUZ] = ELEMENT("F8_E5M2FNUZ", "float8_e5m2fnuz", FLOAT, 8, 1, -1),
    [SL_I16] = ELEMENT("I16", "int16", INT, 16, 2, 25),
    [SL_U16] = ELEMENT("U16", "uint16", INT, 16, 2, -1),
    [SL_F16] = ELEMENT("F16", "float16", FLOAT, 16, 2, 1),
    [SL_BF16] = ELEMENT("BF16", "bfloat16", FLOAT, 16, 2, 30),
    [SL_I32] = ELEMENT("I32", "int32", INT, 32, 4, 26),
    [SL_U32] = ELEMENT("U32", "uint32", INT, 32, 4, -1),
    [SL_F32] = ELEMENT("F32", "float32", FLOAT, 32, 4, 0),
    [SL_C64] = ELEMENT("C64", "complex64", COMPLEX, 64, 4, -1),
    [SL_F64] = ELEMENT("F64", "float64", FLOAT, 64, 8, 28),
    [SL_I64] = ELEMENT("I64", "int64", INT, 64, 8, 27),
    [SL_U64] = ELEMENT("U64", "uint64", INT, 64, 8, -1),
    [SL_C128] = ELEMENT("C128", "complex128", COMPLEX, 128, 8, -1),
    [SL_Q4_0_ABSMAX] = {"Q4_0", "q4_0", SL_KIND_BLOCKS, 0, 32, 18, 1, -1, 0, 1}, /* stored as SL_Q4_0 */
    [SL_F32_ODD] = ELEMENT("F32", "float32", FLOAT, 32, 4, -1),                  /* stored as SL_F32 */
    [SL_UNKNOWN] = {"UNKNOWN", "unknown", SL_KIND_BLOCKS, 0, 1, 1, 1, -1, 0, 0},
    [SL_I2_S] = {"I2_S", "i2_s", SL_KIND_BLOCKS, 0, 128, 32, 1, -1, 0, 0},
    BLOCK(SL_Q4_0, "Q4_0", "q4_0", 32, 18, 0, 1),
    BLOCK(SL_Q4_1, "Q4_1", "q4_1", 32, 20, 0, 2),
    BLOCK(SL_Q5_0, "Q5_0", "q5_0", 32, 22, 0, 1),
    BLOCK(SL_Q5_1, "Q5_1", "q5_1", 32, 24, 0, 2),
    BLOCK(SL_Q8_0, "Q8_0", "q8_0", 32, 34, 0, 1),
    /* The size in gguf-py. ggml itself now uses 36 bytes, but never stores this type: it is for intermediate products.
     */
    BLOCK(SL_Q8_1, "Q8_1", "q8_1", 32, 40, 0, 0),
    BLOCK(SL_Q2_K, "Q2_K", "q2_k", 256, 84, 80, 2),
    BLOCK(SL_Q3_K, "Q3_K", "q3_k", 256, 110, 108, 1),
    BLOCK(SL_Q4_K, "Q4_K", "q4_k", 256, 144, 0, 2),
    BLOCK(SL_Q5_K, "Q5_K", "q5_k", 256, 176, 0, 2),
    BLOCK(SL_Q6_K, "Q6_K", "q6_k", 256, 210, 208, 1),
    BLOCK(SL_Q8_K, "Q8_K", "q8_k", 256, 292, 0, 0),
    BLOCK(SL_IQ2_XXS, "IQ2_XXS", "iq2_xxs", 256, 66, 0, 1),
    BLOCK(SL_IQ2_XS, "IQ2_XS", "iq2_xs", 256, 74, 0, 1),
    BLOCK(SL_IQ3_XXS, "IQ3_XXS", "iq3_xxs", 256, 98, 0, 1),
    BLOCK(SL_IQ1_S, "IQ1_S", "iq1_s", 256, 50, 0, 1),
    BLOCK(SL_IQ4_NL, "IQ4_NL", "iq4_nl", 32, 18, 0, 1),
    BLOCK(SL_IQ3_S, "IQ3_S", "iq3_s", 256, 110, 0, 1),
    BLOCK(SL_IQ2_S, "IQ2_S", "iq2_s", 256, 82, 0, 1),
    BLOCK(SL_IQ4_XS, "IQ4_XS", "iq4_xs", 256, 136, 0, 1),
    BLOCK(SL_IQ1_M, "IQ1_M", "iq1_m", 256, 56, 0, 0),
    BLOCK(SL_TQ1_0, "TQ1_0", "tq1_0", 256, 54, 52, 1),
    BLOCK(SL_TQ2_0, "TQ2_0", "tq2_0", 256, 66, 64, 1),
    BLOCK(SL_MXFP4, "MXFP4", "mxfp4", 32, 17, 0, 0),
    BLOCK(SL_NVFP4, "NVFP4", "nvfp4", 64, 36, 0, 0),
    BLOCK(SL_Q1_0, "Q1_0", "q1_0", 128, 18, 0, 1),
    BLOCK(SL_Q2_0, "Q2_0", "q2_0", 64, 18, 0, 1),
#undef ELEMENT
#undef PACKED
#undef BLOCK
};

const sl_dtype_info *sl_dtype_get(int32_t dtype) {
    return dtype >= 0 && dtype < SL_DTYPE_LIMIT && TABLE[dtype].code != NULL ? &TABLE[dtype] : NULL;
}

static bool is_code(int32_t dtype, const char *code, size_t size) {
    const char *expected = TABLE[dtype].code;
    size_t i = 0;
    while (i < size && expected[i] != '\0' && expected[i] == code[i]) i++;
    return i == size && expected[i] == '\0';
}

int32_t sl_dtype_find(const char *code, size_t size, int32_t guess) {
    if (is_code(guess, code, size)) return guess;
    for (int32_t i = 0; i < SL_SAFETENSORS_COUNT; i++)
        if (is_code(i, code, size)) return i;
    return -1;
}

int32_t sl_dtype_of_ggml(uint32_t type) {
    uint32_t blocks = SL_DTYPE_LIMIT - SL_GGML;
    if (type < blocks && sl_dtype_get(SL_GGML + (int32_t)type) != NULL) return SL_GGML + (int32_t)type;
    for (int32_t i = 0; i < SL_DTYPE_COUNT; i++)
        if (TABLE[i].ggml >= 0 && (uint32_t)TABLE[i].ggml == type) return i;
    return -1;
}

bool sl_dtype_size(int32_t dtype, const uint64_t *dims, uint64_t rank, uint64_t *size, bool *whole_blocks) {
    const sl_dtype_info *info = &TABLE[dtype];
    uint64_t elements = 1, bits, last = rank > 0 ? dims[rank - 1] : 1;
    *whole_blocks = true;
    for (uint64_t i = 0; i < rank; i++)
        if (!sl_mul_u64(elements, dims[i], &elements)) return false;
    if (info->bits > 0) {
        if (!sl_mul_u64(elements, (uint64_t)info->bits, &bits)) return false;
        *whole_blocks = bits % 8 == 0;
        *size = bits / 8;
        return *whole_blocks;
    }
    *whole_blocks = last % (uint64_t)info->block == 0;
    return *whole_blocks && sl_mul_u64(elements / (uint64_t)info->block, (uint64_t)info->block_bytes, size);
}
