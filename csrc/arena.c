#include "arena.h"

#include <stdlib.h>

/* A first block that holds a model of a few hundred tensors without growing. */
#define FIRST_CAPACITY 256

static int32_t resize(sl_arena *arena, void **array, uint64_t size, sl_error *error) {
    int32_t slot = 0;
    while (slot < arena->used && arena->blocks[slot] != *array) slot++;
    if (*array == NULL || slot == arena->used) {
        slot = arena->used;
        if (slot == SL_ARENA_BLOCKS)
            return sl_fail(error, SL_E_MEMORY, -1, "more than %d blocks in one arena", SL_ARENA_BLOCKS);
    }
    void *grown = realloc(slot < arena->used ? *array : NULL, size > 0 ? size : 1);
    if (grown == NULL) return sl_fail_memory(error, size);
    if (slot == arena->used) arena->used++;
    arena->blocks[slot] = grown;
    *array = grown;
    return SL_OK;
}

int32_t sl_arena_alloc(sl_arena *arena, uint64_t size, void **out, sl_error *error) {
    void *block = NULL;
    int32_t status = resize(arena, &block, size, error);
    if (status == SL_OK) *out = block;
    return status;
}

int32_t sl_arena_grow(sl_arena *arena, void **array, uint64_t *capacity, uint64_t needed, size_t item,
                      sl_error *error) {
    if (SL_LIKELY(needed <= *capacity)) return SL_OK;
    uint64_t wanted = *capacity < FIRST_CAPACITY ? FIRST_CAPACITY : *capacity;
    uint64_t size;
    while (wanted < needed)
        if (!sl_mul_u64(wanted, 2, &wanted)) return sl_fail_memory(error, needed);
    if (!sl_mul_u64(wanted, item, &size)) return sl_fail_memory(error, needed);
    int32_t status = resize(arena, array, size, error);
    if (status == SL_OK) *capacity = wanted;
    return status;
}

void sl_arena_free(sl_arena *arena) {
    for (int32_t i = 0; i < arena->used; i++) free(arena->blocks[i]);
    arena->used = 0;
}
