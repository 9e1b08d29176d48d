/* Dequantization in terms of a vector of f32 and a table of 16 f32 in registers. Included only by the files of the
 * tiers, hence no prefix. The including file must define:
 *
 *   TARGET                        marks functions of its instruction set
 *   NAME(stem)                    the name of a kernel
 *   WIDTH                         lanes of a vector
 *   lanes, load, store, same      a vector; from memory, to memory, with a number in all lanes
 *   minus, times, plus            operations on two vectors
 *   square(all, row, out, line)   WIDTH rows of WIDTH columns of grouped codes, transposed
 *   numbers, load_numbers         a table of 16 numbers; from memory
 *   repeat_four(table)            a table of 4 numbers, 4 times
 *   scaled(numbers, scaling, at)  the table's numbers for the codes of element `at` of a scaling
 *   nibbles_run, plane_run, words_run   codes [0, count) with a single scale */
#ifndef SL_RESTORE_LANES_H
#define SL_RESTORE_LANES_H

#include "kernels/restore.h"

/* A scale shared by at least this number of values is applied to the table instead of the values. */
#define TABLE ((size_t)16)

/* Values [0, count) with a single scale; the scalar kernel takes the remainder. */
TARGET static inline void scale_run(uint8_t *out, size_t count, const sl_scaling *one) {
    lanes factor = same(*one->scales), zero = same(one->zeros != NULL ? *one->zeros : 0);
    lanes bias = same(one->biases != NULL ? *one->biases : 0);
    size_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        lanes value = load(out + 4 * i);
        if (one->zeros != NULL) value = minus(value, zero);
        value = times(value, factor);
        if (one->biases != NULL) value = plus(value, bias);
        store(out + 4 * i, value);
    }
    if (i < count) sl_restore_scalar.scale(out + 4 * i, count - i, one);
}

/* Each value has its own scale. */
TARGET static void scale_each(uint8_t *out, size_t count, const sl_scaling *all) {
    size_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        lanes value = load(out + 4 * i);
        if (all->zeros != NULL) value = minus(value, load(all->zeros + i));
        value = times(value, load(all->scales + i));
        if (all->biases != NULL) value = plus(value, load(all->biases + i));
        store(out + 4 * i, value);
    }
    const sl_scaling rest = sl_scaling_at(all, i);
    sl_restore_scalar.scale(out + 4 * i, count - i, &rest);
}

TARGET static void NAME(scale)(void *values, size_t count, const sl_scaling *scaling) {
    uint8_t *out = values;
    if (scaling->block == 1) {
        scale_each(out, count, scaling);
        return;
    }
    size_t at = 0, end = scaling->block - scaling->first;
    for (size_t i = 0; i < count; i = end, end += scaling->block, at++) {
        const sl_scaling one = sl_scaling_at(scaling, at);
        scale_run(out + 4 * i, (end < count ? end : count) - i, &one);
    }
}

TARGET static void NAME(nibbles)(const uint8_t *codes, size_t first, bool high_first, size_t count, const float *table,
                                 const sl_scaling *scaling, void *values) {
    uint8_t *out = values;
    numbers all = load_numbers(table);
    if (scaling == NULL || scaling->block < TABLE) {
        nibbles_run(codes, first, high_first, count, all, out);
        if (scaling != NULL) NAME(scale)(values, count, scaling);
        return;
    }
    size_t at = 0, end = scaling->block - scaling->first;
    for (size_t i = 0; i < count; i = end, end += scaling->block, at++)
        nibbles_run(codes + (first + i) / 2, (first + i) % 2, high_first, (end < count ? end : count) - i,
                    scaled(all, scaling, at), out + 4 * i);
}

TARGET static void NAME(plane)(const uint8_t *bytes, int shift, int bits, size_t count, const float *table,
                               const sl_scaling *scaling, void *values) {
    uint8_t *out = values;
    numbers all = bits == 4 ? load_numbers(table) : repeat_four(table);
    if (scaling == NULL || scaling->block < TABLE) {
        plane_run(bytes, shift, bits, count, all, out);
        if (scaling != NULL) NAME(scale)(values, count, scaling);
        return;
    }
    size_t at = 0, end = scaling->block - scaling->first;
    for (size_t i = 0; i < count; i = end, end += scaling->block, at++)
        plane_run(bytes + i, shift, bits, (end < count ? end : count) - i, scaled(all, scaling, at), out + 4 * i);
}

TARGET static void NAME(words)(const uint8_t *words, int shift, size_t count, const float *table,
                               const sl_scaling *scaling, void *values) {
    uint8_t *out = values;
    numbers all = load_numbers(table);
    if (scaling == NULL || scaling->block < TABLE) {
        words_run(words, shift, count, all, out);
        if (scaling != NULL) NAME(scale)(values, count, scaling);
        return;
    }
    size_t at = 0, end = scaling->block - scaling->first;
    for (size_t i = 0; i < count; i = end, end += scaling->block, at++)
        words_run(words + 4 * i, shift, (end < count ? end : count) - i, scaled(all, scaling, at), out + 4 * i);
}

TARGET static void NAME(grouped)(const sl_grouped *codes, size_t begin, size_t end, size_t columns, void *values,
                                 size_t line) {
    size_t c = 0;
    for (; c + WIDTH <= columns; c += WIDTH) {
        const sl_grouped some = sl_grouped_at(codes, c);
        uint8_t *out = (uint8_t *)values + c * line;
        size_t row = begin;
        for (; row + WIDTH <= end; row += WIDTH, out += 4 * WIDTH) square(&some, row, out, line);
        sl_restore_scalar.grouped(&some, row, end, WIDTH, out, line);
    }
    if (c == columns) return;
    const sl_grouped rest = sl_grouped_at(codes, c);
    sl_restore_scalar.grouped(&rest, begin, end, columns - c, (uint8_t *)values + c * line, line);
}

#endif
