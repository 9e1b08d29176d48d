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
 *   word_lanes(words, shift, numbers)   codes of WIDTH words
 *   nibbles_run, plane_run, words_run   codes [0, count) with a single scale
 *   nibbles_whole(codes, high_first, count, numbers, out)   like nibbles_run from a whole byte on, a multiple of TABLE
 */
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

/* Whole blocks that begin at a whole byte. They need no remainders, and short ones are of constant length. */
TARGET SL_INLINE void nibbles_blocks(const uint8_t *codes, bool high_first, size_t blocks, size_t block, numbers all,
                                     sl_scaling scaling, uint8_t *out) {
    if (scaling.zeros == NULL && scaling.biases == NULL) {
        const sl_scaling plain = {block, 0, scaling.scales, NULL, NULL};
        for (size_t at = 0; at < blocks; at++, codes += block / 2, out += 4 * block)
            nibbles_whole(codes, high_first, block, scaled(all, &plain, at), out);
        return;
    }
    for (size_t at = 0; at < blocks; at++, codes += block / 2, out += 4 * block)
        nibbles_whole(codes, high_first, block, scaled(all, &scaling, at), out);
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
    size_t i = 0, at = 0, block = scaling->block, end = block - scaling->first;
    bool whole = block % TABLE == 0 && (first + end) % 2 == 0;
    while (i < count) {
        if (whole && end - i == block && i + block <= count) {
            size_t blocks = (count - i) / block;
            const uint8_t *from = codes + (first + i) / 2;
            const sl_scaling own = sl_scaling_at(scaling, at);
            if (block == 16)
                nibbles_blocks(from, high_first, blocks, 16, all, own, out + 4 * i);
            else if (block == 32)
                nibbles_blocks(from, high_first, blocks, 32, all, own, out + 4 * i);
            else
                nibbles_blocks(from, high_first, blocks, block, all, own, out + 4 * i);
            i += blocks * block;
            at += blocks;
            end = i + block;
            continue;
        }
        nibbles_run(codes + (first + i) / 2, (first + i) % 2, high_first, (end < count ? end : count) - i,
                    scaled(all, scaling, at++), out + 4 * i);
        i = end;
        end += block;
    }
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

/* Each code has its own scale. */
TARGET static inline void words_each(const uint8_t *words, int shift, size_t count, const float *table,
                                     const sl_scaling *scaling, uint8_t *out) {
    numbers all = load_numbers(table);
    const sl_scaling own = *scaling;
    size_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        lanes value = word_lanes(words + 4 * i, shift, all);
        if (own.zeros != NULL) value = minus(value, load(own.zeros + i));
        value = times(value, load(own.scales + i));
        if (own.biases != NULL) value = plus(value, load(own.biases + i));
        store(out + 4 * i, value);
    }
    const sl_scaling rest = sl_scaling_at(scaling, i);
    sl_restore_scalar.words(words + 4 * i, shift, count - i, table, &rest, out + 4 * i);
}

TARGET static void NAME(words)(const uint8_t *words, int shift, size_t count, const float *table,
                               const sl_scaling *scaling, void *values) {
    uint8_t *out = values;
    numbers all = load_numbers(table);
    if (scaling != NULL && scaling->block == 1) {
        words_each(words, shift, count, table, scaling, out);
        return;
    }
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
