/* The sort of all tables. */
#include "base/sort.h"

/* Index at which the ascending run from `from` ends. */
static uint64_t run_end(const uint32_t *order, uint64_t from, uint64_t count, sl_compare_fn compare,
                        const void *context) {
    while (++from < count && compare(context, order[from - 1], order[from]) <= 0) {
    }
    return from < count ? from : count;
}

/* Merges the sorted ranges [begin, middle) and [middle, end). */
static void merge(const uint32_t *from, uint32_t *to, uint64_t begin, uint64_t middle, uint64_t end,
                  sl_compare_fn compare, const void *context) {
    uint64_t left = begin, right = middle;
    for (uint64_t out = begin; out < end; out++) {
        bool take_left = right == end || (left < middle && compare(context, from[left], from[right]) <= 0);
        to[out] = take_left ? from[left++] : from[right++];
    }
}

void sl_sort(uint32_t *order, uint32_t *spare, uint64_t count, sl_compare_fn compare, const void *context) {
    uint32_t *from = order, *to = spare, *ends = spare + count; /* `ends` holds the ends of runs */
    uint64_t runs = 0;
    for (uint64_t at = 0; at < count; ends[runs++] = (uint32_t)at) at = run_end(order, at, count, compare, context);
    while (runs > 1) {
        uint64_t begin = 0, merged = 0;
        for (uint64_t run = 0; run < runs; run += 2) {
            uint64_t middle = ends[run], end = run + 1 < runs ? ends[run + 1] : middle;
            merge(from, to, begin, middle, end, compare, context);
            ends[merged++] = (uint32_t)end;
            begin = end;
        }
        runs = merged;
        uint32_t *sorted = to;
        to = from;
        from = sorted;
    }
    if (from != order) memcpy(order, from, (size_t)count * sizeof *order);
}

int sl_compare_bytes(const char *a, uint64_t a_size, const char *b, uint64_t b_size) {
    int order = memcmp(a, b, (size_t)sl_min_u64(a_size, b_size));
    return order != 0 ? order : a_size < b_size ? -1 : a_size > b_size;
}
