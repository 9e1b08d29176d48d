#include "sort.h"

/* Index where the ascending run that starts at `from` ends. */
static uint64_t run_end(const uint32_t *order, uint64_t from, uint64_t count, sl_compare_fn compare,
                        const void *context) {
    while (++from < count && compare(context, order[from - 1], order[from]) <= 0) {
    }
    return from < count ? from : count;
}

void sl_sort(uint32_t *order, uint32_t *spare, uint64_t count, sl_compare_fn compare, const void *context) {
    for (bool merged = true; merged;) {
        merged = false;
        for (uint64_t begin = 0; begin < count;) {
            uint64_t middle = run_end(order, begin, count, compare, context);
            if (middle == count) break;
            uint64_t end = run_end(order, middle, count, compare, context);
            uint64_t left = begin, right = middle;
            for (uint64_t out = begin; out < end; out++) {
                bool take_left = right == end || (left < middle && compare(context, order[left], order[right]) <= 0);
                spare[out] = take_left ? order[left++] : order[right++];
            }
            memcpy(order + begin, spare + begin, (size_t)(end - begin) * sizeof *order);
            begin = end;
            merged = true;
        }
    }
}

int sl_compare_bytes(const char *a, uint64_t a_size, const char *b, uint64_t b_size) {
    int order = memcmp(a, b, (size_t)sl_min_u64(a_size, b_size));
    return order != 0 ? order : a_size < b_size ? -1 : a_size > b_size;
}
