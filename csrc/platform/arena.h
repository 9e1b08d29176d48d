/* The memory blocks of an object. They are freed together, so that every error path needs a single call. */
#ifndef SL_ARENA_H
#define SL_ARENA_H

#include "base/error.h"

/* A table has ten columns, two copies of each during a sort, and five blocks of scratch. */
#define SL_ARENA_BLOCKS 32

typedef struct sl_block {
    void *memory;
    uint64_t size;
} sl_block;

typedef struct sl_arena {
    sl_block blocks[SL_ARENA_BLOCKS];
    int32_t used;
} sl_arena;

/* Allocates a block of `size` bytes; 0 gives a valid pointer. */
int32_t sl_arena_alloc(sl_arena *arena, uint64_t size, void **out, sl_error *error);

/* Makes *array hold at least `needed` elements of `item` bytes, doubling *capacity so that n appends cost O(n). *array
 * is NULL at first, a block of this arena, or *capacity elements elsewhere. */
int32_t sl_arena_grow(sl_arena *arena, void **array, uint64_t *capacity, uint64_t needed, size_t item, sl_error *error);

void sl_arena_free(sl_arena *arena);

#endif
