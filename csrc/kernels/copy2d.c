/* Two-dimensional copies with arbitrary strides. */
#include "kernels/copy2d.h"

#include "kernels/stream.h"

#if defined(__SSE2__) || defined(_M_X64) /* MSVC does not define __SSE2__ */
#define HAS_REGISTERS
#include <emmintrin.h>

typedef __m128i lanes;

static inline lanes load(const uint8_t *memory) { return _mm_loadu_si128((const __m128i *)(const void *)memory); }
static inline void store(uint8_t *memory, lanes a) { _mm_storeu_si128((__m128i *)(void *)memory, a); }

/* Interleaves the elements of the lower or upper halves of two registers. */
SL_INLINE lanes lower(size_t element, lanes a, lanes b) {
    switch (element) {
    case 1: return _mm_unpacklo_epi8(a, b);
    case 2: return _mm_unpacklo_epi16(a, b);
    case 4: return _mm_unpacklo_epi32(a, b);
    default: return _mm_unpacklo_epi64(a, b);
    }
}

SL_INLINE lanes upper(size_t element, lanes a, lanes b) {
    switch (element) {
    case 1: return _mm_unpackhi_epi8(a, b);
    case 2: return _mm_unpackhi_epi16(a, b);
    case 4: return _mm_unpackhi_epi32(a, b);
    default: return _mm_unpackhi_epi64(a, b);
    }
}

#elif defined(__aarch64__) && !defined(__AARCH64EB__)
#define HAS_REGISTERS
#include <arm_neon.h>

typedef uint8x16_t lanes;

static inline lanes load(const uint8_t *memory) { return vld1q_u8(memory); }
static inline void store(uint8_t *memory, lanes a) { vst1q_u8(memory, a); }

#define ZIP(zip, bits) \
    vreinterpretq_u8_u##bits(zip##_u##bits(vreinterpretq_u##bits##_u8(a), vreinterpretq_u##bits##_u8(b)))

SL_INLINE lanes lower(size_t element, lanes a, lanes b) {
    switch (element) {
    case 1: return vzip1q_u8(a, b);
    case 2: return ZIP(vzip1q, 16);
    case 4: return ZIP(vzip1q, 32);
    default: return ZIP(vzip1q, 64);
    }
}

SL_INLINE lanes upper(size_t element, lanes a, lanes b) {
    switch (element) {
    case 1: return vzip2q_u8(a, b);
    case 2: return ZIP(vzip2q, 16);
    case 4: return ZIP(vzip2q, 32);
    default: return ZIP(vzip2q, 64);
    }
}

#endif

/* Side of the square that is copied element by element: its cache lines on both sides stay in the first-level cache,
 * even if strides are powers of two and lines compete for the same sets. */
#define TILE ((uint64_t)16)

/* Bytes of a cache line. Transposing writes whole lines, which is several times faster than storing each register to
 * its destination. */
#define LINE ((uint64_t)64)

/* Adjacent lines that are stored past the cache together: single ones, each in another row, take twice as long. */
#define STREAM_LINES ((uint64_t)4)

static sl_plane at(sl_plane plane, uint64_t row, uint64_t column) {
    plane.memory += (int64_t)row * plane.row + (int64_t)column * plane.column;
    return plane;
}

/* `element` is a constant at each call, so that each memcpy is a single move. Writes follow the destination's rows. */
SL_INLINE void copy_tile(size_t element, uint64_t rows, uint64_t columns, sl_plane source, sl_plane destination) {
    for (uint64_t r = 0; r < rows; r++) {
        const uint8_t *in = source.memory + (int64_t)r * source.row;
        uint8_t *out = destination.memory + (int64_t)r * destination.row;
        for (uint64_t c = 0; c < columns; c++) {
            memcpy(out, in, element);
            in += source.column;
            out += destination.column;
        }
    }
}

static void copy_tiles(size_t element, uint64_t rows, uint64_t columns, sl_plane source, sl_plane destination) {
    for (uint64_t r = 0; r < rows; r += TILE)
        for (uint64_t c = 0; c < columns; c += TILE) {
            uint64_t down = sl_min_u64(TILE, rows - r), across = sl_min_u64(TILE, columns - c);
            sl_plane in = at(source, r, c), out = at(destination, r, c);
            switch (element) {
            case 1: copy_tile(1, down, across, in, out); break;
            case 2: copy_tile(2, down, across, in, out); break;
            case 4: copy_tile(4, down, across, in, out); break;
            default: copy_tile(8, down, across, in, out); break;
            }
        }
}

#ifdef HAS_REGISTERS

/* Transposes 16-byte lines, as many as each has elements. Repeatedly interleaving line i with the line half the lines
 * later gathers the elements of each column. Every x86-64 has SSE2, and every AArch64 NEON. */
SL_INLINE void transpose_registers(size_t element, const uint8_t *in, int64_t in_step, uint8_t *out, int64_t out_step) {
    const size_t side = sizeof(lanes) / element;
    lanes a[sizeof(lanes)], b[sizeof(lanes)];
    SL_UNROLL for (size_t i = 0; i < side; i++) a[i] = load(in + (int64_t)i * in_step);
    SL_UNROLL for (size_t n = 1; n < side; n *= 2) {
        SL_UNROLL for (size_t i = 0; i < side / 2; i++) {
            b[2 * i] = lower(element, a[i], a[i + side / 2]);
            b[2 * i + 1] = upper(element, a[i], a[i + side / 2]);
        }
        SL_UNROLL for (size_t i = 0; i < side; i++) a[i] = b[i];
    }
    SL_UNROLL for (size_t i = 0; i < side; i++) store(out + (int64_t)i * out_step, a[i]);
}

/* Transposes squares with whole lines on both sides, which lie side by side in the destination, through a block in the
 * first-level cache: if strides are powers of two, the lines of either side would evict each other before they are
 * complete. `squares` is a constant at each call. */
SL_INLINE void transpose_block(size_t element, uint64_t squares, sl_plane source, sl_plane destination) {
    const uint64_t side = LINE / element, step = sizeof(lanes) / element, run = squares * LINE;
    uint8_t block[STREAM_LINES * LINE * LINE];
    for (uint64_t c = 0; c < squares * side; c += step)
        for (uint64_t r = 0; r < side; r += step)
            transpose_registers(element, at(source, r, c).memory, source.column, block + r * run + c * element,
                                (int64_t)run);
    for (uint64_t r = 0; r < side; r++) {
        uint8_t *out = at(destination, r, 0).memory;
        if (destination.streams)
            sl_stream_copy(out, block + r * run, run);
        else
            memcpy(out, block + r * run, run);
    }
}

/* Transposes the part covered by whole squares, from the first row and column on. The source lines of the next square
 * below, or of the one after the next if there is none below, are prefetched, because the lines of a column are too far
 * apart for the processor's own prefetcher. */
SL_INLINE void transpose_squares(size_t element, uint64_t rows, uint64_t columns, sl_plane source,
                                 sl_plane destination) {
    const uint64_t side = LINE / element;
    for (uint64_t r = 0; r + side <= rows; r += side)
        for (uint64_t c = 0, across; c + side <= columns; c += across) {
            bool wide = destination.streams && c + STREAM_LINES * side <= columns;
            across = wide ? STREAM_LINES * side : side;
            for (uint64_t k = 0; k < across && r + side < rows; k++) SL_PREFETCH(at(source, r + side, c + k).memory);
            for (uint64_t k = 0; k < side && rows < 2 * side && c + 3 * side <= columns; k++)
                SL_PREFETCH(at(source, r, c + 2 * side + k).memory);
            if (wide)
                transpose_block(element, STREAM_LINES, at(source, r, c), at(destination, r, c));
            else
                transpose_block(element, 1, at(source, r, c), at(destination, r, c));
        }
}

/* Transposes the part outside of whole squares. */
SL_INLINE void transpose_rest(size_t element, uint64_t rows, uint64_t columns, sl_plane source, sl_plane destination) {
    const uint64_t step = sizeof(lanes) / element;
    for (uint64_t r = 0; r < rows; r += step)
        for (uint64_t c = 0; c < columns; c += step) {
            uint64_t down = sl_min_u64(step, rows - r), across = sl_min_u64(step, columns - c);
            sl_plane in = at(source, r, c), out = at(destination, r, c);
            if (down == step && across == step)
                transpose_registers(element, in.memory, in.column, out.memory, out.row);
            else
                copy_tile(element, down, across, in, out);
        }
}

SL_INLINE void transpose_elements(size_t element, uint64_t rows, uint64_t columns, sl_plane source,
                                  sl_plane destination) {
    const uint64_t side = LINE / element;
    uint64_t head = sl_min_u64(-(uintptr_t)destination.memory % LINE / element, columns);
    if (destination.row % (int64_t)LINE != 0) head = 0; /* each row begins at another position in a line */
    transpose_rest(element, rows, head, source, destination);
    source = at(source, 0, head);
    destination = at(destination, 0, head);
    columns -= head;
    uint64_t down = rows - rows % side, across = columns - columns % side;
    transpose_squares(element, rows, columns, source, destination);
    transpose_rest(element, rows, columns - across, at(source, 0, across), at(destination, 0, across));
    transpose_rest(element, rows - down, across, at(source, down, 0), at(destination, down, 0));
}

/* Transposes if source columns and destination rows are contiguous. */
static void transpose(size_t element, uint64_t rows, uint64_t columns, sl_plane source, sl_plane destination) {
    switch (element) {
    case 1: transpose_elements(1, rows, columns, source, destination); break;
    case 2: transpose_elements(2, rows, columns, source, destination); break;
    case 4: transpose_elements(4, rows, columns, source, destination); break;
    default: transpose_elements(8, rows, columns, source, destination); break;
    }
}

#else

static void transpose(size_t element, uint64_t rows, uint64_t columns, sl_plane source, sl_plane destination) {
    copy_tiles(element, rows, columns, source, destination);
}

#endif

void sl_copy_2d(size_t element, uint64_t rows, uint64_t columns, sl_plane source, sl_plane destination) {
    int64_t step = (int64_t)element;
    if (source.column == step && destination.column == step) {
        uint64_t run = columns * element;
        if (source.row == (int64_t)run && destination.row == (int64_t)run) {
            run *= rows;
            rows = 1;
        }
        for (uint64_t r = 0; r < rows; r++) memcpy(at(destination, r, 0).memory, at(source, r, 0).memory, (size_t)run);
    } else if (destination.row == step && destination.column != step) { /* rows are contiguous, not columns */
        sl_plane in = {source.memory, source.column, source.row, source.streams};
        sl_plane out = {destination.memory, destination.column, destination.row, destination.streams};
        sl_copy_2d(element, columns, rows, in, out);
    } else if (destination.column == step && source.row == step)
        transpose(element, rows, columns, source, destination);
    else
        copy_tiles(element, rows, columns, source, destination);
}
