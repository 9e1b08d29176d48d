/* Per-axis scales of a tensor (sl_channels): the channel of each element. */
#ifndef SL_CHANNELS_H
#define SL_CHANNELS_H

#include "base/error.h"

/* Refuses counts of zero, channels that begin inside a block of `block` elements, and channels without factors if
 * values are `scaled`. */
int32_t sl_channels_check(const sl_channels *channels, uint64_t block, bool scaled, sl_error *error);

/* The channel of an element. */
static inline uint64_t sl_channel_of(const sl_channels *channels, uint64_t element) {
    return channels->count == 1 ? 0 : element / channels->inner % channels->count;
}

/* Number of consecutive elements of a single channel, at most `count`, starting with `element`. */
static inline uint64_t sl_channel_run(const sl_channels *channels, uint64_t element, uint64_t count) {
    return channels->count == 1 ? count : sl_min_u64(count, channels->inner - element % channels->inner);
}

/* Whether adjacent elements belong to adjacent channels, so that kernels take a factor per element. */
static inline bool sl_channels_alternate(const sl_channels *channels) {
    return channels->inner == 1 && channels->count > 1;
}

/* Number of elements that a single kernel call can process, at most `count`, starting with `element`: their factors are
 * adjacent or equal. */
static inline uint64_t sl_channels_run(const sl_channels *channels, uint64_t element, uint64_t count) {
    if (sl_channels_alternate(channels)) return sl_min_u64(count, channels->count - sl_channel_of(channels, element));
    return sl_channel_run(channels, element, count);
}

#endif
