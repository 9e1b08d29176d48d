/* Per-axis scales of a tensor. */
#include "jobs/channels.h"

int32_t sl_channels_check(const sl_channels *channels, uint64_t block, bool scaled, sl_error *error) {
    if (channels->count == 0 || channels->inner == 0)
        return sl_fail(error, SL_E_ARGUMENT, -1, "channel count %llu and inner size %llu must both be positive",
                       (unsigned long long)channels->count, (unsigned long long)channels->inner);
    if (channels->count > 1 && channels->inner % block != 0)
        return sl_fail(error, SL_E_ARGUMENT, -1, "channels of %llu elements are not a whole number of blocks of %llu",
                       (unsigned long long)channels->inner, (unsigned long long)block);
    if (scaled && channels->factors == NULL) return sl_fail(error, SL_E_ARGUMENT, -1, "the channels lack factors");
    return SL_OK;
}
