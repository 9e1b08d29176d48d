/* The order of names. */
#ifndef SL_ORDER_H
#define SL_ORDER_H

#include "base/base.h"

/* Names in a row, each followed by a newline; `ends` holds their ends. None contains a newline. */
typedef struct sl_names {
    const char *text;
    const uint64_t *ends;
    uint64_t count; /* at least 1 */
} sl_names;

/* Writes the indices of the names to `order`, sorted by their bytes. Fast if most names share a prefix with their
 * neighbour; returns false if they are shuffled, duplicate or unusual, or if there is no memory. */
bool sl_order_names(const sl_names *names, uint32_t *order);

#endif
