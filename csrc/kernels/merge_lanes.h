/* Products added to values, in vectors of f32. Included only by the files of the tiers, hence no prefix. The including
 * file must define:
 *
 *   TARGET            marks functions of its instruction set
 *   KERNEL            the name of the kernel
 *   WIDTH             lanes of a vector
 *   ROWS              rows at a time: their sums take ROWS * SL_MERGE_PANEL / WIDTH registers
 *   lanes             a vector
 *   load(f32), load_values(bytes), store_values(bytes, lanes)
 *   same(number)      the number in all lanes
 *   fused(a, b, c)    a * b + c, rounded once */
#ifndef SL_MERGE_LANES_H
#define SL_MERGE_LANES_H

#include "kernels/merge.h"

#define VECTORS (SL_MERGE_PANEL / WIDTH)

/* `rows` is a constant at each call, so that all sums stay in registers. */
TARGET SL_INLINE void add_panel(uint8_t *values, size_t line, size_t rows, const sl_update *update, const float *left,
                                const float *right) {
    lanes sums[ROWS][VECTORS];
    const size_t rank = (size_t)update->rank;
    SL_UNROLL for (size_t r = 0; r < rows; r++) {
        SL_UNROLL for (size_t v = 0; v < VECTORS; v++) sums[r][v] = same(0.0f);
    }
    for (size_t k = 0; k < rank; k++, right += SL_MERGE_PANEL) {
        lanes row[VECTORS];
        SL_UNROLL for (size_t v = 0; v < VECTORS; v++) row[v] = load(right + v * WIDTH);
        SL_UNROLL for (size_t r = 0; r < rows; r++) {
            const lanes factor = same(left[r * rank + k]);
            SL_UNROLL for (size_t v = 0; v < VECTORS; v++) sums[r][v] = fused(factor, row[v], sums[r][v]);
        }
    }
    const lanes scaling = same(update->scaling);
    SL_UNROLL for (size_t r = 0; r < rows; r++) {
        SL_UNROLL for (size_t v = 0; v < VECTORS; v++) {
            uint8_t *at = values + r * line + v * WIDTH * sizeof(float);
            store_values(at, fused(scaling, sums[r][v], load_values(at)));
        }
    }
}

TARGET void KERNEL(uint8_t *values, size_t line, size_t rows, size_t panels, const sl_update *update) {
    const size_t rank = (size_t)update->rank;
    for (size_t p = 0; p < panels; p++) {
        const float *left = update->left, *right = update->right + p * rank * SL_MERGE_PANEL;
        uint8_t *at = values + p * SL_MERGE_PANEL * sizeof(float);
        size_t r = 0;
        for (; r + ROWS <= rows; r += ROWS, at += ROWS * line, left += ROWS * rank)
            add_panel(at, line, ROWS, update, left, right);
        for (; r < rows; r++, at += line, left += rank) add_panel(at, line, 1, update, left, right);
    }
}

#endif
