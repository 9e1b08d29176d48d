/* Copies past the cache. */
#include "kernels/stream.h"

#include "platform/platform.h"

#if defined(__SSE2__) || defined(_M_X64) /* MSVC does not define __SSE2__ */
#include <emmintrin.h>

/* Lines that are written only in part are stored plainly: past the cache they would take a read, too. */
#define LINE ((size_t)64)

void sl_stream_copy(void *destination, const void *source, size_t size) {
    uint8_t *out = destination;
    const uint8_t *in = source;
    size_t head = (size_t)(-(uintptr_t)out % LINE);
    if (head > size) head = size;
    memcpy(out, in, head);
    out += head;
    in += head;
    size -= head;
    for (; size >= LINE; size -= LINE, out += LINE, in += LINE)
        SL_UNROLL for (size_t i = 0; i < LINE; i += 16)
            _mm_stream_si128((__m128i *)(void *)(out + i), _mm_loadu_si128((const __m128i *)(const void *)(in + i)));
    memcpy(out, in, size);
}

void sl_stream_end(void) { _mm_sfence(); }

bool sl_stream_pays(const void *memory, uint64_t size, uint64_t from) {
    return size >= from && sl_platform_present(memory, size);
}

#else

void sl_stream_copy(void *destination, const void *source, size_t size) { memcpy(destination, source, size); }

void sl_stream_end(void) {}

bool sl_stream_pays(const void *memory, uint64_t size, uint64_t from) {
    (void)memory;
    (void)size;
    (void)from;
    return false;
}

#endif
