/* Conversions, directly or in two steps. */
#include "kernels/convert.h"

#include "kernels/stream.h"
#include "kernels/tier.h"

bool sl_conversion_find(int32_t tier, int32_t from, int32_t to, sl_conversion *out) {
    const sl_dtype_info *source = sl_dtype_get(from), *target = sl_dtype_get(to);
    if (source == NULL || target == NULL || sl_tier_name(tier) == NULL) return false;
    sl_conversion found = {sl_tier_convert(tier, from, to), NULL, source, target};
    if (found.first == NULL) {
        bool narrows = target->kind == SL_KIND_FLOAT && target->bits < 32; /* blocks are always made from f32 */
        if (narrows) found.first = sl_tier_convert(tier, from, SL_F32_ODD);
        if (found.first == NULL) found.first = sl_tier_convert(tier, from, SL_F32);
        found.second = sl_tier_convert(tier, SL_F32, to);
        if (found.first == NULL || found.second == NULL) return false;
    }
    *out = found;
    return true;
}

/* Number of f32 values between the two steps of a conversion: 8 KiB stay in the first-level cache. A whole number of
 * blocks of every type. */
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

void sl_conversion_stream(const sl_conversion *conversion, const void *source, void *destination, size_t count) {
    if (conversion->first == NULL) {
        sl_stream_copy(destination, source, count * sizeof(float));
        return;
    }
    uint64_t room[BLOCK]; /* for elements of at most 8 bytes */
    for (size_t i = 0; i < count; i += BLOCK) {
        size_t some = count - i < BLOCK ? count - i : BLOCK;
        sl_conversion_run(conversion, (const uint8_t *)source + sl_dtype_bytes(conversion->from, i), room, some);
        sl_stream_copy((uint8_t *)destination + sl_dtype_bytes(conversion->to, i), room,
                       (size_t)sl_dtype_bytes(conversion->to, some));
    }
}

int32_t sl_convertible(int32_t from, int32_t to) {
    sl_conversion conversion;
    return sl_conversion_find(SL_TIER_SCALAR, from, to, &conversion);
}

int32_t sl_convert(int32_t tier, int32_t from, int32_t to, const void *source, void *destination, uint64_t count) {
    sl_conversion conversion;
    if (!sl_tier_available(tier) || !sl_conversion_find(tier, from, to, &conversion)) return SL_E_ARGUMENT;
    if (sl_stream_pays(destination, sl_dtype_bytes(conversion.to, count), SL_STREAM_FROM)) {
        sl_conversion_stream(&conversion, source, destination, (size_t)count);
        sl_stream_end();
    } else
        sl_conversion_run(&conversion, source, destination, (size_t)count);
    return SL_OK;
}
