/* A loop shared by threads for a bounded time. No pool and no global state: every thread is joined before
 * the call returns, so that fork and Ctrl-C are safe by construction. */
#ifndef SL_PARALLEL_H
#define SL_PARALLEL_H

#include "base/error.h"

/* More threads than this do not help: memory and disks are saturated well before. The Python side never asks for
 * more than 16 by itself; an explicit threads= may. */
#define SL_MAX_THREADS 256

/* Processes one item and returns a status. Items are independent of each other. `scratch` is the thread's own. */
typedef int32_t (*sl_item_fn)(void *context, uint64_t item, void *scratch, sl_error *error);

/* Number of threads that items [first, count) are run on when `threads` are asked for. */
int32_t sl_parallel_threads(int32_t threads, uint64_t first, uint64_t count);

/* Runs items [first, count) on `threads` threads, of which there are no more than sl_parallel_threads allows, including
 * the caller's, taking no new item after slice_ms (0: no limit) or a failure; at least one item is done. `scratch` has
 * scratch_size bytes for each thread. *next is the item to resume at: all before it are done. On failure *next is the
 * failing item, the lowest one if several fail, and `error` is its error. */
int32_t sl_parallel(sl_item_fn item, void *context, uint8_t *scratch, uint64_t scratch_size, uint64_t first,
                    uint64_t count, int32_t threads, int32_t slice_ms, uint64_t *next, sl_error *error);

#endif
