/* What must hold of every parser's answer, whatever bytes it was given. A target calls these; the first property that
 * fails ends the process, which is how libFuzzer and replay.c learn of it. */
#ifndef FUZZ_PROPERTY_H
#define FUZZ_PROPERTY_H

#include <stdio.h>
#include <stdlib.h>

#include "formats/json.h"

#define REQUIRE(condition)                                                                 \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                       \
        }                                                                                  \
    } while (0)

/* The target, as libFuzzer calls it. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* An error with a status that no call returns, to see what a call does to it. */
sl_error untouched_error(void);

/* After a call that was given untouched_error() and `size` bytes: success left the error alone, a failure filled it. */
void check_error(const sl_error *error, int32_t status, uint64_t size);

/* A finished table over a file of `size` bytes: columns that agree with each other, names that are found, ranges that
 * are apart, in order and within the file. `data`: the file, to read the first and last byte of each range; NULL for a
 * file that is only said to have `size` bytes. */
void check_table(const sl_table *table, const uint8_t *data, uint64_t size);

/* Tensor i of a and tensor k of b: same name, dtype, shape and number of bytes. */
void check_same_tensor(const sl_columns *a, uint64_t i, const sl_columns *b, uint64_t k);

/* Both tables have the same tensors in the same order, those of b `shift` bytes later in the file. */
void check_shifted_table(const sl_table *a, const sl_table *b, uint64_t shift);

/* A file in memory that holds these bytes, as a descriptor; the next call gives the same one with other bytes. */
int memory_file(const uint8_t *data, size_t size);

#endif
