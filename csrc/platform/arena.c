/* Blocks of memory that are freed together. */
#include "platform/arena.h"

#include <stdlib.h>

#include "platform/platform.h"

/* Blocks of at least a huge page come from the system in huge pages: with malloc, the page faults for a large table
 * would take as long as parsing. */
#define LARGE_BLOCK ((uint64_t)2 << 20)

static void *take(uint64_t size) { return size >= LARGE_BLOCK ? sl_memory_alloc(size) : malloc((size_t)size); }

static void give_back(const sl_block *block) {
    if (block->size >= LARGE_BLOCK)
        sl_memory_free(block->memory, block->size);
    else
        free(block->memory);
}

int32_t sl_arena_alloc(sl_arena *arena, uint64_t size, void **out, sl_error *error) {
    if (arena->used == SL_ARENA_BLOCKS)
        return sl_fail(error, SL_E_MEMORY, -1, "more than %d blocks in one arena", SL_ARENA_BLOCKS);
    sl_block block = {NULL, size > 0 ? size : 1};
    block.memory = take(block.size);
    if (block.memory == NULL) return sl_fail_memory(error, size);
    arena->blocks[arena->used++] = block;
    *out = block.memory;
    return SL_OK;
}

int32_t sl_arena_grow(sl_arena *arena, void **array, uint64_t *capacity, uint64_t needed, size_t item,
                      sl_error *error) {
    if (needed <= *capacity) return SL_OK;
    uint64_t target = *capacity > 0 ? *capacity : needed, size;
    while (target < needed)
        if (!sl_mul_u64(target, 2, &target)) return sl_fail_memory(error, needed);
    if (!sl_mul_u64(target, item, &size)) return sl_fail_memory(error, needed);
    int32_t slot = 0;
    while (slot < arena->used && arena->blocks[slot].memory != *array) slot++;
    void *grown;
    if (slot == arena->used) {
        int32_t status = sl_arena_alloc(arena, size, &grown, error);
        if (status != SL_OK) return status;
        if (*array != NULL) memcpy(grown, *array, (size_t)(*capacity * item));
    } else {
        sl_block block = {take(size), size};
        if (block.memory == NULL) return sl_fail_memory(error, size);
        memcpy(block.memory, *array, (size_t)(*capacity * item));
        give_back(&arena->blocks[slot]);
        arena->blocks[slot] = block;
        grown = block.memory;
    }
    *array = grown;
    *capacity = target;
    return SL_OK;
}

void sl_arena_free(sl_arena *arena) {
    for (int32_t i = 0; i < arena->used; i++) give_back(&arena->blocks[i]);
    arena->used = 0;
}
