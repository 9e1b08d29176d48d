/* The safetensors reader and the writer of headers. An input is a file; one that begins with '{' is a header alone, in
 * front of as much data as its largest number says, so that mutations need not keep sizes in step to get past the first
 * checks. */
#include "property.h"

#define LENGTH_SIZE 8

/* Spaces that are put in front of a header. So many are more than what is read of a file at once; as that is slow, only
 * one input in so many is opened as a file. */
#define FEW_SPACES 7
#define MANY_SPACES 32768
#define OPEN_EVERY 16

/* Above any file, so that ends of ranges cannot overflow in what the target itself adds up. */
#define LARGEST_DATA ((uint64_t)1 << 60)

static sl_table *const NO_TABLE = (sl_table *)1; /* not to be touched on failure */

/* A single tensor without its table is what the table says of it. */
static void check_brief(const uint8_t *file, uint64_t size, const sl_table *table) {
    sl_lone lone;
    sl_table *other = sl_safetensors_brief(file, size, &lone);
    REQUIRE((table != NULL) == (other != NULL || lone.set == 1) && (other == NULL || lone.set == 0));
    sl_table_free(other);
    if (lone.set == 0) return;
    const sl_columns *columns = sl_table_columns(table);
    REQUIRE(columns->count == 1 && columns->plain && lone.begin == columns->begins[0]);
    REQUIRE(lone.dtype == columns->dtypes[0] && lone.rank == columns->dim_ends[0]);
    REQUIRE(lone.rank == 0 || memcmp(lone.dims, columns->dims, lone.rank * sizeof lone.dims[0]) == 0);
    REQUIRE(lone.name_size + 1 == columns->names_size && memcmp(lone.name, columns->names, lone.name_size) == 0);
}

/* Bytes in memory of which the file has more: the reader looks at the header alone. */
static int32_t parse(const uint8_t *file, uint64_t held, uint64_t size, sl_table **table, sl_error *error) {
    *error = untouched_error();
    *table = NO_TABLE;
    int32_t status = sl_safetensors_parse(file, size, table, error);
    check_error(error, status, size);
    REQUIRE((status == SL_OK) == (*table != NO_TABLE));
    if (status == SL_OK) check_table(*table, held == size ? file : NULL, size);
    check_brief(file, size, status == SL_OK ? *table : NULL);
    return status;
}

static void check_same_metadata(const sl_columns *a, const sl_columns *b) {
    uint64_t texts = 2 * a->metadata_count;
    REQUIRE(a->has_metadata == b->has_metadata && a->metadata_count == b->metadata_count);
    REQUIRE(a->metadata_size == b->metadata_size);
    if (texts == 0) return;
    REQUIRE(memcmp(a->metadata_ends, b->metadata_ends, texts * sizeof *a->metadata_ends) == 0);
    REQUIRE(a->metadata_size == 0 || memcmp(a->metadata_text, b->metadata_text, a->metadata_size) == 0);
}

typedef struct written {
    void *header;
    uint64_t header_size, data_size;
} written;

/* What was accepted can be written. */
static written write_header(const sl_columns *columns) {
    uint32_t *order = malloc(columns->count * sizeof *order + 1);
    uint64_t *sizes = malloc(columns->count * sizeof *sizes + 1);
    REQUIRE(order != NULL && sizes != NULL);
    written out = {NULL, 0, 0};
    sl_error error = untouched_error();
    int32_t status = sl_safetensors_header(columns, order, sizes, &out.header, &out.header_size, &error);
    check_error(&error, status, 0);
    REQUIRE(status == SL_OK && out.header_size % 8 == 0);
    for (uint64_t i = 0; i < columns->count; i++) out.data_size += sizes[i];
    free(sizes);
    free(order);
    return out;
}

/* Written and read again the table says the same, and written once more it is the same bytes. */
static void check_round_trip(const sl_table *table) {
    const sl_columns *columns = sl_table_columns(table);
    written first = write_header(columns);
    sl_table *again;
    sl_error error;
    REQUIRE(parse(first.header, first.header_size, first.header_size + first.data_size, &again, &error) == SL_OK);
    const sl_columns *read = sl_table_columns(again);
    REQUIRE(read->count == columns->count);
    for (uint64_t i = 0; i < columns->count; i++) {
        uint64_t begin = i > 0 ? columns->name_ends[i - 1] + 1 : 0;
        int64_t k = sl_table_find(again, columns->names + begin, columns->name_ends[i] - begin);
        REQUIRE(k >= 0);
        check_same_tensor(columns, i, read, (uint64_t)k);
    }
    check_same_metadata(columns, read);
    written second = write_header(read);
    REQUIRE(second.header_size == first.header_size && memcmp(second.header, first.header, first.header_size) == 0);
    sl_free(second.header);
    sl_table_free(again);
    sl_free(first.header);
}

/* The same as a file that is read whole. */
static void check_loaded(const char *path, const uint8_t *data, size_t size, int32_t status, const sl_error *error) {
    sl_loaded loaded = {.file = {.handle = -7}, .table = NO_TABLE, .error = untouched_error()};
    REQUIRE(sl_safetensors_load(path, size, &loaded) == status);
    check_error(&loaded.error, status, size);
    if (status == SL_OK) {
        REQUIRE(loaded.file.handle == -1 && loaded.file.size == size && memcmp(loaded.content, data, size) == 0);
        check_table(loaded.table, data, size);
        sl_table_free(loaded.table);
        sl_free(loaded.content);
    } else {
        REQUIRE(loaded.file.handle == -7 && loaded.table == NO_TABLE && loaded.content == NULL);
        REQUIRE(loaded.error.position == error->position && strcmp(loaded.error.message, error->message) == 0);
    }
}

/* The same as a file. */
static void check_opened(const uint8_t *data, size_t size, int32_t status, const sl_error *error) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", memory_file(data, size));
    sl_file file = {.handle = -1};
    sl_table *table = NO_TABLE;
    sl_error opened_error = untouched_error();
    REQUIRE(sl_safetensors_open(path, &file, &table, &opened_error) == status);
    check_error(&opened_error, status, size);
    if (status == SL_OK) {
        REQUIRE(file.handle >= 0 && file.size == size);
        check_table(table, data, size);
        sl_table_free(table);
        sl_file_close(file.handle);
    } else {
        REQUIRE(file.handle == -1 && table == NO_TABLE);
        REQUIRE(opened_error.position == error->position && strcmp(opened_error.message, error->message) == 0);
    }
    check_loaded(path, data, size, status, error);
}

/* The same header behind spaces, which JSON allows, means the same. */
static void check_padded(const uint8_t *file, size_t held, uint64_t size, size_t spaces, const sl_table *table,
                         int32_t status, const sl_error *error) {
    size_t header_at = LENGTH_SIZE + spaces;
    uint8_t *padded = malloc(held + spaces);
    REQUIRE(padded != NULL);
    sl_store_le64(padded, sl_load_le64(file) + spaces);
    memset(padded + LENGTH_SIZE, ' ', spaces);
    memcpy(padded + header_at, file + LENGTH_SIZE, held - LENGTH_SIZE);
    sl_table *other;
    sl_error other_error;
    REQUIRE(parse(padded, held + spaces, size + spaces, &other, &other_error) == status);
    if (status == SL_OK) {
        check_shifted_table(table, other, spaces);
        sl_table_free(other);
    } else
        REQUIRE(error->position < 0 || other_error.position == error->position + (int64_t)spaces);
    if (spaces == MANY_SPACES) check_opened(padded, held + spaces, status, &other_error);
    free(padded);
}

static void check_bytes(const uint8_t *file, size_t held, uint64_t size) {
    sl_table *table;
    sl_error error;
    int32_t status = parse(file, held, size, &table, &error);
    if (status == SL_OK) check_round_trip(table);
    bool open = held == size && size % OPEN_EVERY == 0;
    if (open) check_opened(file, held, status, &error);
    if (held >= LENGTH_SIZE && sl_load_le64(file) <= held - LENGTH_SIZE)
        check_padded(file, held, size, open ? MANY_SPACES : FEW_SPACES, table, status, &error);
    if (status == SL_OK) sl_table_free(table);
}

static uint64_t largest_number(const uint8_t *text, size_t size) {
    uint64_t largest = 0, number = 0;
    for (size_t i = 0; i < size; i++) {
        number = text[i] >= '0' && text[i] <= '9' ? sl_min_u64(number, LARGEST_DATA / 16) * 10 + text[i] - '0' : 0;
        if (number > largest) largest = number;
    }
    return largest;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0 || data[0] != '{') {
        check_bytes(data, size, size);
        return 0;
    }
    uint8_t *file = malloc(LENGTH_SIZE + size);
    REQUIRE(file != NULL);
    sl_store_le64(file, size);
    memcpy(file + LENGTH_SIZE, data, size);
    check_bytes(file, LENGTH_SIZE + size, LENGTH_SIZE + size + largest_number(data, size));
    free(file);
    return 0;
}
