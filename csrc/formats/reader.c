/* Sequential reading of a binary format's fields from a file. */
#include "formats/reader.h"

#include <stdlib.h>
#include <string.h>

/* Size of the first read: the whole header of a small model. Later reads double, so that n bytes cost O(n). */
#define FIRST_READ ((uint64_t)65536)

int32_t sl_reader_hold(sl_reader *reader, uint64_t size, sl_error *error) {
    uint64_t needed = reader->at + size;
    if (needed <= reader->held) return SL_OK;
    uint64_t target = reader->held > 0 ? 2 * reader->held : FIRST_READ;
    if (target < needed) target = needed;
    target = sl_min_u64(target, reader->file == SL_MEMORY ? reader->given_size : reader->file_size);
    if (target < needed)
        return sl_fail(error, SL_E_TRUNCATED, (int64_t)needed, "the header has more than the %llu bytes given",
                       (unsigned long long)reader->given_size);
    uint8_t *grown = realloc(reader->bytes, (size_t)target);
    if (grown == NULL) return sl_fail_memory(error, target);
    reader->bytes = grown;
    int32_t status = SL_OK;
    if (reader->file == SL_MEMORY)
        memcpy(grown + reader->held, (const uint8_t *)reader->given + reader->held, (size_t)(target - reader->held));
    else
        status = sl_file_read(reader->file, reader->held, grown + reader->held, target - reader->held, error);
    if (status == SL_OK) reader->held = target;
    return status;
}

void sl_reader_trim(sl_reader *reader) {
    uint8_t *shrunk = realloc(reader->bytes, (size_t)reader->at + 1); /* + 1: realloc to 0 bytes may return NULL */
    if (shrunk != NULL) reader->bytes = shrunk;
    reader->held = reader->at;
}
