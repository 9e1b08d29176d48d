/* Lists weight files with the C core: names, dtypes, shapes, byte ranges, metadata, a digest of each tensor; and what
 * the core says of the same files with a byte changed. The same text on every machine (reader.expected).
 *
 * usage: reader FILE ... */
#include "harness.h"

/* Bytes at the start of a file that are changed one by one: of headers of any size, the part where all kinds of things
 * are. */
#define CHANGED ((uint64_t)700)

static const char *name_of(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

static uint64_t digest_of_range(int64_t file, uint64_t begin, uint64_t end, const uint8_t *mapped) {
    uint8_t *bytes = allocate((size_t)(end - begin));
    sl_error error = {0};
    if (sl_file_read(file, begin, bytes, end - begin, &error) != SL_OK) FAIL("%s", error.message);
    if (memcmp(bytes, mapped + begin, (size_t)(end - begin)) != 0)
        FAIL("bytes %" PRIu64 " read are not those mapped", begin);
    uint64_t result = digest(DIGEST_START, bytes, (size_t)(end - begin));
    free(bytes);
    return result;
}

static void list_tensors(const sl_table *table, int64_t file, const uint8_t *mapped) {
    const sl_columns *columns = sl_table_columns(table);
    uint64_t name = 0, dim = 0;
    for (uint64_t i = 0; i < columns->count; i++) {
        uint64_t size = columns->name_ends[i] - name;
        printf("  %.*s %s [", (int)size, columns->names + name, sl_dtype_get(columns->dtypes[i])->code);
        for (uint64_t first = dim; dim < columns->dim_ends[i]; dim++)
            printf("%s%" PRIu64, dim > first ? ", " : "", columns->dims[dim]);
        printf("] %" PRIu64 " %" PRIu64 " %016" PRIx64 "\n", columns->begins[i], columns->ends[i],
               digest_of_range(file, columns->begins[i], columns->ends[i], mapped));
        EXPECT(sl_table_find(table, columns->names + name, size) == (int64_t)i);
        name = columns->name_ends[i] + 1;
    }
    for (uint64_t i = 0, at = 0; i < 2 * columns->metadata_count; at = columns->metadata_ends[i++])
        printf("%s%.*s%s", i % 2 == 0 ? "  metadata " : " = ", (int)(columns->metadata_ends[i] - at),
               columns->metadata_text + at, i % 2 == 0 ? "" : "\n");
}

static void list_entries(const sl_gguf *gguf) {
    printf("  version %d, alignment %" PRIu64 "\n", gguf->version, gguf->alignment);
    for (uint64_t i = 0; i < gguf->count; i++) {
        const sl_gguf_entry *entry = &gguf->entries[i];
        printf("  metadata %.*s type %d %" PRIu64 " %" PRIu64 " %016" PRIx64 "\n",
               (int)(entry->key_end - entry->key_begin), (const char *)gguf->bytes + entry->key_begin, entry->type,
               entry->begin, entry->end,
               digest(DIGEST_START, gguf->bytes + entry->begin, (size_t)(entry->end - entry->begin)));
    }
}

/* What is said of the file with one byte changed: status, position and message of each. */
static void list_refusals(const uint8_t *mapped, uint64_t size) {
    static const uint8_t CHANGES[] = {0x01, 0x80, 0x1f};
    uint8_t *bytes = allocate((size_t)size);
    uint64_t state = DIGEST_START, refused = 0;
    memcpy(bytes, mapped, (size_t)size);
    for (uint64_t at = 0; at < sl_min_u64(size, CHANGED); at++)
        for (size_t k = 0; k < sizeof CHANGES; k++) {
            sl_table *table = NULL;
            sl_error error = {0};
            bytes[at] ^= CHANGES[k];
            int32_t status = sl_safetensors_parse(bytes, size, &table, &error);
            bytes[at] ^= CHANGES[k];
            sl_table_free(table);
            if (status == SL_OK) continue;
            char line[SL_MESSAGE_SIZE + 64];
            int length = snprintf(line, sizeof line, "%d %d %" PRId64 " %s", status, error.os_errno, error.position,
                                  error.message);
            state = digest(state, line, (size_t)length);
            refused++;
        }
    printf("  refused when a byte is changed: %" PRIu64 " %016" PRIx64 "\n", refused, state);
    free(bytes);
}

static void list_file(const char *path) {
    sl_file file;
    sl_table *table = NULL;
    sl_gguf *gguf = NULL;
    sl_error error = {0};
    bool is_gguf = strstr(path, ".gguf") != NULL;
    int32_t status;
    if (is_gguf) {
        status = sl_file_open(path, &file, &error);
        if (status == SL_OK) status = sl_gguf_read(file.handle, file.size, &table, &gguf, &error);
    } else
        status = sl_safetensors_open(path, &file, &table, &error);
    void *mapped = NULL;
    if (status == SL_OK) status = sl_file_map(file.handle, file.size, 1, &mapped, &error);
    if (status != SL_OK) {
        FAIL("%s: status %d, errno %d, byte %" PRId64 ": %s", path, status, error.os_errno, error.position,
             error.message);
        return;
    }
    printf("%s %" PRIu64 "\n", name_of(path), file.size);
    list_tensors(table, file.handle, mapped);
    if (is_gguf)
        list_entries(gguf);
    else
        list_refusals(mapped, file.size);
    sl_file_unmap(mapped, file.size);
    sl_gguf_free(gguf);
    sl_table_free(table);
    sl_file_close(file.handle);
}

int main(int count, char **arguments) {
    if (count < 2) return 2;
    for (int i = 1; i < count; i++) list_file(arguments[i]);
    return failures == 0 ? 0 : 1;
}
