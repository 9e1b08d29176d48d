/* Statistics element by element: the reference for all tiers. */
#include "kernels/stats.h"

#include "kernels/scalar.h"

static double f16_value(uint16_t bits) { return (double)float_of(f16_to_f32(bits)); }

static double bf16_value(uint16_t bits) { return (double)float_of(bf16_to_f32(bits)); }

/* Loads `count` elements from element `first` on as f64. */
static void load(int32_t from, const void *source, size_t first, size_t count, double *values) {
    switch (from) {
    case SL_F32:
        for (size_t i = 0; i < count; i++) values[i] = (double)float_of(load32(source, first + i));
        break;
    case SL_BF16:
        for (size_t i = 0; i < count; i++) values[i] = bf16_value(load16(source, first + i));
        break;
    case SL_F16:
        for (size_t i = 0; i < count; i++) values[i] = f16_value(load16(source, first + i));
        break;
    default: /* SL_F64 */
        for (size_t i = 0; i < count; i++) values[i] = double_of(load64(source, first + i));
        break;
    }
}

void sl_lanes_rest(int32_t from, const void *source, size_t count, sl_lanes *lanes) {
    double values[SL_STATS_LANES], min = lanes->min, max = lanes->max;
    for (size_t i = 0; i < count; i += SL_STATS_LANES) {
        size_t some = count - i < SL_STATS_LANES ? count - i : SL_STATS_LANES;
        load(from, source, i, some, values);
        for (size_t k = 0; k < some; k++) {
            double x = values[k];
            lanes->sums[k] += x;
            lanes->squares[k] += x * x;
            lanes->zeros += x == 0.0;
            min = x < min ? x : min;
            max = x > max ? x : max;
        }
    }
    lanes->min = min;
    lanes->max = max;
}

static void sum(int32_t from, const void *source, size_t count, sl_lanes *lanes) {
    memset(lanes, 0, sizeof *lanes);
    lanes->min = SL_F64_MAX;
    lanes->max = -SL_F64_MAX;
    sl_lanes_rest(from, source, count, lanes);
}

static void sl_lanes_f32_scalar(const void *source, size_t count, sl_lanes *lanes) {
    sum(SL_F32, source, count, lanes);
}

static void sl_lanes_bf16_scalar(const void *source, size_t count, sl_lanes *lanes) {
    sum(SL_BF16, source, count, lanes);
}

static void sl_lanes_f16_scalar(const void *source, size_t count, sl_lanes *lanes) {
    sum(SL_F16, source, count, lanes);
}

static void sl_lanes_f64_scalar(const void *source, size_t count, sl_lanes *lanes) {
    sum(SL_F64, source, count, lanes);
}

const sl_lanes_kernel sl_lanes_scalar[] = {
    {SL_F32, sl_lanes_f32_scalar},
    {SL_BF16, sl_lanes_bf16_scalar},
    {SL_F16, sl_lanes_f16_scalar},
    {SL_F64, sl_lanes_f64_scalar},
    {-1, NULL},
};

bool sl_stats_widen(int32_t from, const void *source, void *destination, size_t count) {
    switch (from) {
    case SL_F32:
        for (size_t i = 0; i < count; i++) store_double(destination, i, (double)float_of(load32(source, i)));
        return true;
    case SL_BF16:
        for (size_t i = 0; i < count; i++) store_double(destination, i, bf16_value(load16(source, i)));
        return true;
    case SL_F16:
        for (size_t i = 0; i < count; i++) store_double(destination, i, f16_value(load16(source, i)));
        return true;
    case SL_I32:
        for (size_t i = 0; i < count; i++) store_double(destination, i, (double)(int32_t)load32(source, i));
        return true;
    case SL_U32:
        for (size_t i = 0; i < count; i++) store_double(destination, i, (double)load32(source, i));
        return true;
    case SL_I64:
        for (size_t i = 0; i < count; i++) store_double(destination, i, (double)(int64_t)load64(source, i));
        return true;
    case SL_U64:
        for (size_t i = 0; i < count; i++) store_double(destination, i, (double)load64(source, i));
        return true;
    default: return false;
    }
}
