/* Fields of a binary format out of a file. */
#include "formats/reader.h"

#include <stdlib.h>

/* The first read: all of a small model's header. What follows doubles, so that n bytes cost O(n). */
#define FIRST_READ ((uint64_t)65536)

int32_t sl_reader_hold(sl_reader *reader, uint64_t size, sl_error *error) {
    uint64_t needed = reader->at + size;
    if (needed <= reader->held) return SL_OK;
    uint64_t wanted = reader->held > 0 ? 2 * reader->held : FIRST_READ;
    if (wanted < needed) wanted = needed;
    wanted = sl_min_u64(wanted, reader->file_size);
    uint8_t *grown = realloc(reader->bytes, (size_t)wanted);
    if (grown == NULL) return sl_fail_memory(error, wanted);
    reader->bytes = grown;
    int32_t status = sl_file_read(reader->file, reader->held, grown + reader->held, wanted - reader->held, error);
    if (status == SL_OK) reader->held = wanted;
    return status;
}

void sl_reader_trim(sl_reader *reader) {
    uint8_t *shrunk = realloc(reader->bytes, (size_t)reader->at + 1); /* of no bytes it could be NULL */
    if (shrunk != NULL) reader->bytes = shrunk;
    reader->held = reader->at;
}
