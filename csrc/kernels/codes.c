/* Packing of codes. */
#include "kernels/codes.h"

/* A vector of 32-bit words, and the operations that exchange bits of two vectors. */
#if defined(__SSE2__) || defined(_M_X64) /* MSVC does not define __SSE2__ */
#define HAS_SSE2
#include <emmintrin.h>
typedef __m128i vector;
#define LOAD(memory) _mm_loadu_si128((const __m128i *)(const void *)(memory))
#define STORE(memory, a) _mm_storeu_si128((__m128i *)(void *)(memory), a)
#define SAME(word) _mm_set1_epi32((int)(word))
#define XOR(a, b) _mm_xor_si128(a, b)
#define AND(a, b) _mm_and_si128(a, b)
#define UP(a, bits) _mm_slli_epi32(a, bits)
#define DOWN(a, bits) _mm_srli_epi32(a, bits)
#elif defined(__aarch64__) && !defined(__AARCH64EB__)
#define HAS_NEON
#include <arm_neon.h>
typedef uint32x4_t vector;
#define LOAD(memory) vreinterpretq_u32_u8(vld1q_u8(memory))
#define STORE(memory, a) vst1q_u8(memory, vreinterpretq_u8_u32(a))
#define SAME(word) vdupq_n_u32(word)
#define XOR(a, b) veorq_u32(a, b)
#define AND(a, b) vandq_u32(a, b)
#define UP(a, bits) vshlq_n_u32(a, bits)
#define DOWN(a, bits) vshrq_n_u32(a, bits)
#else
typedef uint32_t vector;
#define LOAD(memory) sl_load_le32(memory)
#define STORE(memory, a) store_word(memory, a)
#define SAME(word) (word)
#define XOR(a, b) ((a) ^ (b))
#define AND(a, b) ((a) & (b))
#define UP(a, bits) ((a) << (bits))
#define DOWN(a, bits) ((a) >> (bits))
#endif

/* A mask of the low `bits` bits of each of eight bytes. */
static uint64_t mask_of(int bits) { return (((uint64_t)1 << bits) - 1) * UINT64_C(0x0101010101010101); }

bool sl_codes_bytes(const sl_codes *codes, uint64_t width, uint64_t *bytes) {
    if (codes->block_bytes == 0) {
        *bytes = width / 8 * (uint64_t)codes->bits + (width % 8 * (uint64_t)codes->bits + 7) / 8;
        return true;
    }
    uint64_t own = SL_CODES_UNIT / 8 * (uint64_t)codes->bits, before, blocks = width / SL_CODES_UNIT;
    *bytes = 0;
    return blocks == 0 || (codes->block_bytes >= own && sl_mul_u64(blocks - 1, codes->block_bytes, &before) &&
                           sl_add_u64(before, own, bytes));
}

/* Returns the low nibbles of eight bytes as a word. */
static uint32_t nibbles(uint64_t eight) {
    eight = (eight | eight >> 4) & UINT64_C(0x00FF00FF00FF00FF);
    eight = (eight | eight >> 8) & UINT64_C(0x0000FFFF0000FFFF);
    return (uint32_t)(eight | eight >> 16);
}

static void store_word(uint8_t *out, uint32_t word) {
    for (int i = 0; i < 4; i++, word >>= 8) out[i] = (uint8_t)word;
}

/* Packs whole words of nibbles and returns the number of codes. Every x86-64 has SSE2, and every AArch64 NEON; plain C
 * takes nine times as long. */
static uint64_t put_nibbles(const uint8_t *bytes, uint64_t count, uint8_t *out) {
    uint64_t i = 0;
#if defined(HAS_SSE2)
    const __m128i nibble = _mm_set1_epi8(15), low = _mm_set1_epi16(255);
    for (; i + 32 <= count; i += 32, out += 16) {
        __m128i pairs[2];
        for (int k = 0; k < 2; k++) {
            __m128i codes = _mm_loadu_si128((const __m128i *)(const void *)(bytes + i + 16 * k));
            codes = _mm_and_si128(codes, nibble);
            pairs[k] = _mm_and_si128(_mm_or_si128(codes, _mm_srli_epi16(codes, 4)), low);
        }
        _mm_storeu_si128((__m128i *)(void *)out, _mm_packus_epi16(pairs[0], pairs[1]));
    }
#elif defined(HAS_NEON)
    for (; i + 32 <= count; i += 32, out += 16) {
        uint8x16x2_t pairs = vld2q_u8(bytes + i);
        vst1q_u8(out, vorrq_u8(vandq_u8(pairs.val[0], vdupq_n_u8(15)), vshlq_n_u8(pairs.val[1], 4)));
    }
#endif
    for (; i + 8 <= count; i += 8, out += 4) store_word(out, nibbles(sl_load_le64(bytes + i) & mask_of(4)));
    return i;
}

/* Adds a code to a stream: the first bits that lie in a byte make the rest of it 0. */
static void put_code(uint8_t *row, uint64_t bit, int bits, uint8_t code) {
    unsigned shift = (unsigned)(bit % 8), value = (code & ((1u << bits) - 1)) << shift;
    uint8_t *byte = row + bit / 8;
    byte[0] = (uint8_t)(shift == 0 ? value : byte[0] | value);
    if (shift + (unsigned)bits > 8) byte[1] = (uint8_t)(value >> 8);
}

static void put_stream(int bits, const uint8_t *bytes, uint64_t first, uint64_t count, uint8_t *row) {
    uint64_t i = 0, width = (uint64_t)bits, mask = mask_of(bits);
    if (bits == 8) {
        memcpy(row + first, bytes, (size_t)count);
        return;
    }
    for (; i < count && (first + i) % 8 != 0; i++) put_code(row, (first + i) * width, bits, bytes[i]);
    uint8_t *out = row + (first + i) / 8 * width;
    if (bits == 4) i += put_nibbles(bytes + i, count - i, out);
    for (; i + 8 <= count; i += 8, out += bits) {
        uint64_t eight = sl_load_le64(bytes + i) & mask, all = 0;
        for (int k = 0; k < 8; k++, eight >>= 8) all |= (eight & 255) << k * bits;
        for (int k = 0; k < bits; k++, all >>= 8) out[k] = (uint8_t)all;
    }
    for (; i < count; i++) put_code(row, (first + i) * width, bits, bytes[i]);
}

/* Codes 0, 2, 4, 6, 1, 3, 5, 7 of each eight, from the lowest nibble up. */
static void put_words(const uint8_t *bytes, uint64_t count, uint8_t *out) {
    for (; count > 0; count -= 8, bytes += 8, out += 4) {
        uint64_t eight = sl_load_le64(bytes) & mask_of(4), even = eight & UINT64_C(0x00FF00FF00FF00FF);
        uint64_t odd = eight >> 8 & UINT64_C(0x00FF00FF00FF00FF);
        even = (even | even >> 12) & UINT64_C(0x000000FF000000FF);
        odd = (odd | odd >> 12) & UINT64_C(0x000000FF000000FF);
        store_word(out, (uint32_t)(even | even >> 24 | odd << 16 | odd >> 8));
    }
}

/* Code i of 32 and code i + 16 share byte i. */
static void put_halves(const uint8_t *bytes, uint8_t *out) {
    for (int i = 0; i < 16; i += 8)
        sl_store_le64(out + i, (sl_load_le64(bytes + i) & mask_of(4)) | (sl_load_le64(bytes + i + 16) & mask_of(4))
                                                                            << 4);
}

/* Exchanges the upper of each two fields of `bits` bits in `a` for the lower one in `b`. */
#define EXCHANGE(a, b, bits, lower)                       \
    do {                                                  \
        vector moved = AND(XOR(DOWN(a, bits), b), lower); \
        b = XOR(b, moved);                                \
        a = XOR(a, UP(moved, bits));                      \
    } while (0)

void sl_codes_turn(int order, uint32_t flip, const uint8_t *words, uint64_t step, uint64_t count, uint8_t *out) {
    const vector halves = SAME(0x0000FFFF), bytes = SAME(0x00FF00FF), nibble = SAME(0x0F0F0F0F), flips = SAME(flip);
    const uint64_t size = 4 * count, last = size - sizeof(vector);
    for (uint64_t at = 0; at < size; at += sizeof(vector)) {
        if (at > last) at = last; /* some words again */
        vector a[8];
        SL_UNROLL for (size_t k = 0; k < 8; k++)
            a[k] = XOR(LOAD(words + (order == SL_ORDER_WORDS ? 2 * k % 8 + k / 4 : k) * step + at), flips);
        SL_UNROLL for (size_t k = 0; k < 4; k++) EXCHANGE(a[k], a[k + 4], 16, halves);
        SL_UNROLL for (size_t k = 0; k < 4; k++) EXCHANGE(a[k + k / 2 * 2], a[k + k / 2 * 2 + 2], 8, bytes);
        SL_UNROLL for (size_t k = 0; k < 4; k++) EXCHANGE(a[2 * k], a[2 * k + 1], 4, nibble);
        SL_UNROLL for (size_t k = 0; k < 8; k++) STORE(out + k * size + at, a[k]);
    }
}

void sl_codes_put(const sl_codes *codes, const uint8_t *bytes, uint64_t first, uint64_t count, uint8_t *row) {
    if (codes->block_bytes == 0 && codes->order == SL_ORDER_STREAM) {
        put_stream(codes->bits, bytes, first, count, row);
        return;
    }
    if (codes->block_bytes == 0 && codes->order == SL_ORDER_WORDS) {
        put_words(bytes, count, row + first / 2);
        return;
    }
    uint64_t step = codes->block_bytes > 0 ? codes->block_bytes : SL_CODES_UNIT / 2;
    row += first / SL_CODES_UNIT * step;
    for (; count > 0; count -= SL_CODES_UNIT, bytes += SL_CODES_UNIT, row += step) {
        if (codes->order == SL_ORDER_HALVES)
            put_halves(bytes, row);
        else if (codes->order == SL_ORDER_WORDS)
            put_words(bytes, SL_CODES_UNIT, row);
        else
            put_stream(codes->bits, bytes, 0, SL_CODES_UNIT, row);
    }
}
