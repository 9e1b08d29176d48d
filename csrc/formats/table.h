/* The table of one file. A format appends entries as it reads them; finish orders them, checks every
 * invariant in one place and freezes the columns. */
#ifndef SL_TABLE_H
#define SL_TABLE_H

#include "kernels/dtype.h"
#include "platform/arena.h"

/* Indices, and these plus one, are stored in 32 bits. */
#define SL_MAX_TENSORS UINT32_MAX

struct sl_table {
    sl_columns columns; /* what readers see, filled in by finish; until then holds only counts and sizes */
    sl_arena arena;
    /* The columns while they grow. Per tensor, all with the same capacity: */
    uint64_t *name_ends, *dim_ends, *begins, *ends;
    uint64_t *positions; /* of the entries in the file, for messages */
    uint8_t *dtypes;
    uint64_t capacity;
    /* The others: */
    char *names, *metadata_text;
    uint64_t *dims, *metadata_ends;
    uint64_t name_capacity, dim_capacity, metadata_capacity, metadata_end_capacity;
    /* How names are found, unless they ascend: by their hashes, or else by their order. */
    uint64_t *slots;
    uint64_t slot_mask;
    uint32_t *by_name;
};

/* A table with room for that many tensors, bytes of names and dims; it grows beyond them. */
int32_t sl_table_new(uint64_t tensors, uint64_t name_bytes, uint64_t dims, sl_table **table, sl_error *error);

/* A tensor as its file describes it. */
typedef struct sl_entry {
    const char *name; /* valid UTF-8 */
    size_t name_size;
    bool one_line;    /* the name is known to contain no newline; searching for one takes a tenth of the time to open a
                         large file */
    int64_t position; /* of the entry in the file, for messages */
    int32_t dtype;
    const uint64_t *dims; /* outermost first */
    uint64_t rank;
    uint64_t begin, end; /* of its bytes, relative to the data */
} sl_entry;

/* Copies the entry, name and dims too. */
int32_t sl_table_append(sl_table *table, const sl_entry *entry, sl_error *error);

/* Copies a key or a value of the metadata, valid UTF-8, in turn. */
int32_t sl_table_append_metadata(sl_table *table, const char *text, size_t size, sl_error *error);

/* What differs between formats. */
typedef struct sl_table_rules {
    const char *ranges; /* the word for byte ranges in messages */
    bool holes;         /* bytes may belong to no tensor, and data that begins past the end of the file is empty */
} sl_table_rules;

/* Checks names, sizes and byte ranges: the data is [data_begin, file_size), which the tensors must cover without
 * overlap. Byte ranges become absolute. */
int32_t sl_table_finish(sl_table *table, const sl_table_rules *rules, uint64_t data_begin, uint64_t file_size,
                        sl_error *error);

#endif
