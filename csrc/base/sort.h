/* The sort of all tables. */
#ifndef SL_SORT_H
#define SL_SORT_H

#include "base/base.h"

/* Negative, 0 or positive if item a sorts before, equal to or after item b. */
typedef int (*sl_compare_fn)(const void *context, uint32_t a, uint32_t b);

/* Stable natural merge sort: a single pass over sorted input, which most writers produce, and at most log2(count)
 * passes, even on a hostile file. `spare` holds 2 * count entries. */
void sl_sort(uint32_t *order, uint32_t *spare, uint64_t count, sl_compare_fn compare, const void *context);

/* memcmp for byte strings of different sizes: a prefix sorts before the longer string. */
int sl_compare_bytes(const char *a, uint64_t a_size, const char *b, uint64_t b_size);

#endif
