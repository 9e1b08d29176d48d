/* Instruction sets, a row for each. Only this file lets a tier fall back to another. */
#include "kernels/tier.h"

#include "kernels/isa.h"
#include "platform/cpu.h"

static bool always(void) { return true; }

#ifdef SL_X86
static bool has_avx2(void) { return sl_cpu_detect().avx2; }
static bool has_avx512(void) { return sl_cpu_detect().avx512; }
#endif

#ifdef SL_NEON
static bool has_neon(void) { return sl_cpu_detect().neon; }
#endif

#define NOTHING_BELOW -1

static const struct {
    const char *name;
    bool (*available)(void);     /* on this processor; NULL if the compiler does not support the tier */
    int32_t below;               /* the tier to fall back to */
    const sl_kernel *convert[5]; /* tables, NULL-terminated */
    const sl_quant *quant;       /* may hold NULLs, like `restore` and `encode` */
    const sl_weighted_kernel *weighted;
    const sl_restore *restore;
    const sl_lanes_kernel *stats;
    sl_difference_fn difference;
    const sl_encode_steps *encode;
    sl_merge_fn merge;
} TIERS[SL_TIER_COUNT] = {
    [SL_TIER_SCALAR] = {"scalar",
                        always,
                        NOTHING_BELOW,
                        {sl_kernels_scalar, sl_quant_kernels_scalar, sl_quant_k_kernels_scalar,
                         sl_dequant_kernels_scalar},
                        &sl_quant_scalar,
                        sl_weighted_scalar,
                        &sl_restore_scalar,
                        sl_lanes_scalar,
                        sl_difference_scalar,
                        &sl_encode_scalar,
                        sl_merge_scalar},
#ifdef SL_X86
    [SL_TIER_AVX2] = {"avx2",
                      has_avx2,
                      SL_TIER_SCALAR,
                      {sl_kernels_avx2, sl_dequant_kernels_avx2, sl_quant_kernels_avx2, sl_quant_k_kernels_avx2},
                      &sl_quant_avx2,
                      sl_weighted_avx2,
                      &sl_restore_avx2,
                      sl_lanes_avx2,
                      sl_difference_avx2,
                      &sl_encode_avx2,
                      sl_merge_avx2},
    [SL_TIER_AVX512] = {"avx512",
                        has_avx512,
                        SL_TIER_AVX2,
                        {sl_kernels_avx512, sl_dequant_kernels_avx512, sl_quant_kernels_avx512,
                         sl_quant_k_kernels_avx512},
                        &sl_quant_avx512,
                        sl_weighted_avx512,
                        &sl_restore_avx512,
                        sl_lanes_avx512,
                        sl_difference_avx512,
                        &sl_encode_avx512,
                        sl_merge_avx512},
#else
    [SL_TIER_AVX2] = {.name = "avx2", .below = SL_TIER_SCALAR},
    [SL_TIER_AVX512] = {.name = "avx512", .below = SL_TIER_AVX2},
#endif
#ifdef SL_NEON
    [SL_TIER_NEON] = {"neon",
                      has_neon,
                      SL_TIER_SCALAR,
                      {sl_kernels_neon, sl_dequant_kernels_neon, sl_quant_kernels_neon, sl_quant_k_kernels_neon},
                      &sl_quant_neon,
                      sl_weighted_neon,
                      &sl_restore_neon,
                      sl_lanes_neon,
                      sl_difference_neon,
                      &sl_encode_neon,
                      sl_merge_neon},
#else
    [SL_TIER_NEON] = {.name = "neon", .below = SL_TIER_SCALAR},
#endif
};

/* Visits the tier and all tiers below it, best first. */
#define FOR_EACH(t, tier) for (int32_t t = (tier); t != NOTHING_BELOW; t = TIERS[t].below)

const char *sl_tier_name(int32_t tier) { return tier >= 0 && tier < SL_TIER_COUNT ? TIERS[tier].name : NULL; }

int32_t sl_tier_available(int32_t tier) {
    return sl_tier_name(tier) != NULL && TIERS[tier].available != NULL && TIERS[tier].available();
}

sl_convert_fn sl_tier_convert(int32_t tier, int32_t from, int32_t to) {
    FOR_EACH(t, tier) {
        for (const sl_kernel *const *table = TIERS[t].convert; *table != NULL; table++)
            for (const sl_kernel *kernel = *table; kernel->from >= 0; kernel++)
                if (kernel->from == from && kernel->to == to) return kernel->convert;
    }
    return NULL;
}

sl_quant sl_tier_quant(int32_t tier) {
    sl_quant found = {0};
    FOR_EACH(t, tier) {
        const sl_quant *own = TIERS[t].quant;
        if (own == NULL) continue;
#define TAKE(kernel) found.kernel = found.kernel != NULL ? found.kernel : own->kernel
        TAKE(absmax_f32);
        TAKE(absmax_bf16);
        TAKE(absmax_f16);
        TAKE(absmax_each);
        TAKE(to_int8);
        TAKE(to_int8_each);
#undef TAKE
    }
    return found;
}

sl_weighted_fn sl_tier_weighted(int32_t tier, int32_t to) {
    FOR_EACH(t, tier) {
        if (TIERS[t].weighted == NULL) continue;
        for (const sl_weighted_kernel *kernel = TIERS[t].weighted; kernel->to >= 0; kernel++)
            if (kernel->to == to) return kernel->quantize;
    }
    return NULL;
}

sl_restore sl_tier_restore(int32_t tier) {
    sl_restore found = {0};
    FOR_EACH(t, tier) {
        const sl_restore *own = TIERS[t].restore;
        if (own == NULL) continue;
#define TAKE(kernel) found.kernel = found.kernel != NULL ? found.kernel : own->kernel
        TAKE(nibbles);
        TAKE(plane);
        TAKE(words);
        TAKE(scale);
        TAKE(grouped);
        TAKE(expand);
        TAKE(narrow);
#undef TAKE
    }
    return found;
}

sl_lanes_fn sl_tier_lanes(int32_t tier, int32_t from) {
    FOR_EACH(t, tier) {
        if (TIERS[t].stats == NULL) continue;
        for (const sl_lanes_kernel *kernel = TIERS[t].stats; kernel->from >= 0; kernel++)
            if (kernel->from == from) return kernel->sum;
    }
    return NULL;
}

sl_encode_steps sl_tier_encode(int32_t tier) {
    sl_encode_steps found = {0};
    FOR_EACH(t, tier) {
        const sl_encode_steps *own = TIERS[t].encode;
        if (own == NULL) continue;
#define TAKE(step) found.step = found.step != NULL ? found.step : own->step
        TAKE(extremes);
        TAKE(quotients);
        TAKE(integers);
        TAKE(ranks);
        TAKE(e4m3);
        TAKE(pack);
#undef TAKE
    }
    return found;
}

sl_difference_fn sl_tier_difference(int32_t tier) {
    FOR_EACH(t, tier) {
        if (TIERS[t].difference != NULL) return TIERS[t].difference;
    }
    return NULL;
}

sl_merge_fn sl_tier_merge(int32_t tier) {
    FOR_EACH(t, tier) {
        if (TIERS[t].merge != NULL) return TIERS[t].merge;
    }
    return NULL;
}
