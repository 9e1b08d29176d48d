/* Quantization: functions without special instructions, and int8 in memory. */
#include "kernels/quant.h"

#include "kernels/tier.h"

uint64_t sl_blocks_finite(int32_t dtype, const void *blocks, uint64_t count) {
    const sl_dtype_info *info = sl_dtype_get(dtype);
    size_t block_bytes = (size_t)info->block_bytes;
    uint64_t first = count;
    if (dtype == SL_MXFP4 || dtype == SL_NVFP4) {
        uint8_t bad = dtype == SL_MXFP4 ? SL_E8M0_NAN : SL_UE4M3_NOT_FINITE;
        for (uint64_t i = 0; i < count; i++)
            if (((const uint8_t *)blocks)[i * block_bytes] == bad) return i;
        return count;
    }
    for (int32_t k = 0; k < info->scale_count; k++) {
        const uint8_t *d = (const uint8_t *)blocks + info->scale_at + 2 * k;
        uint64_t i = 0;
        while (i < first && (d[1] & 0x7c) != 0x7c) { /* an f16 exponent of all ones */
            i++;
            d += block_bytes;
        }
        first = i;
    }
    return first;
}

/* ---- the kernels in memory, for tests and benches ---- */

int32_t sl_absmax(int32_t tier, int32_t from, const void *source, uint64_t count, uint32_t *bits) {
    if (!sl_tier_available(tier)) return SL_E_ARGUMENT;
    sl_quant quant = sl_tier_quant(tier);
    switch (from) {
    case SL_F32: *bits = quant.absmax_f32(source, (size_t)count); return SL_OK;
    case SL_BF16: *bits = quant.absmax_bf16(source, (size_t)count); return SL_OK;
    case SL_F16: *bits = quant.absmax_f16(source, (size_t)count); return SL_OK;
    default: return SL_E_ARGUMENT;
    }
}

int32_t sl_absmax_each(int32_t tier, const void *source, uint32_t *bits, uint64_t count) {
    if (!sl_tier_available(tier)) return SL_E_ARGUMENT;
    sl_tier_quant(tier).absmax_each(source, bits, (size_t)count);
    return SL_OK;
}

int32_t sl_to_int8(int32_t tier, const void *source, int8_t *destination, uint64_t count, const float *factors,
                   int32_t each) {
    if (!sl_tier_available(tier)) return SL_E_ARGUMENT;
    sl_quant quant = sl_tier_quant(tier);
    if (each)
        quant.to_int8_each(source, destination, (size_t)count, factors);
    else
        quant.to_int8(source, destination, (size_t)count, *factors);
    return SL_OK;
}

int32_t sl_quantize_weighted(int32_t tier, int32_t to, const void *source, const float *importance, void *blocks,
                             uint64_t rows, uint64_t columns) {
    sl_weighted_fn quantize = sl_tier_available(tier) ? sl_tier_weighted(tier, to) : NULL;
    if (quantize == NULL) return SL_E_ARGUMENT;
    const sl_dtype_info *info = sl_dtype_get(to);
    if (columns % (uint64_t)info->block != 0) return SL_E_ARGUMENT;
    for (uint64_t row = 0; row < rows; row++)
        quantize((const uint8_t *)source + 4 * row * columns, importance,
                 (uint8_t *)blocks + sl_dtype_bytes(info, row * columns), (size_t)columns);
    return SL_OK;
}
