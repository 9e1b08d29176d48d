/* A loop shared by threads for a limited time. There is no pool and no global state: every thread is joined before the
 * call returns, which makes fork and Ctrl-C safe. */
#ifndef SL_PARALLEL_H
#define SL_PARALLEL_H

#include "base/error.h"

/* More threads do not help, because memory and disks are saturated well before. Python uses at most 16 by default; an
 * explicit threads= can ask for more. */
#define SL_MAX_THREADS 256

/* Processes an item and returns a status. Items are independent of each other. `scratch` belongs to the thread. */
typedef int32_t (*sl_item_fn)(void *context, uint64_t item, void *scratch, sl_error *error);

/* Number of threads that run the items [first, count) if `threads` are requested. */
int32_t sl_parallel_threads(int32_t threads, uint64_t first, uint64_t count);

/* Runs items [first, count) on `threads` threads, the caller's included; sl_parallel_threads limits their number. Takes
 * no new item after slice_ms (0: no limit) or after a failure, but processes at least one item. `scratch` has
 * scratch_size bytes per thread. *next is the item to resume at: all items before it are done. If items fail, *next is
 * the lowest failing item, and `error` is its error. */
int32_t sl_parallel(sl_item_fn item, void *context, uint8_t *scratch, uint64_t scratch_size, uint64_t first,
                    uint64_t count, int32_t threads, int32_t slice_ms, uint64_t *next, sl_error *error);

#endif
