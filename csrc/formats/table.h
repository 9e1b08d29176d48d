/* The table of a file. A format appends entries while it reads them; finish sorts the entries, checks every invariant
 * in one place, and freezes the columns. */
#ifndef SL_TABLE_H
#define SL_TABLE_H

#include "kernels/dtype.h"
#include "platform/arena.h"

/* Indices, and indices plus one, are stored in 32 bits. */
#define SL_MAX_TENSORS UINT32_MAX

struct sl_table {
    sl_columns columns; /* the readers' view, filled in by finish; until then only counts and sizes */
    sl_arena arena;
    /* The columns while they grow. Per tensor, all with equal capacity: */
    uint64_t *name_ends, *dim_ends, *begins, *ends;
    uint64_t *positions; /* of the entries in the file, for messages */
    uint8_t *dtypes;
    uint64_t capacity;
    /* Other columns: */
    char *names, *metadata_text;
    uint64_t *dims, *metadata_ends;
    uint64_t name_capacity, dim_capacity, metadata_capacity, metadata_end_capacity;
    /* The index of names, unless they ascend: by hash or, if there are no slots, by order. */
    uint64_t *slots;
    uint64_t slot_mask;
    uint32_t *by_name;
};

/* Creates a table with room for this number of tensors, bytes of names, and dims; it grows beyond them. */
int32_t sl_table_new(uint64_t tensors, uint64_t name_bytes, uint64_t dims, sl_table **table, sl_error *error);

/* A tensor as described by its file. */
typedef struct sl_entry {
    const char *name; /* valid UTF-8 */
    size_t name_size;
    bool one_line;    /* whether the name is known to contain no newline; a search would slow down opening by a tenth */
    int64_t position; /* of the entry in the file, for messages */
    int32_t dtype;
    const uint64_t *dims; /* outermost first */
    uint64_t rank;
    uint64_t begin, end; /* of the bytes, relative to the data */
} sl_entry;

/* Appends a copy of the entry, including its name and dims. */
int32_t sl_table_append(sl_table *table, const sl_entry *entry, sl_error *error);

/* Appends a copy of a metadata key or value, in turn; must be valid UTF-8. */
int32_t sl_table_append_metadata(sl_table *table, const char *text, size_t size, sl_error *error);

/* Differences between formats. */
typedef struct sl_table_rules {
    const char *ranges; /* the word for byte ranges in messages */
    bool holes;         /* whether bytes may belong to no tensor; then data past the end of the file is empty */
} sl_table_rules;

/* Checks names, sizes and byte ranges: tensors must cover the data, [data_begin, file_size), without overlaps. Byte
 * ranges become absolute. */
int32_t sl_table_finish(sl_table *table, const sl_table_rules *rules, uint64_t data_begin, uint64_t file_size,
                        sl_error *error);

#endif
