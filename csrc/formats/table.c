/* The table of a file. */
#include "formats/table.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/sort.h"
#include "formats/order.h"

static uint64_t name_begin(const sl_table *table, uint64_t i) { return i > 0 ? table->name_ends[i - 1] + 1 : 0; }

static uint64_t dim_begin(const sl_table *table, uint64_t i) { return i > 0 ? table->dim_ends[i - 1] : 0; }

/* Reserves room for this total number of tensors, bytes of names, and dims. */
static int32_t reserve(sl_table *table, uint64_t tensors, uint64_t name_bytes, uint64_t dims, sl_error *error) {
    if (SL_LIKELY(tensors <= table->capacity && name_bytes <= table->name_capacity && dims <= table->dim_capacity))
        return SL_OK;
    sl_arena *arena = &table->arena;
    int32_t status = SL_OK;
    if (tensors > table->capacity) {
        void **columns[] = {(void **)&table->name_ends, (void **)&table->dim_ends, (void **)&table->begins,
                            (void **)&table->ends, (void **)&table->positions};
        uint64_t capacity = table->capacity;
        for (size_t k = 0; k < sizeof columns / sizeof *columns && status == SL_OK; k++) {
            capacity = table->capacity;
            status = sl_arena_grow(arena, columns[k], &capacity, tensors, sizeof(uint64_t), error);
        }
        capacity = table->capacity;
        if (status == SL_OK) status = sl_arena_grow(arena, (void **)&table->dtypes, &capacity, tensors, 1, error);
        if (status == SL_OK) table->capacity = capacity;
    }
    if (status == SL_OK)
        status = sl_arena_grow(arena, (void **)&table->names, &table->name_capacity, name_bytes, 1, error);
    if (status == SL_OK)
        status = sl_arena_grow(arena, (void **)&table->dims, &table->dim_capacity, dims, sizeof *table->dims, error);
    return status;
}

/* A table with at most this number of tensors, bytes of names and dims starts in a single allocation with its columns.
 * Separate allocations would take as long as parsing the header of a single tensor. */
#define FEW ((uint64_t)64)
#define FEW_NAME_BYTES ((uint64_t)2048)

typedef struct few {
    sl_table table;
    uint64_t name_ends[FEW], dim_ends[FEW], begins[FEW], ends[FEW], positions[FEW], dims[FEW];
    uint8_t dtypes[FEW];
    char names[FEW_NAME_BYTES];
} few;

/* Returns a table with its columns in the same allocation. */
static sl_table *new_few(void) {
    few *made = malloc(sizeof *made);
    if (made == NULL) return NULL;
    memset(&made->table, 0, sizeof made->table);
    made->table.name_ends = made->name_ends;
    made->table.dim_ends = made->dim_ends;
    made->table.begins = made->begins;
    made->table.ends = made->ends;
    made->table.positions = made->positions;
    made->table.dtypes = made->dtypes;
    made->table.capacity = FEW;
    made->table.dims = made->dims;
    made->table.dim_capacity = FEW;
    made->table.names = made->names;
    made->table.name_capacity = FEW_NAME_BYTES;
    return &made->table;
}

/* No column starts at the start of the block, which would have it freed when that column grows. Columns are at least
 * this far apart. */
#define GAP ((uint64_t)64)

/* Reserves the columns of an empty table in a single block: by themselves most would be too small for huge pages, and
 * the page faults of a large table would take as long as parsing it. */
static int32_t reserve_together(sl_table *table, uint64_t tensors, uint64_t name_bytes, uint64_t dims,
                                sl_error *error) {
    struct {
        void **column;
        uint64_t count, item;
    } columns[] = {{(void **)&table->name_ends, tensors, 8}, {(void **)&table->dim_ends, tensors, 8},
                   {(void **)&table->begins, tensors, 8},    {(void **)&table->ends, tensors, 8},
                   {(void **)&table->positions, tensors, 8}, {(void **)&table->dims, dims, 8},
                   {(void **)&table->dtypes, tensors, 1},    {(void **)&table->names, name_bytes, 1}};
    const size_t many = sizeof columns / sizeof *columns;
    uint64_t total = GAP, size;
    for (size_t k = 0; k < many; k++)
        if (!sl_mul_u64(columns[k].count, columns[k].item, &size) || !sl_add_u64(total, size, &total) ||
            !sl_add_u64(total, GAP, &total))
            return sl_fail_memory(error, UINT64_MAX);
    char *at;
    int32_t status = sl_arena_alloc(&table->arena, total, (void **)&at, error);
    if (status != SL_OK) return status;
    at += GAP;
    for (size_t k = 0; k < many; k++) {
        *columns[k].column = at;
        size = columns[k].count * columns[k].item;
        at += (size + GAP - 1) / GAP * GAP;
    }
    table->capacity = tensors;
    table->dim_capacity = dims;
    table->name_capacity = name_bytes;
    return SL_OK;
}

int32_t sl_table_new(uint64_t tensors, uint64_t name_bytes, uint64_t dims, sl_table **table, sl_error *error) {
    bool small = tensors <= FEW && name_bytes <= FEW_NAME_BYTES && dims < FEW;
    sl_table *made = small ? new_few() : calloc(1, sizeof *made);
    if (made == NULL) return sl_fail_memory(error, small ? sizeof(few) : sizeof *made);
    /* + 1: never NULL, even without any dims */
    int32_t status = small ? SL_OK : reserve_together(made, tensors, name_bytes, dims + 1, error);
    if (status == SL_OK)
        *table = made;
    else
        sl_table_free(made);
    return status;
}

void sl_table_free(sl_table *table) {
    if (table == NULL) return;
    sl_arena_free(&table->arena);
    free(table);
}

const sl_columns *sl_table_columns(const sl_table *table) { return &table->columns; }

int32_t sl_table_append(sl_table *table, const sl_entry *entry, sl_error *error) {
    sl_columns *columns = &table->columns;
    if (columns->count == SL_MAX_TENSORS)
        return sl_fail(error, SL_E_LIMIT, entry->position, "more than %llu tensors",
                       (unsigned long long)SL_MAX_TENSORS);
    int32_t status = reserve(table, columns->count + 1, columns->names_size + entry->name_size + 1,
                             dim_begin(table, columns->count) + entry->rank, error);
    if (status != SL_OK) return status;

    uint64_t i = columns->count++, name_end = columns->names_size + entry->name_size, dim_end = dim_begin(table, i);
    memcpy(table->names + columns->names_size, entry->name, entry->name_size);
    if (!entry->one_line && memchr(entry->name, '\n', entry->name_size) != NULL) columns->newline_in_names = 1;
    table->names[name_end] = '\n';
    table->name_ends[i] = name_end;
    columns->names_size = name_end + 1;
    for (uint64_t k = 0; k < entry->rank; k++) table->dims[dim_end++] = entry->dims[k];
    table->dim_ends[i] = dim_end;
    table->begins[i] = entry->begin;
    table->ends[i] = entry->end;
    table->positions[i] = (uint64_t)entry->position;
    table->dtypes[i] = (uint8_t)entry->dtype;
    return SL_OK;
}

int32_t sl_table_append_metadata(sl_table *table, const char *text, size_t size, sl_error *error) {
    sl_columns *columns = &table->columns;
    uint64_t ends = columns->metadata_count; /* counts texts until finish, and pairs after it */
    int32_t status = sl_arena_grow(&table->arena, (void **)&table->metadata_text, &table->metadata_capacity,
                                   columns->metadata_size + size, 1, error);
    if (status == SL_OK)
        status = sl_arena_grow(&table->arena, (void **)&table->metadata_ends, &table->metadata_end_capacity, ends + 1,
                               sizeof *table->metadata_ends, error);
    if (status != SL_OK) return status;
    if (size > 0) memcpy(table->metadata_text + columns->metadata_size, text, size);
    columns->metadata_size += size;
    table->metadata_ends[ends] = columns->metadata_size;
    columns->metadata_count = ends + 1;
    return SL_OK;
}

/* ---- order ---- */

static int compare_ranges(const void *context, uint32_t a, uint32_t b) {
    const sl_table *table = context;
    if (table->begins[a] != table->begins[b]) return table->begins[a] < table->begins[b] ? -1 : 1;
    return table->ends[a] < table->ends[b] ? -1 : table->ends[a] > table->ends[b];
}

static int compare_names(const void *context, uint32_t a, uint32_t b) {
    const sl_table *table = context;
    uint64_t a_begin = name_begin(table, a), b_begin = name_begin(table, b);
    return sl_compare_bytes(table->names + a_begin, table->name_ends[a] - a_begin, table->names + b_begin,
                            table->name_ends[b] - b_begin);
}

/* Returns indices sorted by `compare`, in a new block of the arena. */
static int32_t sorted(sl_table *table, sl_compare_fn compare, uint32_t **out, sl_error *error) {
    uint64_t count = table->columns.count;
    uint32_t *order, *spare;
    int32_t status = sl_arena_alloc(&table->arena, count * sizeof *order, (void **)&order, error);
    if (status == SL_OK) status = sl_arena_alloc(&table->arena, count * 2 * sizeof *spare, (void **)&spare, error);
    if (status != SL_OK) return status;
    for (uint64_t i = 0; i < count; i++) order[i] = (uint32_t)i;
    sl_sort(order, spare, count, compare, table);
    *out = order;
    return SL_OK;
}

/* Sorts all columns by their byte ranges. Most writers leave entries in that order, which costs a comparison per
 * tensor. */
static int32_t order_by_range(sl_table *table, sl_error *error) {
    const uint64_t count = table->columns.count;
    uint64_t i = 1;
    while (i < count && compare_ranges(table, (uint32_t)i - 1, (uint32_t)i) <= 0) i++;
    if (i >= count) return SL_OK;

    uint32_t *order;
    int32_t status = sorted(table, compare_ranges, &order, error);
    if (status != SL_OK) return status;
    sl_table old = *table;
    sl_table made = {.arena = old.arena}; /* the arena frees its blocks with the old ones */
    status = reserve(&made, count, old.columns.names_size, dim_begin(&old, count) + 1, error);
    for (i = 0; i < count && status == SL_OK; i++) {
        uint64_t from = order[i], begin = name_begin(&old, from);
        sl_entry entry = {old.names + begin,
                          (size_t)(old.name_ends[from] - begin),
                          !old.columns.newline_in_names,
                          (int64_t)old.positions[from],
                          old.dtypes[from],
                          old.dims + dim_begin(&old, from),
                          old.dim_ends[from] - dim_begin(&old, from),
                          old.begins[from],
                          old.ends[from]};
        status = sl_table_append(&made, &entry, error);
    }
    table->arena = made.arena;
    if (status != SL_OK) return status;
    made.columns.has_metadata = old.columns.has_metadata;
    made.columns.metadata_count = old.columns.metadata_count;
    made.columns.metadata_size = old.columns.metadata_size;
    made.metadata_text = old.metadata_text;
    made.metadata_ends = old.metadata_ends;
    *table = made;
    return SL_OK;
}

/* ---- invariants ---- */

static const char *quoted_name(char out[SL_QUOTE_SIZE], const sl_table *table, uint64_t i) {
    uint64_t begin = name_begin(table, i);
    return sl_quote(out, table->names + begin, (size_t)(table->name_ends[i] - begin));
}

static int32_t fail_duplicate(const sl_table *table, uint64_t a, uint64_t b, sl_error *error) {
    char quoted[SL_QUOTE_SIZE];
    uint64_t first = sl_min_u64(table->positions[a], table->positions[b]);
    uint64_t second = table->positions[a] + table->positions[b] - first;
    return sl_fail(error, SL_E_FORMAT, (int64_t)second,
                   "tensor %s: duplicate name, first at byte %llu: one would hide the other",
                   quoted_name(quoted, table, a), (unsigned long long)first);
}

static uint64_t hash_of(const char *name, uint64_t size) {
    const uint64_t odd = 0x9e3779b97f4a7c15u; /* 2^64 divided by the golden ratio, as in Fibonacci hashing */
    uint64_t hash = size * odd, left = size;
    for (; left >= 8; left -= 8, name += 8) {
        hash = (hash ^ sl_load_le64(name)) * odd;
        hash ^= hash >> 29;
    }
    uint64_t last = 0;
    while (left > 0) last = last << 8 | (unsigned char)name[--left];
    hash = (hash ^ last) * odd;
    return hash ^ hash >> 29;
}

/* A slot holds the upper half of a hash, and an index plus one; a free slot holds 0. */
#define SLOT(hash, i) (((hash) & 0xffffffff00000000u) | ((i) + 1))
#define INDEX_OF(slot) (((slot) & 0xffffffffu) - 1)

/* Looks up a name, starting at its slot. Returns its index, or -1 with *free_slot set. *steps counts the visited slots.
 */
static int64_t probe(const sl_table *table, const char *name, uint64_t size, uint64_t hash, uint64_t *free_slot,
                     uint64_t *steps) {
    for (uint64_t at = hash & table->slot_mask;; at = (at + 1) & table->slot_mask) {
        uint64_t slot = table->slots[at];
        ++*steps;
        if (slot == 0) {
            *free_slot = at;
            return -1;
        }
        if ((slot ^ hash) >> 32 != 0) continue;
        uint64_t i = INDEX_OF(slot), begin = name_begin(table, i);
        if (table->name_ends[i] - begin == size && memcmp(table->names + begin, name, (size_t)size) == 0)
            return (int64_t)i;
    }
}

/* Names are hashed this far ahead of their insertion, because each would wait for its slot from memory. */
#define HASHED_AHEAD 16

/* Hashes all names into slots, of which at most half are occupied. *again is a duplicate name, or count. If too many
 * names collide, which only a hostile file can cause, there are no slots. */
static int32_t hash_names(sl_table *table, uint64_t *again, sl_error *error) {
    uint64_t count = table->columns.count, slots = 2, steps = 0, most = 8 * count + 1024;
    while (slots < 2 * count) slots *= 2;
    int32_t status = sl_arena_alloc(&table->arena, slots * sizeof *table->slots, (void **)&table->slots, error);
    if (status != SL_OK) return status;
    memset(table->slots, 0, (size_t)(slots * sizeof *table->slots));
    table->slot_mask = slots - 1;
    *again = count;
    uint64_t hashes[HASHED_AHEAD];
    for (uint64_t i = 0, ahead = 0; i < count; i++) {
        for (; ahead < count && ahead < i + HASHED_AHEAD; ahead++) {
            uint64_t begin = name_begin(table, ahead);
            uint64_t hash = hash_of(table->names + begin, table->name_ends[ahead] - begin);
            hashes[ahead % HASHED_AHEAD] = hash;
            SL_PREFETCH_WRITE(&table->slots[hash & table->slot_mask]);
        }
        uint64_t begin = name_begin(table, i), hash = hashes[i % HASHED_AHEAD], place = 0;
        if (probe(table, table->names + begin, table->name_ends[i] - begin, hash, &place, &steps) >= 0) {
            *again = i;
            return SL_OK;
        }
        if (steps > most) {
            table->slots = NULL;
            return SL_OK;
        }
        table->slots[place] = SLOT(hash, i);
    }
    return SL_OK;
}

/* Refuses duplicate names, and builds the index of names unless they ascend: their order, or else a hash. Of several
 * duplicates it reports the first in name order, with or without an index. */
static int32_t check_names(sl_table *table, sl_error *error) {
    uint64_t count = table->columns.count, i = 1, again;
    while (i < count && compare_names(table, (uint32_t)i - 1, (uint32_t)i) < 0) i++;
    table->columns.names_ascend = i >= count;
    if (i >= count) return SL_OK;
    uint32_t *by_name;
    int32_t status = sl_arena_alloc(&table->arena, count * sizeof *by_name, (void **)&by_name, error);
    if (status != SL_OK) return status;
    if (!table->columns.newline_in_names &&
        sl_order_names(&(sl_names){table->names, table->name_ends, count}, by_name)) {
        table->by_name = by_name;
        return SL_OK;
    }
    status = hash_names(table, &again, error);
    if (status != SL_OK || (table->slots != NULL && again == count)) return status;
    status = sorted(table, compare_names, &by_name, error);
    if (status != SL_OK) return status;
    for (i = 1; i < count; i++)
        if (compare_names(table, by_name[i - 1], by_name[i]) == 0)
            return fail_duplicate(table, by_name[i - 1], by_name[i], error);
    table->by_name = by_name;
    return SL_OK;
}

/* Writes "F32 [2, 2]", truncated to `size`. */
static void describe(const sl_table *table, uint64_t i, char *out, size_t size) {
    size_t used = (size_t)snprintf(out, size, "%s [", sl_dtype_get(table->dtypes[i])->code);
    uint64_t first = dim_begin(table, i);
    uint64_t k = first;
    for (; k < table->dim_ends[i] && used + 29 < size; k++)
        used += (size_t)snprintf(out + used, size - used, "%s%llu", k == first ? "" : ", ",
                                 (unsigned long long)table->dims[k]);
    snprintf(out + used, size - used, "%s", k < table->dim_ends[i] ? ", ...]" : "]");
}

/* numpy counts empty dims as 1 in strides and therefore refuses [0, 2^40, 2^40]; no address space is larger. */
#define LARGEST_ARRAY ((uint64_t)INT64_MAX)

/* Refuses a tensor for its size; `format` takes dtype and shape. */
static int32_t fail_size(const sl_table *table, uint64_t i, int32_t status, const char *format, sl_error *error) {
    char quoted[SL_QUOTE_SIZE], shape[256], reason[512];
    describe(table, i, shape, sizeof shape);
    snprintf(reason, sizeof reason, format, shape);
    return sl_fail(error, status, (int64_t)table->positions[i], "tensor %s: %s", quoted_name(quoted, table, i), reason);
}

/* Checks that dtype, shape and byte range agree, and that an array of this shape is possible. */
static int32_t check_size(const sl_table *table, uint64_t i, const sl_table_rules *rules, sl_error *error) {
    const uint64_t *dims = table->dims + dim_begin(table, i);
    uint64_t rank = table->dim_ends[i] - dim_begin(table, i), stated = table->ends[i] - table->begins[i], size = 0;
    bool whole_blocks;
    if (!sl_dtype_size(table->dtypes[i], dims, rank, &size, &whole_blocks))
        return fail_size(table, i, SL_E_FORMAT,
                         whole_blocks                               ? "the size of %s does not fit in 64 bits"
                         : sl_dtype_get(table->dtypes[i])->bits > 0 ? "%s is not a whole number of bytes"
                                                                    : "the rows of %s are not a whole number of blocks",
                         error);
    if (size != stated) {
        char quoted[SL_QUOTE_SIZE], shape[256];
        describe(table, i, shape, sizeof shape);
        return sl_fail(error, SL_E_FORMAT, (int64_t)table->positions[i],
                       "tensor %s: %s [%llu, %llu) hold %llu bytes, but %s needs %llu", quoted_name(quoted, table, i),
                       rules->ranges, (unsigned long long)table->begins[i], (unsigned long long)table->ends[i],
                       (unsigned long long)stated, shape, (unsigned long long)size);
    }
    if (size > 0) return SL_OK;
    uint64_t bits = (uint64_t)sl_dtype_get(table->dtypes[i])->bits, span = bits < 8 ? 1 : bits / 8;
    for (uint64_t k = 0; k < rank; k++)
        if (!sl_mul_u64(span, dims[k] > 0 ? dims[k] : 1, &span) || span > LARGEST_ARRAY)
            return fail_size(table, i, SL_E_LIMIT, "no array can have the shape of %s", error);
    return SL_OK;
}

/* Refuses a range; `format` takes three numbers. */
static int32_t fail_range(const sl_table *table, uint64_t i, const sl_table_rules *rules, const char *format,
                          uint64_t a, uint64_t b, uint64_t c, sl_error *error) {
    char quoted[SL_QUOTE_SIZE], reason[256];
    snprintf(reason, sizeof reason, format, (unsigned long long)a, (unsigned long long)b, (unsigned long long)c);
    return sl_fail(error, SL_E_FORMAT, (int64_t)table->positions[i], "tensor %s: %s [%llu, %llu) %s",
                   quoted_name(quoted, table, i), rules->ranges, (unsigned long long)table->begins[i],
                   (unsigned long long)table->ends[i], reason);
}

/* Returns the size of a file that holds all tensors from the i-th on, at most UINT64_MAX. */
static uint64_t whole_size(const sl_table *table, uint64_t i, uint64_t data_begin) {
    uint64_t end = 0;
    for (; i < table->columns.count; i++)
        if (table->ends[i] > end) end = table->ends[i];
    return end > UINT64_MAX - data_begin ? UINT64_MAX : data_begin + end;
}

/* Checks the byte ranges in file order: no overlaps, no end past the data and, unless the rules allow holes, no holes.
 */
static int32_t check_ranges(const sl_table *table, const sl_table_rules *rules, uint64_t data_begin, uint64_t file_size,
                            sl_error *error) {
    uint64_t covered = 0, data_size = file_size > data_begin ? file_size - data_begin : 0;
    for (uint64_t i = 0; i < table->columns.count; i++) {
        uint64_t begin = table->begins[i], end = table->ends[i];
        if (end < begin) return fail_range(table, i, rules, "end before they begin", 0, 0, 0, error);
        if (begin > covered && !rules->holes)
            return fail_range(table, i, rules,
                              "begin at %llu, but the tensors before end at %llu: a hole of %llu bytes", begin, covered,
                              begin - covered, error);
        if (begin < covered)
            return fail_range(table, i, rules,
                              "begin at %llu, but the tensors before end at %llu: an overlap of %llu bytes", begin,
                              covered, covered - begin, error);
        int32_t status = check_size(table, i, rules, error);
        if (status != SL_OK) return status;
        if (end > data_size) {
            uint64_t whole = whole_size(table, i, data_begin);
            return fail_range(table, i, rules,
                              "end past the data, which has %llu bytes: %llu of %llu bytes are missing; "
                              "the file is truncated, or its header belongs to another file",
                              data_size, whole - file_size, whole, error);
        }
        covered = end;
    }
    if (covered == data_size || rules->holes) return SL_OK;
    return sl_fail(error, SL_E_FORMAT, (int64_t)(data_begin + covered),
                   "the tensors end at byte %llu, but the file has %llu bytes: %llu bytes belong to no tensor",
                   (unsigned long long)(data_begin + covered), (unsigned long long)file_size,
                   (unsigned long long)(data_size - covered));
}

/* Exposes the finished columns to readers. */
static void freeze(sl_table *table, uint64_t data_begin) {
    sl_columns *columns = &table->columns;
    bool plain = true;
    for (uint64_t i = 0; i < columns->count; i++) {
        const sl_dtype_info *info = sl_dtype_get(table->dtypes[i]);
        table->begins[i] += data_begin;
        table->ends[i] += data_begin;
        plain &= info->bits >= 8 && table->begins[i] < table->ends[i] && table->begins[i] % (uint64_t)info->swap == 0;
    }
    columns->plain = plain;
    columns->names = table->names;
    columns->name_ends = table->name_ends;
    columns->dtypes = table->dtypes;
    columns->dims = table->dims;
    columns->dim_ends = table->dim_ends;
    columns->begins = table->begins;
    columns->ends = table->ends;
    columns->metadata_count /= 2;
    columns->metadata_text = table->metadata_text;
    columns->metadata_ends = table->metadata_ends;
}

int32_t sl_table_finish(sl_table *table, const sl_table_rules *rules, uint64_t data_begin, uint64_t file_size,
                        sl_error *error) {
    int32_t status = order_by_range(table, error);
    if (status == SL_OK) status = check_names(table, error);
    if (status == SL_OK) status = check_ranges(table, rules, data_begin, file_size, error);
    if (status == SL_OK) freeze(table, data_begin);
    return status;
}

int64_t sl_table_find(const sl_table *table, const char *name, uint64_t name_size) {
    if (table->slots != NULL) {
        uint64_t place, steps = 0;
        return probe(table, name, name_size, hash_of(name, name_size), &place, &steps);
    }
    uint64_t low = 0, high = table->columns.count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2, i = table->by_name != NULL ? table->by_name[middle] : middle;
        uint64_t begin = name_begin(table, i);
        int order = sl_compare_bytes(name, name_size, table->names + begin, table->name_ends[i] - begin);
        if (order == 0) return (int64_t)i;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return -1;
}

int32_t sl_table_list_names(const sl_table *table, int32_t sorted, void *make, void *put, void *list) {
    void *(*const new_object)(const char *, ptrdiff_t) = (void *(*)(const char *, ptrdiff_t))(uintptr_t)make;
    int (*const put_object)(void *, ptrdiff_t, void *) = (int (*)(void *, ptrdiff_t, void *))(uintptr_t)put;
    const uint32_t *order = sorted ? table->by_name : NULL;
    for (uint64_t k = 0; k < table->columns.count; k++) {
        uint64_t i = order != NULL ? order[k] : k, begin = name_begin(table, i);
        void *object = new_object(table->names + begin, (ptrdiff_t)(table->name_ends[i] - begin));
        if (object == NULL || put_object(list, (ptrdiff_t)k, object) != 0) return 0;
    }
    return order != NULL || table->columns.names_ascend;
}

/* The caller's functions, with their types. */
typedef struct makers {
    void *(*number)(unsigned long long);
    void *(*tuple)(ptrdiff_t);
    int (*fill_tuple)(void *, ptrdiff_t, void *);
    int (*fill_list)(void *, ptrdiff_t, void *);
    void (*keep)(void *);
} makers;

static makers typed(const sl_makers *untyped) {
    return (makers){
        .number = (void *(*)(unsigned long long))(uintptr_t)untyped->new_number,
        .tuple = (void *(*)(ptrdiff_t))(uintptr_t)untyped->new_tuple,
        .fill_tuple = (int (*)(void *, ptrdiff_t, void *))(uintptr_t)untyped->fill_tuple,
        .fill_list = (int (*)(void *, ptrdiff_t, void *))(uintptr_t)untyped->fill_list,
        .keep = (void (*)(void *))(uintptr_t)untyped->keep,
    };
}

/* Puts a new object into a place of a tuple; false if making it or putting it failed. A tuple is filled after it has an
 * owner, so that a failure leaks nothing. */
static bool put_new(const makers *make, void *tuple, uint64_t place, void *object) {
    return object != NULL && make->fill_tuple(tuple, (ptrdiff_t)place, object) == 0;
}

/* Puts the dims of a tensor into a tuple. */
static bool put_dims(const makers *make, const sl_table *table, uint64_t i, void *shape) {
    uint64_t first = dim_begin(table, i), rank = table->dim_ends[i] - first;
    for (uint64_t k = 0; k < rank; k++)
        if (!put_new(make, shape, k, make->number(table->dims[first + k]))) return false;
    return true;
}

int32_t sl_table_list_entries(const sl_table *table, const sl_makers *untyped, void *list) {
    const makers make = typed(untyped);
    for (uint64_t i = 0; i < table->columns.count; i++) {
        void *entry = make.tuple(4);
        if (entry == NULL || make.fill_list(list, (ptrdiff_t)i, entry) != 0) return 0;
        void *shape = make.tuple((ptrdiff_t)(table->dim_ends[i] - dim_begin(table, i)));
        if (!put_new(&make, entry, 1, shape) || !put_dims(&make, table, i, shape) ||
            !put_new(&make, entry, 0, make.number(table->dtypes[i])) ||
            !put_new(&make, entry, 2, make.number(table->begins[i])) ||
            !put_new(&make, entry, 3, make.number(table->ends[i])))
            return 0;
    }
    return 1;
}

/* Recent shapes are remembered by this number of bits of a hash. */
#define RECENT_BITS 8

int32_t sl_table_list_shapes(const sl_table *table, uint64_t begin, uint64_t end, const sl_makers *untyped,
                             void *list) {
    const uint64_t odd = 0x9e3779b97f4a7c15u; /* as in hash_of */
    const makers make = typed(untyped);
    struct {
        void *shape;
        const uint64_t *dims;
        uint64_t rank;
    } recent[1 << RECENT_BITS];
    memset(recent, 0, sizeof recent);
    for (uint64_t i = begin; i < end; i++) {
        const uint64_t *dims = table->dims + dim_begin(table, i);
        uint64_t rank = table->dim_ends[i] - dim_begin(table, i), hash = rank, slot;
        for (uint64_t k = 0; k < rank; k++) hash = (hash ^ dims[k]) * odd;
        slot = hash >> (64 - RECENT_BITS);
        void *shape = recent[slot].shape;
        bool known = shape != NULL && recent[slot].rank == rank &&
                     (rank == 0 || memcmp(recent[slot].dims, dims, (size_t)rank * sizeof *dims) == 0);
        if (known)
            make.keep(shape);
        else
            shape = make.tuple((ptrdiff_t)rank);
        if (shape == NULL || make.fill_list(list, (ptrdiff_t)(i - begin), shape) != 0) return 0;
        if (known) continue;
        if (!put_dims(&make, table, i, shape)) return 0;
        recent[slot].shape = shape;
        recent[slot].dims = dims;
        recent[slot].rank = rank;
    }
    return 1;
}
