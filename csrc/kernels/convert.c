#include "kernels/convert.h"

#include "platform/cpu.h"

/* What each tier looks through, best first. */
static const struct {
    const char *name;
    const sl_kernel *tables[8]; /* NULL ends */
} TIERS[] = {
    [SL_TIER_SCALAR] = {"scalar", {sl_kernels_scalar, sl_quant_kernels_scalar, sl_dequant_kernels}},
    [SL_TIER_AVX2] = {"avx2", {sl_kernels_avx2, sl_quant_kernels_avx2, sl_kernels_scalar, sl_quant_kernels_scalar, sl_dequant_kernels}},
    [SL_TIER_AVX512] = {"avx512",
                        {sl_kernels_avx512, sl_quant_kernels_avx512, sl_kernels_avx2, sl_quant_kernels_avx2,
                         sl_kernels_scalar, sl_quant_kernels_scalar, sl_dequant_kernels}},
    [SL_TIER_NEON] = {"neon", {sl_kernels_neon, sl_quant_kernels_neon, sl_kernels_scalar, sl_quant_kernels_scalar, sl_dequant_kernels}},
};

_Static_assert(sizeof TIERS / sizeof TIERS[0] == SL_TIER_COUNT, "one row for each SL_TIER_*");

const char *sl_tier_name(int32_t tier) { return tier >= 0 && tier < SL_TIER_COUNT ? TIERS[tier].name : NULL; }

int32_t sl_tier_available(int32_t tier) {
    sl_cpu cpu = sl_cpu_detect();
    switch (tier) {
    case SL_TIER_SCALAR: return 1;
    case SL_TIER_AVX2: return cpu.avx2 && sl_kernels_avx2[0].from >= 0;
    case SL_TIER_AVX512: return cpu.avx512 && sl_kernels_avx512[0].from >= 0;
    case SL_TIER_NEON: return cpu.neon && sl_kernels_neon[0].from >= 0;
    default: return 0;
    }
}

static sl_convert_fn find(int32_t tier, int32_t from, int32_t to) {
    for (const sl_kernel *const *table = TIERS[tier].tables; *table != NULL; table++)
        for (const sl_kernel *kernel = *table; kernel->from >= 0; kernel++)
            if (kernel->from == from && kernel->to == to) return kernel->convert;
    return NULL;
}

void sl_convert_rest(int32_t from, int32_t to, const void *source, void *destination, size_t count) {
    if (count > 0) find(SL_TIER_SCALAR, from, to)(source, destination, count);
}

bool sl_conversion_find(int32_t tier, int32_t from, int32_t to, sl_conversion *out) {
    const sl_dtype_info *source = sl_dtype_get(from), *target = sl_dtype_get(to);
    if (source == NULL || target == NULL || sl_tier_name(tier) == NULL) return false;
    sl_conversion found = {find(tier, from, to), NULL, source, target};
    if (found.first == NULL) {
        found.first = find(tier, from, SL_F32);
        found.second = find(tier, SL_F32, to);
        if (found.first == NULL || found.second == NULL) return false;
    }
    *out = found;
    return true;
}

/* f32 values between the two halves of a conversion: 8 KiB stay in the first-level cache. Whole blocks of every type. */
#define BLOCK ((size_t)2048)

void sl_conversion_run(const sl_conversion *conversion, const void *source, void *destination, size_t count) {
    if (conversion->second == NULL) {
        conversion->first(source, destination, count);
        return;
    }
    float values[BLOCK];
    for (size_t i = 0; i < count; i += BLOCK) {
        size_t some = count - i < BLOCK ? count - i : BLOCK;
        conversion->first((const uint8_t *)source + sl_dtype_bytes(conversion->from, i), values, some);
        conversion->second(values, (uint8_t *)destination + sl_dtype_bytes(conversion->to, i), some);
    }
}

int32_t sl_convertible(int32_t from, int32_t to) {
    sl_conversion conversion;
    return sl_conversion_find(SL_TIER_SCALAR, from, to, &conversion);
}

int32_t sl_convert(int32_t tier, int32_t from, int32_t to, const void *source, void *destination, uint64_t count) {
    sl_conversion conversion;
    if (!sl_tier_available(tier) || !sl_conversion_find(tier, from, to, &conversion)) return SL_E_ARGUMENT;
    sl_conversion_run(&conversion, source, destination, (size_t)count);
    return SL_OK;
}
