/* Reads the fields of a binary format in order from a file, of which a growing prefix is held in memory. Read, never
 * mapped: a file that shrinks meanwhile causes an error, not a SIGBUS. Or from the first bytes of a file that the
 * caller has in memory. */
#ifndef SL_READER_H
#define SL_READER_H

#include "platform/platform.h"

typedef struct sl_reader {
    int64_t file;      /* SL_MEMORY: `given` */
    const void *given; /* the first bytes of the file */
    uint64_t given_size;
    uint64_t file_size;
    uint8_t *bytes; /* [0, held) of the file, owned; moves when more is held */
    uint64_t held;
    uint64_t at; /* of the next field */
} sl_reader;

/* Holds at least `size` bytes from reader->at on, which the file must have. SL_E_TRUNCATED when fewer were given, with
 * the number of bytes of the file that are needed as the position. */
int32_t sl_reader_hold(sl_reader *reader, uint64_t size, sl_error *error);

/* Releases bytes beyond reader->at, which were read ahead. */
void sl_reader_trim(sl_reader *reader);

/* Number of bytes left in the file. */
static inline uint64_t sl_reader_left(const sl_reader *reader) { return reader->file_size - reader->at; }

/* The next field, which must be held. */
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
