/* Sequential reading of a binary format's fields, from a file or from the first bytes of a file in memory. A growing
 * prefix of the file is held in memory. It is read and never mapped, so that a file that shrinks meanwhile causes an
 * error, not a SIGBUS. */
#ifndef SL_READER_H
#define SL_READER_H

#include "platform/platform.h"

typedef struct sl_reader {
    int64_t file;      /* SL_MEMORY for `given` */
    const void *given; /* the first bytes of the file in memory */
    uint64_t given_size;
    uint64_t file_size;
    uint8_t *bytes; /* [0, held) of the file, owned; moves if more is held */
    uint64_t held;
    uint64_t at; /* position of the next field */
} sl_reader;

/* Holds at least `size` bytes from reader->at on, which must be in the file. Returns SL_E_TRUNCATED if the caller's
 * memory has fewer; the position is then the number of bytes needed. */
int32_t sl_reader_hold(sl_reader *reader, uint64_t size, sl_error *error);

/* Releases bytes that were read beyond reader->at. */
void sl_reader_trim(sl_reader *reader);

/* Number of bytes left in the file. */
static inline uint64_t sl_reader_left(const sl_reader *reader) { return reader->file_size - reader->at; }

/* Returns the next field, which must be held. */
static inline uint32_t sl_reader_u32(sl_reader *reader) {
    uint32_t value = sl_load_le32(reader->bytes + reader->at);
    reader->at += 4;
    return value;
}

static inline uint64_t sl_reader_u64(sl_reader *reader) {
    uint64_t value = sl_load_le64(reader->bytes + reader->at);
    reader->at += 8;
    return value;
}

#endif
