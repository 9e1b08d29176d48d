/* Differences between two runs of numbers, block by block. */
#include "kernels/difference.h"

#include "kernels/tier.h"

#define LANES SL_DIFFERENCE_LANES
#define BLOCK SL_DIFFERENCE_BLOCK

static bool is_nan(double x) { return x != x; }
static bool is_finite(double x) { return x - x == 0.0; }

static double total(const double lanes[LANES]) {
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

/* The state of a run. */
typedef struct run {
    sl_difference_fn add;
    sl_difference_lanes sums;
    sl_difference *found;
} run;

/* Adds a block that begins at element `first` of the run. */
static void add_block(run *self, const double *a, const double *b, size_t count, uint64_t first) {
    double largest = self->add(a, b, count, &self->sums);
    if (!(largest > self->found->largest)) return;
    size_t i = 0;
    while (i + 1 < count && sl_distance(a[i], b[i]) != largest) i++;
    self->found->largest = largest;
    self->found->at = first + i;
}

/* Adds a copy of a block in which pairs with NaN or infinity are replaced by 0. */
static void add_finite(run *self, const double *a, const double *b, size_t count, uint64_t first) {
    double x[BLOCK], y[BLOCK];
    for (size_t i = 0; i < count; i++) {
        bool finite = is_finite(a[i]) && is_finite(b[i]);
        bool same = a[i] == b[i] || (is_nan(a[i]) && is_nan(b[i]));
        x[i] = finite ? a[i] : 0.0;
        y[i] = finite ? b[i] : 0.0;
        self->found->finite -= finite ? 0 : 1;
        self->found->nonfinite += finite || same ? 0 : 1;
    }
    add_block(self, x, y, count, first);
}

/* Elements [first, first + count) as f64, in `spare` if they are f32. */
static const double *doubles(int32_t dtype, const void *values, uint64_t first, size_t count, double *spare) {
    if (dtype == SL_F64) return (const double *)values + first;
    const float *floats = (const float *)values + first;
    for (size_t i = 0; i < count; i++) spare[i] = (double)floats[i];
    return spare;
}

static void add_all(run *self, int32_t dtype, const void *a, const void *b, uint64_t count,
                    void (*add)(run *, const double *, const double *, size_t, uint64_t)) {
    double x[BLOCK], y[BLOCK];
    memset(&self->sums, 0, sizeof self->sums);
    *self->found = (sl_difference){.finite = count};
    for (uint64_t first = 0; first < count; first += BLOCK) {
        size_t some = (size_t)sl_min_u64(count - first, BLOCK);
        add(self, doubles(dtype, a, first, some, x), doubles(dtype, b, first, some, y), some, first);
    }
    self->found->norm_a = total(self->sums.norm_a);
    self->found->norm_b = total(self->sums.norm_b);
}

int32_t sl_differ(int32_t tier, int32_t dtype, const void *a, const void *b, const uint64_t *counts, uint64_t number,
                  sl_difference *found) {
    if (!sl_tier_available(tier) || (dtype != SL_F32 && dtype != SL_F64)) return SL_E_ARGUMENT;
    size_t item = dtype == SL_F32 ? sizeof(float) : sizeof(double);
    const uint8_t *x = a, *y = b;
    for (uint64_t k = 0; k < number; k++) {
        run self = {.add = sl_tier_difference(tier), .found = &found[k]};
        add_all(&self, dtype, x, y, counts[k], add_block);
        if (!is_finite(found[k].norm_a) || !is_finite(found[k].norm_b))
            add_all(&self, dtype, x, y, counts[k], add_finite);
        found[k].dot = total(self.sums.dot);
        found[k].squares = total(self.sums.squares);
        found[k].unequal = (uint64_t)total(self.sums.unequal) + found[k].nonfinite;
        x += counts[k] * item;
        y += counts[k] * item;
    }
    return SL_OK;
}
