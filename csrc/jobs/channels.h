/* Channels of a tensor (sl_channels): which one an element belongs to, and int8 codes times their scales. */
#ifndef SL_CHANNELS_H
#define SL_CHANNELS_H

#include "base/error.h"
#include "kernels/quant.h"

/* Refuses counts of zero, channels that begin within a block of `block` elements, and channels without factors where
 * values are `scaled`. */
int32_t sl_channels_check(const sl_channels *channels, uint64_t block, bool scaled, sl_error *error);

/* The channel of an element. */
static inline uint64_t sl_channel_of(const sl_channels *channels, uint64_t element) {
    return channels->count == 1 ? 0 : element / channels->inner % channels->count;
}

/* How many of the `count` elements from `element` on belong to its channel. */
static inline uint64_t sl_channel_run(const sl_channels *channels, uint64_t element, uint64_t count) {
    return channels->count == 1 ? count : sl_min_u64(count, channels->inner - element % channels->inner);
}

/* Whether neighbours belong to neighbouring channels, so that kernels take a factor for each element. */
static inline bool sl_channels_alternate(const sl_channels *channels) {
    return channels->inner == 1 && channels->count > 1;
}

/* How many of the `count` elements from `element` on one kernel call can do: factors beside each other, or a single
 * one. */
static inline uint64_t sl_channels_run(const sl_channels *channels, uint64_t element, uint64_t count) {
    if (sl_channels_alternate(channels)) return sl_min_u64(count, channels->count - sl_channel_of(channels, element));
    return sl_channel_run(channels, element, count);
}

/* `count` f32, in the byte order of files, of the int8 at `codes`, the first of which is number `element` of a tensor.
 */
void sl_channels_restore(const sl_channels *channels, const sl_quant *kernels, const uint8_t *codes, uint64_t element,
                         uint64_t count, void *values);

#endif
