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

void sl_channels_dequantize(const sl_channels *channels, const sl_quant *kernels, const uint8_t *codes,
                            uint64_t element, uint64_t count, void *values) {
    uint8_t *out = values;
    for (uint64_t end = element + count, some; element < end;
         element += some, codes += some, out += some * sizeof(float)) {
        const float *factors = channels->factors + sl_channel_of(channels, element);
        some = sl_channels_run(channels, element, end - element);
        if (sl_channels_alternate(channels))
            kernels->from_int8_each((const int8_t *)codes, out, (size_t)some, factors);
        else
            kernels->from_int8((const int8_t *)codes, out, (size_t)some, *factors);
    }
}
