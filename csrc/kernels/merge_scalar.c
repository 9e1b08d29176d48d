/* Products added to values: the reference. */
#include "kernels/merge.h"
#include "kernels/scalar.h"

#ifdef __FP_FAST_FMAF
#define fused __builtin_fmaf
#else

/* a * b + c, rounded once, without the C library, whose fmaf may take a hundred times as long. The product is exact in
 * double, and their sum is rounded to odd: with 29 bits more than the result, rounding again equals a single
 * rounding. */
static inline float fused(float a, float b, float c) {
    double product = (double)a * b, addend = c, sum = product + addend;
    double back = sum - product, lost = (product - (sum - back)) + (addend - back);
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    if ((lost > 0.0 || lost < 0.0) && (bits & 1) == 0) bits += (lost > 0.0) == (sum > 0.0) ? 1 : UINT64_MAX;
    memcpy(&sum, &bits, sizeof sum);
    return (float)sum;
}

#endif

void sl_merge_scalar(uint8_t *values, size_t line, size_t rows, size_t panels, const sl_update *update) {
    const size_t rank = (size_t)update->rank;
    for (size_t r = 0; r < rows; r++, values += line) {
        const float *left = update->left + r * rank, *right = update->right;
        for (size_t p = 0; p < panels; p++) {
            float sums[SL_MERGE_PANEL] = {0};
            for (size_t k = 0; k < rank; k++, right += SL_MERGE_PANEL)
                for (size_t c = 0; c < SL_MERGE_PANEL; c++) sums[c] = fused(left[k], right[c], sums[c]);
            for (size_t c = 0; c < SL_MERGE_PANEL; c++) {
                size_t at = p * SL_MERGE_PANEL + c;
                store_float(values, at, fused(update->scaling, sums[c], float_of(load32(values, at))));
            }
        }
    }
}
