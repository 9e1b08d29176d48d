/* Compiler basics that every file needs: static asserts, checked arithmetic, little-endian loads. */
#ifndef SL_BASE_H
#define SL_BASE_H

#include <stdbool.h>
#include <string.h>

#include "safeload.h"

#if defined(__GNUC__) || defined(__clang__)
#define SL_PRINTF(format_index, first_index) __attribute__((format(printf, format_index, first_index)))
#define SL_LIKELY(x) __builtin_expect(!!(x), 1)
#define SL_INLINE static inline __attribute__((always_inline)) /* for arguments that must become constants */
#define SL_PREFETCH(address) __builtin_prefetch(address)
#define SL_PREFETCH_WRITE(address) __builtin_prefetch(address, 1)
#define SL_UNROLL _Pragma("GCC unroll 16") /* for loops over registers */
#else
#define SL_UNROLL
#define SL_PREFETCH(address) ((void)(address))
#define SL_PREFETCH_WRITE(address) ((void)(address))
#define SL_PRINTF(format_index, first_index)
#define SL_LIKELY(x) (x)
#define SL_INLINE static inline
#endif

_Static_assert(sizeof(size_t) == 8, "safeload maps whole files: it needs a 64-bit address space");
_Static_assert(sizeof(void *) == 8, "sl_job is laid out by Python for 64-bit pointers");

/* Sets *out to a + b or a * b; returns false and leaves *out untouched if the result does not fit. */
static inline bool sl_add_u64(uint64_t a, uint64_t b, uint64_t *out) {
    if (a > UINT64_MAX - b) return false;
    *out = a + b;
    return true;
}

static inline bool sl_mul_u64(uint64_t a, uint64_t b, uint64_t *out) {
    if (b != 0 && a > UINT64_MAX / b) return false;
    *out = a * b;
    return true;
}

static inline uint64_t sl_min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t sl_max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* Little-endian load and store at any alignment on any host. Written out, because compilers merge this into a single
 * load, but not a loop. */
static inline uint64_t sl_load_le64(const void *source) {
    const uint8_t *b = source;
    return (uint64_t)b[0] | (uint64_t)b[1] << 8 | (uint64_t)b[2] << 16 | (uint64_t)b[3] << 24 | (uint64_t)b[4] << 32 |
           (uint64_t)b[5] << 40 | (uint64_t)b[6] << 48 | (uint64_t)b[7] << 56;
}

static inline void sl_store_le64(void *destination, uint64_t value) {
    uint8_t *b = destination;
    b[0] = (uint8_t)value;
    b[1] = (uint8_t)(value >> 8);
    b[2] = (uint8_t)(value >> 16);
    b[3] = (uint8_t)(value >> 24);
    b[4] = (uint8_t)(value >> 32);
    b[5] = (uint8_t)(value >> 40);
    b[6] = (uint8_t)(value >> 48);
    b[7] = (uint8_t)(value >> 56);
}

static inline uint32_t sl_load_le32(const void *source) {
    const uint8_t *b = source;
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

/* Number of zero bits below the lowest set bit of value != 0. */
static inline int sl_trailing_zeros(uint64_t value) {
#if defined(__GNUC__) || defined(__clang__)
    return __builtin_ctzll(value);
#else
    int zeros = 0;
    for (; (value & 1) == 0; value >>= 1) zeros++;
    return zeros;
#endif
}

#endif
