/* The GGUF reader over a file in memory. What it accepts is unpacked as safeload/formats/gguf.py does it, which
 * trusts the counts and lengths that the reader has checked. Every input is also read with an entry put in front of its
 * metadata that moves the rest across the end of the reader's first read: it must mean the same there. */
#include "property.h"

#include "base/utf8.h"

#define PREAMBLE 24  /* magic, version, number of tensors, number of entries */
#define WINDOW 65536 /* the reader's first read */
#define STEP 32      /* the default alignment: so far the data moves by what the entry takes */

/* An array of u8 under a key that no input has. */
#define FILLER_KEY "the filler of fuzz_gguf.c"
#define FILLER_HEAD (8 + sizeof FILLER_KEY - 1 + 4 + 4 + 8)

typedef struct parsed {
    sl_table *table;
    sl_gguf *gguf;
    sl_error error;
    int32_t status;
} parsed;

/* ---- the metadata ---- */

typedef struct cursor {
    const sl_gguf *gguf;
    uint64_t at, end;
} cursor;

static const uint8_t *take(cursor *in, uint64_t size) {
    REQUIRE(size <= in->end - in->at);
    const uint8_t *bytes = in->gguf->bytes + in->at;
    in->at += size;
    return bytes;
}

static void unpack(cursor *in, uint32_t type, int depth) {
    static const uint8_t sizes[SL_GGUF_TYPE_COUNT] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    REQUIRE(type < SL_GGUF_TYPE_COUNT);
    if (type == SL_GGUF_ARRAY) {
        REQUIRE(depth < 2);
        uint32_t item = sl_load_le32(take(in, 4));
        uint64_t count = sl_load_le64(take(in, 8));
        for (uint64_t i = 0; i < count; i++) unpack(in, item, depth + 1);
    } else if (type == SL_GGUF_STRING)
        take(in, sl_load_le64(take(in, 8)));
    else {
        const uint8_t *bytes = take(in, sizes[type]);
        REQUIRE(type != SL_GGUF_BOOL || *bytes <= 1);
    }
}

static void check_metadata(const sl_gguf *gguf, uint64_t file_size) {
    REQUIRE(gguf->version == 2 || gguf->version == 3);
    REQUIRE(gguf->alignment > 0 && (gguf->alignment & (gguf->alignment - 1)) == 0);
    REQUIRE(gguf->size <= file_size);
    uint64_t at = PREAMBLE;
    for (uint64_t k = 0; k < gguf->count; k++) {
        const sl_gguf_entry *entry = &gguf->entries[k];
        REQUIRE(entry->key_begin == at + 8 && entry->key_begin <= entry->key_end && entry->key_end + 4 == entry->begin);
        REQUIRE(entry->begin <= entry->end && entry->end <= gguf->size);
        size_t key_size = (size_t)(entry->key_end - entry->key_begin);
        const char *key = (const char *)gguf->bytes + entry->key_begin;
        REQUIRE(sl_load_le64(gguf->bytes + at) == key_size && sl_utf8_valid(key, key_size) == key_size);
        REQUIRE((uint32_t)entry->type == sl_load_le32(gguf->bytes + entry->key_end));
        cursor in = {gguf, entry->begin, entry->end};
        unpack(&in, (uint32_t)entry->type, 0);
        REQUIRE(in.at == entry->end);
        at = entry->end;
    }
}

/* ---- the whole ---- */

static parsed parse(const uint8_t *data, size_t size) {
    int file = memory_file(data, size);
    parsed out = {NULL, NULL, untouched_error(), SL_OK};
    out.status = sl_gguf_read(file, size, &out.table, &out.gguf, &out.error);
    check_error(&out.error, out.status, size);
    REQUIRE((out.status == SL_OK) == (out.table != NULL) && (out.status == SL_OK) == (out.gguf != NULL));
    if (out.status != SL_OK) return out;
    REQUIRE(memcmp(out.gguf->bytes, data, out.gguf->size) == 0);
    check_metadata(out.gguf, size);
    check_table(out.table, data, size);
    const sl_columns *columns = sl_table_columns(out.table);
    for (uint64_t i = 0; i < columns->count; i++) REQUIRE(columns->begins[i] % out.gguf->alignment == 0);
    return out;
}

static int32_t parse_head(const uint8_t *data, size_t held, size_t size, parsed *out) {
    uint8_t *head = malloc(held + 1); /* of its own, so that a read beyond it is found */
    REQUIRE(head != NULL);
    memcpy(head, data, held);
    out->status = sl_gguf_parse_head(head, held, size, &out->table, &out->gguf, &out->error);
    free(head);
    return out->status;
}

/* From its first bytes, of which more are given as long as they are wanted, a file means the same. */
static void check_head(const uint8_t *data, size_t size, const parsed *whole) {
    parsed out = {NULL, NULL, untouched_error(), SL_OK};
    size_t held = size < 16 ? size : 16;
    while (parse_head(data, held, size, &out) == SL_E_TRUNCATED) {
        REQUIRE(out.error.position > (int64_t)held && out.error.position <= (int64_t)size);
        held = (size_t)out.error.position;
        out.error = untouched_error();
    }
    REQUIRE(out.status == whole->status);
    if (out.status == SL_OK) {
        REQUIRE(out.gguf->size == whole->gguf->size && out.gguf->count == whole->gguf->count);
        REQUIRE(memcmp(out.gguf->bytes, whole->gguf->bytes, out.gguf->size) == 0);
        check_shifted_table(whole->table, out.table, 0);
        sl_table_free(out.table);
        sl_gguf_free(out.gguf);
    } else
        REQUIRE(out.error.position == whole->error.position);
}

static void release(parsed *out) {
    sl_table_free(out->table);
    sl_gguf_free(out->gguf);
}

/* The input with an entry of `filler` bytes before its own. */
static uint8_t *with_filler(const uint8_t *data, size_t size, uint64_t entries, size_t filler) {
    uint8_t *file = calloc(1, size + filler), *at = file + PREAMBLE;
    REQUIRE(file != NULL);
    memcpy(file, data, PREAMBLE);
    sl_store_le64(file + 16, entries + 1);
    sl_store_le64(at, sizeof FILLER_KEY - 1);
    memcpy(at + 8, FILLER_KEY, sizeof FILLER_KEY - 1);
    at += 8 + sizeof FILLER_KEY - 1;
    at[0] = SL_GGUF_ARRAY;
    sl_store_le64(at + 8, filler - FILLER_HEAD);
    memcpy(file + PREAMBLE + filler, data + PREAMBLE, size - PREAMBLE);
    return file;
}

static bool holds(const uint8_t *data, size_t size, const char *word, size_t word_size) {
    for (size_t i = 0; i + word_size <= size; i++)
        if (memcmp(data + i, word, word_size) == 0) return true;
    return false;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    parsed plain = parse(data, size);
    check_head(data, size, &plain);
    uint64_t entries = size >= PREAMBLE ? sl_load_le64(data + 16) : UINT64_MAX;
    /* Where the first read ends in the input's own bytes: at each multiple of STEP within the first 2 KiB. */
    size_t filler = WINDOW - STEP * (1 + size % 64);
    if (entries < UINT64_MAX && !holds(data, size, FILLER_KEY, sizeof FILLER_KEY - 1)) {
        uint8_t *file = with_filler(data, size, entries, filler);
        parsed moved = parse(file, size + filler);
        /* A larger alignment may move the data by less than the header, and so out of the file or into it. */
        bool same_step = plain.status != SL_OK || plain.gguf->alignment <= STEP;
        if (plain.status == SL_OK && same_step) {
            REQUIRE(moved.status == SL_OK && moved.gguf->count == plain.gguf->count + 1);
            check_shifted_table(plain.table, moved.table, filler);
        } else if (moved.status == SL_OK)
            REQUIRE(plain.status == SL_OK || moved.gguf->alignment > STEP);
        release(&moved);
        free(file);
    }
    release(&plain);
    return 0;
}
