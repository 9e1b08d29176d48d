#include "table.h"

#include <stdio.h>
#include <stdlib.h>

#include "sort.h"

int32_t sl_table_new(sl_table **table, sl_error *error) {
    sl_table *made = calloc(1, sizeof *made);
    if (made == NULL) return sl_fail_memory(error, sizeof *made);
    *table = made;
    return SL_OK;
}

void sl_table_free(sl_table *table) {
    if (table == NULL) return;
    sl_arena_free(&table->arena);
    free(table);
}

const sl_columns *sl_table_columns(const sl_table *table) { return &table->columns; }

static int32_t grow_names(sl_table *table, uint64_t more, sl_error *error) {
    return sl_arena_grow(&table->arena, (void **)&table->names, &table->name_capacity, table->columns.names_size + more,
                         1, error);
}

int32_t sl_table_append(sl_table *table, const sl_json_text *name, int32_t dtype, const uint64_t *dims, uint64_t rank,
                        uint64_t begin, uint64_t end, sl_error *error) {
    sl_columns *columns = &table->columns;
    if (columns->count == SL_MAX_TENSORS)
        return sl_fail(error, SL_E_LIMIT, name->position, "more than %llu tensors", (unsigned long long)SL_MAX_TENSORS);
    int32_t status = sl_arena_grow(&table->arena, (void **)&table->entries, &table->entry_capacity, columns->count + 1,
                                   sizeof *table->entries, error);
    if (status == SL_OK) status = grow_names(table, name->size + 1, error);
    if (status == SL_OK)
        status = sl_arena_grow(&table->arena, (void **)&table->dims, &table->dim_capacity, table->dim_count + rank,
                               sizeof *table->dims, error);
    if (status != SL_OK) return status;

    sl_entry *entry = &table->entries[columns->count++];
    entry->name_begin = columns->names_size;
    entry->name_end = entry->name_begin + sl_json_decode(name, table->names + entry->name_begin);
    table->names[entry->name_end] = '\n';
    columns->names_size = entry->name_end + 1;
    entry->dim_begin = table->dim_count;
    for (uint64_t i = 0; i < rank; i++) table->dims[table->dim_count++] = dims[i];
    entry->dim_end = table->dim_count;
    entry->begin = begin;
    entry->end = end;
    entry->position = name->position;
    entry->dtype = dtype;
    return SL_OK;
}

int32_t sl_table_append_metadata(sl_table *table, const sl_json_text *text, sl_error *error) {
    sl_columns *columns = &table->columns;
    uint64_t ends = columns->metadata_count; /* counts texts until finish, pairs from then on */
    int32_t status = sl_arena_grow(&table->arena, (void **)&table->metadata_text, &table->metadata_capacity,
                                   columns->metadata_size + text->size, 1, error);
    if (status == SL_OK)
        status = sl_arena_grow(&table->arena, (void **)&table->metadata_ends, &table->metadata_end_capacity, ends + 1,
                               sizeof *table->metadata_ends, error);
    if (status != SL_OK) return status;
    if (text->size > 0) columns->metadata_size += sl_json_decode(text, table->metadata_text + columns->metadata_size);
    table->metadata_ends[ends] = columns->metadata_size;
    columns->metadata_count = ends + 1;
    return SL_OK;
}

/* ---- order ---- */

static int compare_ranges(const void *context, uint32_t a, uint32_t b) {
    const sl_table *table = context;
    const sl_entry *x = &table->entries[a], *y = &table->entries[b];
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

static int compare_names(const void *context, uint32_t a, uint32_t b) {
    const sl_table *table = context;
    const sl_entry *x = &table->entries[a], *y = &table->entries[b];
    return sl_compare_bytes(table->names + x->name_begin, x->name_end - x->name_begin, table->names + y->name_begin,
                            y->name_end - y->name_begin);
}

/* Entries, and with them all columns, into the order of their bytes. */
static int32_t order_by_range(sl_table *table, uint32_t *order, uint32_t *spare, sl_error *error) {
    uint64_t count = table->columns.count;
    if (sl_is_sorted(order, count, compare_ranges, table)) return SL_OK;
    sl_sort(order, spare, count, compare_ranges, table);

    sl_entry *entries;
    char *names;
    int32_t status = sl_arena_alloc(&table->arena, count * sizeof *entries, (void **)&entries, error);
    if (status == SL_OK)
        status = sl_arena_alloc(&table->arena, table->columns.names_size, (void **)&names, error);
    if (status != SL_OK) return status;
    uint64_t used = 0;
    for (uint64_t i = 0; i < count; i++) {
        entries[i] = table->entries[order[i]];
        uint64_t size = entries[i].name_end - entries[i].name_begin;
        memcpy(names + used, table->names + entries[i].name_begin, (size_t)size + 1);
        entries[i].name_begin = used;
        entries[i].name_end = used + size;
        used += size + 1;
    }
    table->entries = entries;
    table->names = names;
    for (uint64_t i = 0; i < count; i++) order[i] = (uint32_t)i;
    return SL_OK;
}

/* ---- invariants ---- */

static const char *quoted_name(char out[SL_QUOTE_SIZE], const sl_table *table, const sl_entry *entry) {
    return sl_quote(out, table->names + entry->name_begin, (size_t)(entry->name_end - entry->name_begin));
}

static int32_t check_names(const sl_table *table, const uint32_t *by_name, sl_error *error) {
    char quoted[SL_QUOTE_SIZE];
    for (uint64_t i = 1; i < table->columns.count; i++) {
        if (compare_names(table, by_name[i - 1], by_name[i]) != 0) continue;
        const sl_entry *a = &table->entries[by_name[i - 1]], *b = &table->entries[by_name[i]];
        int64_t first = a->position < b->position ? a->position : b->position;
        int64_t second = a->position < b->position ? b->position : a->position;
        return sl_fail(error, SL_E_FORMAT, second,
                       "tensor %s: the name is there twice, first at byte %lld: one would hide the other",
                       quoted_name(quoted, table, a), (long long)first);
    }
    return SL_OK;
}

/* "F32 [2, 2]", as much of it as fits. */
static void describe(const sl_table *table, const sl_entry *entry, char *out, size_t size) {
    size_t used = (size_t)snprintf(out, size, "%s [", sl_dtype_get(entry->dtype)->code);
    for (uint64_t i = entry->dim_begin; i < entry->dim_end && used + 24 < size; i++)
        used += (size_t)snprintf(out + used, size - used, "%s%llu", i == entry->dim_begin ? "" : ", ",
                                 (unsigned long long)table->dims[i]);
    if (used + 2 < size) memcpy(out + used, "]", 2);
}

/* The strides of an array count empty dims as 1, so numpy refuses [0, 2^40, 2^40]; and no address space holds more
 * than this. */
#define LARGEST_ARRAY ((uint64_t)INT64_MAX)

/* Refuses an entry whose size cannot be, with the reason that follows "tensor NAME: ". */
static int32_t refuse_size(const sl_table *table, const sl_entry *entry, int32_t status, const char *format,
                           sl_error *error) {
    char quoted[SL_QUOTE_SIZE], shape[256], reason[512];
    describe(table, entry, shape, sizeof shape);
    snprintf(reason, sizeof reason, format, shape);
    return sl_fail(error, status, entry->position, "tensor %s: %s", quoted_name(quoted, table, entry), reason);
}

static int32_t check_size(const sl_table *table, const sl_entry *entry, sl_error *error) {
    uint64_t size = 0, span = (uint64_t)sl_dtype_get(entry->dtype)->bits / 8 + 1, stated = entry->end - entry->begin;
    bool whole_bytes;
    const uint64_t *dims = table->dims + entry->dim_begin;
    uint64_t rank = entry->dim_end - entry->dim_begin;
    if (!sl_dtype_size(entry->dtype, dims, rank, &size, &whole_bytes))
        return refuse_size(table, entry, SL_E_FORMAT,
                           whole_bytes ? "the size of %s does not fit in 64 bits" : "%s is not a whole number of bytes",
                           error);
    if (size != stated) {
        char quoted[SL_QUOTE_SIZE], shape[256];
        describe(table, entry, shape, sizeof shape);
        return sl_fail(error, SL_E_FORMAT, entry->position,
                       "tensor %s: data_offsets [%llu, %llu) hold %llu bytes, but %s needs %llu",
                       quoted_name(quoted, table, entry), (unsigned long long)entry->begin,
                       (unsigned long long)entry->end, (unsigned long long)stated, shape, (unsigned long long)size);
    }
    for (uint64_t i = 0; i < rank; i++)
        if (!sl_mul_u64(span, dims[i] > 0 ? dims[i] : 1, &span) || span > LARGEST_ARRAY)
            return refuse_size(table, entry, SL_E_LIMIT, "no array can have the shape of %s", error);
    return SL_OK;
}

static int32_t check_ranges(const sl_table *table, uint64_t data_begin, uint64_t file_size, sl_error *error) {
    char quoted[SL_QUOTE_SIZE];
    uint64_t covered = 0, data_size = file_size - data_begin;
    for (uint64_t i = 0; i < table->columns.count; i++) {
        const sl_entry *entry = &table->entries[i];
            if (entry->end < entry->begin)
            return sl_fail(error, SL_E_FORMAT, entry->position, "tensor %s: data_offsets [%llu, %llu) end before they begin",
                           quoted_name(quoted, table, entry), (unsigned long long)entry->begin,
                           (unsigned long long)entry->end);
        if (entry->begin != covered)
            return sl_fail(error, SL_E_FORMAT, entry->position,
                           "tensor %s: data_offsets [%llu, %llu) begin at %llu, but the bytes before them end at %llu "
                           "(%s of %llu bytes)",
                           quoted_name(quoted, table, entry), (unsigned long long)entry->begin,
                           (unsigned long long)entry->end, (unsigned long long)entry->begin,
                           (unsigned long long)covered, entry->begin > covered ? "a hole" : "an overlap",
                           (unsigned long long)(entry->begin > covered ? entry->begin - covered : covered - entry->begin));
        int32_t status = check_size(table, entry, error);
        if (status != SL_OK) return status;
        if (entry->end > data_size)
            return sl_fail(error, SL_E_FORMAT, entry->position,
                           "tensor %s: data_offsets [%llu, %llu) end past the data, which is %llu bytes long: the file "
                           "is truncated or its header belongs to another file",
                           quoted_name(quoted, table, entry), (unsigned long long)entry->begin,
                           (unsigned long long)entry->end, (unsigned long long)data_size);
        covered = entry->end;
    }
    if (covered != data_size)
        return sl_fail(error, SL_E_FORMAT, (int64_t)(data_begin + covered),
                       "the tensors end at byte %llu, but the file has %llu bytes: %llu bytes belong to no tensor",
                       (unsigned long long)(data_begin + covered), (unsigned long long)file_size,
                       (unsigned long long)(data_size - covered));
    return SL_OK;
}

/* ---- columns ---- */

static int32_t make_columns(sl_table *table, uint64_t data_begin, sl_error *error) {
    sl_columns *columns = &table->columns;
    uint64_t count = columns->count, *name_ends, *dims, *dim_ends, *begins, *ends;
    uint8_t *dtypes;
    sl_arena *arena = &table->arena;
    int32_t status = sl_arena_alloc(arena, count * sizeof *name_ends, (void **)&name_ends, error);
    if (status == SL_OK) status = sl_arena_alloc(arena, table->dim_count * sizeof *dims, (void **)&dims, error);
    if (status == SL_OK) status = sl_arena_alloc(arena, count * sizeof *dim_ends, (void **)&dim_ends, error);
    if (status == SL_OK) status = sl_arena_alloc(arena, count * sizeof *begins, (void **)&begins, error);
    if (status == SL_OK) status = sl_arena_alloc(arena, count * sizeof *ends, (void **)&ends, error);
    if (status == SL_OK) status = sl_arena_alloc(arena, count, (void **)&dtypes, error);
    if (status != SL_OK) return status;

    uint64_t dim_count = 0;
    for (uint64_t i = 0; i < count; i++) {
        const sl_entry *entry = &table->entries[i];
        name_ends[i] = entry->name_end;
        for (uint64_t k = entry->dim_begin; k < entry->dim_end; k++) dims[dim_count++] = table->dims[k];
        dim_ends[i] = dim_count;
        begins[i] = data_begin + entry->begin;
        ends[i] = data_begin + entry->end;
        dtypes[i] = (uint8_t)entry->dtype;
        if (memchr(table->names + entry->name_begin, '\n', (size_t)(entry->name_end - entry->name_begin)) != NULL)
            columns->newline_in_names = 1;
    }
    columns->names = table->names;
    columns->name_ends = name_ends;
    columns->dtypes = dtypes;
    columns->dims = dims;
    columns->dim_ends = dim_ends;
    columns->begins = begins;
    columns->ends = ends;
    columns->metadata_count /= 2;
    columns->metadata_text = table->metadata_text;
    columns->metadata_ends = table->metadata_ends;
    return SL_OK;
}

int32_t sl_table_finish(sl_table *table, uint64_t data_begin, uint64_t file_size, sl_error *error) {
    uint64_t count = table->columns.count;
    uint32_t *order, *spare;
    int32_t status = sl_arena_alloc(&table->arena, count * sizeof *order, (void **)&order, error);
    if (status == SL_OK) status = sl_arena_alloc(&table->arena, count * sizeof *spare, (void **)&spare, error);
    if (status != SL_OK) return status;
    for (uint64_t i = 0; i < count; i++) order[i] = (uint32_t)i;
    status = order_by_range(table, order, spare, error);
    if (status == SL_OK) {
        sl_sort(order, spare, count, compare_names, table);
        status = check_names(table, order, error);
    }
    if (status == SL_OK) status = check_ranges(table, data_begin, file_size, error);
    if (status == SL_OK) status = make_columns(table, data_begin, error);
    if (status == SL_OK) table->columns.by_name = order;
    return status;
}

int64_t sl_table_find(const sl_table *table, const char *name, uint64_t name_size) {
    const sl_columns *columns = &table->columns;
    uint64_t low = 0, high = columns->count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2, i = columns->by_name[middle];
        uint64_t begin = i > 0 ? columns->name_ends[i - 1] + 1 : 0;
        int order = sl_compare_bytes(name, name_size, columns->names + begin, columns->name_ends[i] - begin);
        if (order == 0) return (int64_t)i;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return -1;
}
