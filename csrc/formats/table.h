/* Floor 4: the table of one file. A format appends entries as it reads them; finish orders them, checks every
 * invariant in one place and freezes the columns. */
#ifndef SL_TABLE_H
#define SL_TABLE_H

#include "formats/json.h"
#include "kernels/dtype.h"
#include "platform/arena.h"

/* Same numbers as the by_name column and the fields below. */
#define SL_MAX_TENSORS UINT32_MAX

struct sl_table {
    sl_arena arena;
    sl_columns columns; /* what readers see, filled in by finish; until then only counts and sizes are kept here */
    /* The columns while they grow. Per tensor, all with the same capacity: */
    uint64_t *name_ends, *dim_ends, *begins, *ends;
    uint64_t *positions; /* of the entries in the file, for messages */
    uint8_t *dtypes;
    uint64_t capacity;
    /* The others: */
    char *names, *metadata_text;
    uint64_t *dims, *metadata_ends;
    uint64_t name_capacity, dim_capacity, metadata_capacity, metadata_end_capacity;
};

/* With room for so many tensors, bytes of names and dims; it grows beyond them. */
int32_t sl_table_new(uint64_t tensors, uint64_t name_bytes, uint64_t dims, sl_table **table, sl_error *error);

/* Copies (decoded) name and dims. The byte range is as the file states it, relative to its data. */
int32_t sl_table_append(sl_table *table, const sl_json_text *name, int32_t dtype, const uint64_t *dims, uint64_t rank,
                        uint64_t begin, uint64_t end, sl_error *error);

int32_t sl_table_append_metadata(sl_table *table, const sl_json_text *text, sl_error *error);

/* Checks names, sizes and byte ranges: the data is [data_begin, file_size) and the tensors must cover it without overlap
 * and, unless `holes` are allowed, without hole. Byte ranges become absolute. `ranges` is what messages call them. With
 * holes the data may begin past the end of the file, and is nothing then. */
int32_t sl_table_finish(sl_table *table, uint64_t data_begin, uint64_t file_size, const char *ranges, bool holes,
                        sl_error *error);

#endif
