/* Statistics: a block from its lanes, in two passes if a single pass is not exact enough; merging. */
#include "kernels/stats.h"

#include "kernels/scalar.h"
#include "kernels/tier.h"

sl_accumulator sl_accumulator_find(int32_t tier, int32_t from) {
    sl_accumulator accumulator = {from, sl_tier_lanes(tier, from), sl_tier_lanes(tier, SL_F64)};
    return accumulator;
}

void sl_stats_clear(sl_stats *stats) {
    memset(stats, 0, sizeof *stats);
    stats->first_nan = stats->first_infinite = UINT64_MAX;
    stats->min = SL_F64_MAX;
    stats->max = -SL_F64_MAX;
    stats->least = UINT64_MAX;
}

/* ---- a block ---- */

/* Sums all lanes in a fixed order; overwrites the lanes. */
static double reduce(double lanes[SL_STATS_LANES]) {
    for (size_t half = SL_STATS_LANES / 2; half > 0; half /= 2)
        for (size_t k = 0; k < half; k++) lanes[k] += lanes[k + half];
    return lanes[0];
}

/* Bounds for a sum of squares within which no significant square has lost bits to underflow and no sum of squared
 * differences can overflow, whatever the number of blocks. f32 and narrower types lie between 2^-298 and 2^268. */
#define LEAST_SQUARES 0x1p-900
#define MOST_SQUARES 0x1p960

/* The fraction of the sum of squares that must remain after subtracting the mean: 1/64, so that at most six bits
 * cancel. The mean of weights is small, and nearly all remains. */
#define LEAST_LEFT 0x1p-6

/* Sets the statistics of a block of `count` > 0 from its lanes. Returns false, and sets nothing, if a single pass is
 * not exact enough. */
static bool summarize(sl_lanes *lanes, size_t count, sl_stats *block) {
    double sum = reduce(lanes->sums), squares = reduce(lanes->squares), mean = sum / (double)count,
           left = squares - sum * mean;
    if (lanes->zeros != count && !(squares >= LEAST_SQUARES && squares <= MOST_SQUARES && left >= squares * LEAST_LEFT))
        return false; /* also when a comparison involves NaN */
    sl_stats_clear(block);
    block->finite = count;
    block->zeros = lanes->zeros;
    block->min = lanes->min + 0.0; /* -0 becomes +0 */
    block->max = lanes->max + 0.0;
    block->mean = mean;
    block->squares = left;
    return true;
}

/* Copies the finite elements of `count` f64 to `values`, which may be `source`, and counts NaN and infinite elements.
 */
static void filter_finite(const void *source, size_t count, uint64_t index, double *values, sl_stats *block) {
    size_t finite = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = load64(source, i);
        double x = double_of(bits);
        sl_store_le64(&values[finite], bits);
        if (x - x == 0.0)
            finite++;
        else if (x != x) {
            if (block->nan++ == 0) block->first_nan = index + i;
        } else if (block->infinite++ == 0)
            block->first_infinite = index + i;
    }
    block->finite = finite;
}

/* Beyond these magnitudes a block is first multiplied by 2^-SCALE or 2^SCALE, so that squares neither overflow nor
 * underflow: 2^1024 becomes 2^424, 2^-1074 becomes 2^-474. Between the bounds, sums of squares obey MOST_SQUARES. */
#define MOST_UNSCALED 0x1p480
#define LEAST_UNSCALED 0x1p-440
#define SCALE 600

/* Returns 2^by for -SCALE <= by <= SCALE. */
static double power(int64_t by) { return double_of((uint64_t)(1023 + by) << 52); }

static int64_t exponent_of(double min, double max) {
    double absmax = max > -min ? max : -min;
    return absmax >= MOST_UNSCALED ? SCALE : absmax < LEAST_UNSCALED && absmax > 0.0 ? -SCALE : 0;
}

/* Computes statistics in two passes: of the finite elements minus their mean. `source` is f64 and may be `values`;
 * `lanes` must be the lanes of `source`. */
static void summarize_twice(sl_lanes_fn sum_f64, const void *source, size_t count, uint64_t index, double *values,
                            sl_lanes *lanes, sl_stats *block) {
    sl_stats_clear(block);
    block->finite = count;
    double squares = reduce(lanes->squares);
    if (squares - squares != 0.0) {
        filter_finite(source, count, index, values, block);
        if (block->finite == 0) return;
        source = values;
        sum_f64(source, (size_t)block->finite, lanes);
    }
    block->zeros = lanes->zeros;
    block->min = lanes->min + 0.0; /* -0 becomes +0 */
    block->max = lanes->max + 0.0;
    block->exponent = exponent_of(block->min, block->max);
    double scale = power(-block->exponent), finite = (double)block->finite;
    if (block->exponent != 0) {
        for (size_t i = 0; i < block->finite; i++) store_double(values, i, double_of(load64(source, i)) * scale);
        source = values;
        sum_f64(source, (size_t)block->finite, lanes);
    }
    /* If all elements are equal, their value is exactly the mean. */
    double mean = block->min == block->max ? block->min * scale : reduce(lanes->sums) / finite;
    for (size_t i = 0; i < block->finite; i++) store_double(values, i, double_of(load64(source, i)) - mean);
    sum_f64(values, (size_t)block->finite, lanes);
    double difference = reduce(lanes->sums);
    block->mean = mean;
    block->rest = difference / finite;
    double left = reduce(lanes->squares) - difference * block->rest;
    block->squares = left > 0.0 ? left : 0.0;
}

/* Sets *block and *lanes from `count` elements; see sl_stats_add. */
static void measure(const sl_accumulator *accumulator, const void *source, size_t count, uint64_t index, double *spare,
                    sl_lanes *lanes, sl_stats *block) {
    sl_lanes changed;
    accumulator->sum(source, count, lanes);
    changed = *lanes;
    if (summarize(&changed, count, block)) return;
    if (sl_stats_widen(accumulator->from, source, spare, count)) source = spare;
    changed = *lanes;
    summarize_twice(accumulator->sum_f64, source, count, index, spare, &changed, block);
}

void sl_stats_add(sl_stats *stats, const sl_accumulator *accumulator, const void *source, size_t count, uint64_t index,
                  double *spare) {
    sl_lanes lanes;
    sl_stats block;
    measure(accumulator, source, count, index, spare, &lanes, &block);
    sl_stats_join(stats, &block);
}

/* ---- integers ---- */

/* Up to this magnitude, the sums of a block are exact in f64: 2^12 elements of 2^40. */
#define MOST_SUMMED 0x1p40
/* Up to this magnitude, 64-bit integers are exact in f64. */
#define MOST_EXACT 0x1p53

static void add_to_sum(sl_stats *stats, uint64_t low, int64_t high) {
    stats->sum_low += low;
    stats->sum_high += high + (stats->sum_low < low ? 1 : 0);
}

/* Computes mean and squares of 64-bit integers from their differences to the first integer. */
static void measure_differences(const sl_accumulator *accumulator, const void *integers, uint64_t flip, size_t count,
                                double *spare, sl_stats *block) {
    uint64_t first = load64(integers, 0) ^ flip, low = load64(integers, 0) & 0x7ff, high = load64(integers, 0) - low;
    for (size_t i = 0; i < count; i++) {
        uint64_t x = load64(integers, i) ^ flip;
        store_double(spare, i, x < first ? -(double)(first - x) : (double)(x - first));
    }
    sl_accumulator doubles = {SL_F64, accumulator->sum_f64, accumulator->sum_f64};
    sl_lanes lanes;
    sl_stats moved;
    measure(&doubles, spare, count, 0, spare, &lanes, &moved);
    double base = flip == 0 ? (double)high : (double)(int64_t)high, step = moved.mean + (double)low;
    block->mean = base + step;
    block->rest = step - (block->mean - base) + moved.rest;
    block->squares = moved.squares;
}

void sl_stats_add_integers(sl_stats *stats, const sl_accumulator *accumulator, const void *source, size_t count,
                           uint64_t index, double *spare, int32_t from, const void *integers) {
    uint64_t flip = from == SL_U64 ? 0 : UINT64_C(1) << 63;
    sl_lanes lanes;
    sl_stats block;
    measure(accumulator, source, count, index, spare, &lanes, &block);
    double absmax = block.max > -block.min ? block.max : -block.min;
    if (absmax <= MOST_SUMMED) {
        int64_t sum = (int64_t)reduce(lanes.sums);
        add_to_sum(&block, (uint64_t)sum, sum < 0 ? -1 : 0);
        block.least = (uint64_t)(int64_t)block.min ^ flip;
        block.most = (uint64_t)(int64_t)block.max ^ flip;
    } else
        for (size_t i = 0; i < count; i++) {
            uint64_t bits = load64(integers, i), x = bits ^ flip;
            add_to_sum(&block, bits, x < flip ? -1 : 0);
            block.least = x < block.least ? x : block.least;
            block.most = x > block.most ? x : block.most;
        }
    if (absmax > MOST_EXACT) measure_differences(accumulator, integers, flip, count, spare, &block);
    sl_stats_join(stats, &block);
}

/* ---- merging ---- */

static void rescale(sl_stats *stats, int64_t exponent) {
    for (; stats->exponent < exponent; stats->exponent += SCALE) {
        stats->mean *= power(-SCALE);
        stats->rest *= power(-SCALE);
        stats->squares = stats->squares * power(-SCALE) * power(-SCALE);
    }
}

/* Merges mean and sum of squares of b into a; both must have finite elements. */
static void join_moments(sl_stats *a, const sl_stats *b) {
    sl_stats next = *b;
    rescale(&next, a->exponent);
    rescale(a, next.exponent);
    double share = (double)next.finite / (double)(a->finite + next.finite);
    double difference = (next.mean - a->mean) + (next.rest - a->rest), step = difference * share;
    double mean = a->mean + step, moved = mean - a->mean;
    a->rest += (a->mean - (mean - moved)) + (step - moved); /* the rounding error of the mean */
    a->mean = mean;
    a->squares += next.squares + difference * difference * ((double)a->finite * share);
}

void sl_stats_join(sl_stats *stats, const sl_stats *next) {
    if (next->finite > 0 && stats->finite > 0)
        join_moments(stats, next);
    else if (next->finite > 0) {
        stats->mean = next->mean;
        stats->rest = next->rest;
        stats->squares = next->squares;
        stats->exponent = next->exponent;
    }
    stats->min = next->min < stats->min ? next->min : stats->min;
    stats->max = next->max > stats->max ? next->max : stats->max;
    stats->first_nan = sl_min_u64(stats->first_nan, next->first_nan);
    stats->first_infinite = sl_min_u64(stats->first_infinite, next->first_infinite);
    stats->least = sl_min_u64(stats->least, next->least);
    stats->most = next->most > stats->most ? next->most : stats->most;
    add_to_sum(stats, next->sum_low, next->sum_high);
    stats->finite += next->finite;
    stats->nan += next->nan;
    stats->infinite += next->infinite;
    stats->zeros += next->zeros;
}

void sl_stats_merge(const sl_stats *const *parts, const uint64_t *counts, uint64_t count, sl_stats *merged) {
    for (uint64_t i = 0; i < count; i++) {
        sl_stats_clear(&merged[i]);
        for (uint64_t part = 0; part < counts[i]; part++) sl_stats_join(&merged[i], &parts[i][part]);
    }
}
