/* What the programs of this folder share: failures that say where, inputs that are the same bytes on every machine,
 * digests. */
#ifndef HARNESS_H
#define HARNESS_H

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"

/* Of the program; main returns it. */
static int failures;

#define FAIL(...) \
    (failures++, fprintf(stderr, "%s:%d: ", __FILE__, __LINE__), fprintf(stderr, __VA_ARGS__), fputc('\n', stderr))
#define EXPECT(condition) ((condition) ? (void)0 : (void)FAIL("not so: %s", #condition))

/* FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/: over bytes, so that it is the same in any byte order. */
#define DIGEST_START UINT64_C(0xcbf29ce484222325)

static inline uint64_t digest(uint64_t state, const void *memory, size_t size) {
    const uint8_t *bytes = memory;
    for (size_t i = 0; i < size; i++) state = (state ^ bytes[i]) * UINT64_C(0x100000001b3);
    return state;
}

/* SplitMix64, https://prng.di.unimi.it/splitmix64.c */
static inline uint64_t random_u64(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static inline void *allocate(size_t size) {
    void *memory = malloc(size + 1);
    if (memory == NULL) {
        fprintf(stderr, "no memory for %zu bytes\n", size);
        exit(2);
    }
    return memory;
}

#endif
