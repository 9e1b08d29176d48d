/* A loop shared by threads. */
#include "platform/parallel.h"

#include <stdlib.h>

#include "platform/platform.h"

typedef struct shared {
    sl_item_fn item;
    void *context;
    uint64_t count;
    uint64_t deadline_us; /* 0 for no deadline */
    sl_atomic next;
    sl_atomic failed; /* lowest failing item so far, or `count` */
} shared;

typedef struct worker {
    sl_thread thread;
    shared *shared;
    uint64_t failed; /* the failing item of this worker, or `count` */
    void *scratch;
    sl_error error;
} worker;

static void work(void *argument) {
    worker *self = argument;
    shared *all = self->shared;
    do {
        uint64_t item = sl_atomic_add(&all->next, 1);
        /* Items below a failing item are still processed, so that the lowest failure is found regardless of timing. */
        if (item >= sl_atomic_load(&all->failed)) return;
        if (all->item(all->context, item, self->scratch, &self->error) != SL_OK) {
            self->failed = item;
            sl_atomic_lower(&all->failed, item);
            return;
        }
    } while (all->deadline_us == 0 || sl_platform_now_us() < all->deadline_us);
}

int32_t sl_parallel_threads(int32_t threads, uint64_t first, uint64_t count) {
    uint64_t some = threads < 1 ? 1 : threads > SL_MAX_THREADS ? SL_MAX_THREADS : (uint64_t)threads;
    return (int32_t)sl_min_u64(some, count - first);
}

int32_t sl_parallel(sl_item_fn item, void *context, uint8_t *scratch, uint64_t scratch_size, uint64_t first,
                    uint64_t count, int32_t threads, int32_t slice_ms, uint64_t *next, sl_error *error) {
    shared all = {item,    context, count, slice_ms > 0 ? sl_platform_now_us() + (uint64_t)slice_ms * 1000 : 0,
                  {first}, {count}};
    int32_t requested = sl_parallel_threads(threads, first, count);
    /* Not on the stack, because each worker holds an sl_error and musl's thread stacks have only 128 KiB. */
    worker *workers = malloc((size_t)requested * sizeof *workers + 1);
    if (workers == NULL) return sl_fail_memory(error, (uint64_t)requested * sizeof *workers);
    int32_t started = 0; /* if the system grants fewer threads, the work only takes longer */
    for (int32_t i = 0; i < requested; i++) {
        workers[i].shared = &all;
        workers[i].failed = count;
        workers[i].scratch = scratch + (uint64_t)i * scratch_size;
        if (i > 0 && !sl_thread_start(&workers[i].thread, work, &workers[i])) break;
        started++;
    }
    if (started > 0) work(&workers[0]);
    for (int32_t i = 1; i < started; i++) sl_thread_join(&workers[i].thread);

    uint64_t failed = sl_atomic_load(&all.failed);
    int32_t status = SL_OK;
    for (int32_t i = 0; i < started && failed < count; i++) {
        if (workers[i].failed != failed) continue;
        *error = workers[i].error;
        status = error->status;
    }
    *next = failed < count ? failed : sl_min_u64(sl_atomic_load(&all.next), count);
    free(workers);
    return status;
}
