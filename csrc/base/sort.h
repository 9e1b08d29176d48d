/* The one sort. */
#ifndef SL_SORT_H
#define SL_SORT_H

#include "base/base.h"

/* <0, 0 or >0 as item a goes before, with or after item b. */
typedef int (*sl_compare_fn)(const void *context, uint32_t a, uint32_t b);

/* Stable natural merge sort: one pass over what is sorted already, as writers leave it; never more than log2(count)
 * passes, whatever a hostile file does. `spare` holds 2 * count entries. */
void sl_sort(uint32_t *order, uint32_t *spare, uint64_t count, sl_compare_fn compare, const void *context);

/* memcmp for byte strings of two sizes: the shorter goes first when one starts with the other. */
int sl_compare_bytes(const char *a, uint64_t a_size, const char *b, uint64_t b_size);

#endif
