/* The GGUF format, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Little-endian.
 *
 *   1. "GGUF", u32 version (2 or 3, with identical layouts), u64 number of tensors, u64 number of metadata entries.
 *   2. The metadata. Each entry: its key (a string), u32 type of its value, the value. A value is
 *        - an integer, a float, or a bool (one byte, 0 or 1),
 *        - a string: u64 size, then this number of bytes of UTF-8,
 *        - an array: u32 type of its elements, u64 count, the elements one after another.
 *   3. The tensors' descriptions. Each: its name (a string), u32 number of dims, u64 dims, innermost first,
 *      u32 ggml type, u64 offset of its bytes in the data, a multiple of the alignment.
 *   4. Padding to a multiple of the alignment: the u32 value of "general.alignment", a power of two, or 32.
 *   5. The data: row-major, little-endian, each row whole blocks of its type. There may be padding between tensors.
 *
 * Arrays are scanned, which checks every count and length in them, but not unpacked. String values need not be UTF-8,
 * because vocabularies hold arbitrary bytes. Keys and names must be UTF-8.
 *
 * Refused although other readers accept it: a duplicate key, and a bool of 2. Tensors may have more than the 4 dims of
 * ggml: gguf-py writes and reads the 5-D convolutions of video models.
 *
 * Type 36, which ggml has removed, is I2_S in files of https://github.com/microsoft/BitNet, recognized by
 * "general.file_type": codes of 2 bits, followed by 32 bytes that begin with the f32 scale of the whole tensor. We
 * assume blocks of 128 elements, which its converter writes and its builds for x86-64 read; its other layouts have the
 * same size and cannot be distinguished.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/sort.h"
#include "base/utf8.h"
#include "formats/reader.h"
#include "formats/table.h"

#define MAGIC_SIZE 4
#define OLDEST_VERSION 2
#define NEWEST_VERSION 3
#define DEFAULT_ALIGNMENT 32
#define ALIGNMENT_KEY "general.alignment"

#define FILE_TYPE_KEY "general.file_type"
#define FILE_TYPE_I2_S 40
#define GGML_I2_S 36
#define I2_S_BLOCK 128
#define I2_S_TAIL 32

/* The whole header is held in memory. A vocabulary of 250,000 tokens with its merges takes 10 MB, and so do the
 * descriptions of 100,000 tensors. */
#define MAX_HEADER ((uint64_t)128 << 20)

/* Padding exists to make data mappable, and no processor has larger pages (x86-64 has pages of 1 GiB). */
#define MAX_ALIGNMENT ((uint64_t)1 << 30)

/* An empty key, type and one byte of value; an empty name, no dims, type and offset. */
#define SMALLEST_ENTRY (8 + 4 + 1)
#define SMALLEST_TENSOR (8 + 4 + 4 + 8)
/* Type and count of an array, either as a value or inside another array. */
#define ARRAY_HEAD (4 + 8)

/* Room allocated in advance, because a count in a file is trusted only after its entries have been read. */
#define FIRST_ENTRIES 64
#define FIRST_TENSORS 512

/* The subject of an error message. */
typedef struct subject {
    const char *kind;
    uint64_t index;
    uint64_t begin, end; /* the name's bytes in the file; begin is 0 until it is known */
} subject;

typedef struct parser {
    sl_reader in;
    subject subject;
    sl_gguf *made;
    sl_gguf_entry *entries;
    uint64_t entry_count, entry_capacity;
    bool holds_i2_s; /* whether type 36 is I2_S */
    sl_gguf_listed *listed;
    uint64_t listed_count, listed_capacity;
    sl_table *table;
    sl_error *error;
} parser;

/* Fails with a fault of the subject at `position`. */
static int32_t refuse(parser *self, int32_t status, uint64_t position, const char *format, ...) SL_PRINTF(4, 5);

static int32_t refuse(parser *self, int32_t status, uint64_t position, const char *format, ...) {
    const subject *what = &self->subject;
    char quoted[SL_QUOTE_SIZE], reason[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
    if (what->begin > 0)
        return sl_fail(self->error, status, (int64_t)position, "%s %s: %s", what->kind,
                       sl_quote(quoted, (const char *)self->in.bytes + what->begin, (size_t)(what->end - what->begin)),
                       reason);
    if (what->kind != NULL)
        return sl_fail(self->error, status, (int64_t)position, "%s number %llu: %s", what->kind,
                       (unsigned long long)what->index, reason);
    return sl_fail(self->error, status, (int64_t)position, "%s", reason);
}

/* Makes the next `size` bytes available; `what` describes the bytes in a message. */
static int32_t need(parser *self, uint64_t size, const char *what) {
    if (SL_LIKELY(size <= self->in.held - self->in.at)) return SL_OK;
    uint64_t left = sl_reader_left(&self->in);
    if (size > left)
        return refuse(self, SL_E_FORMAT, self->in.at, "%s needs %llu bytes, but the file ends after %llu of them", what,
                      (unsigned long long)size, (unsigned long long)left);
    if (self->in.at + size > MAX_HEADER) /* no overflow: the file has these bytes */
        return refuse(self, SL_E_LIMIT, self->in.at, "%s extends past byte %llu, the limit of a header", what,
                      (unsigned long long)MAX_HEADER);
    return sl_reader_hold(&self->in, size, self->error);
}

/* Refuses the count at `position` if the file is too small for this number of items of at least `smallest` bytes. */
static int32_t check_count(parser *self, uint64_t position, uint64_t count, uint64_t smallest, const char *items) {
    uint64_t left = sl_reader_left(&self->in);
    if (SL_LIKELY(count <= left / smallest)) return SL_OK;
    return refuse(self, SL_E_FORMAT, position, "%llu %s of at least %llu bytes, but the file has %llu bytes left",
                  (unsigned long long)count, items, (unsigned long long)smallest, (unsigned long long)left);
}

/* Advances past a string; its bytes are [*begin, in.at). */
static int32_t read_string(parser *self, const char *what, uint64_t *begin) {
    uint64_t position = self->in.at;
    int32_t status = need(self, 8, what);
    if (status != SL_OK) return status;
    uint64_t size = sl_reader_u64(&self->in), left = sl_reader_left(&self->in);
    if (size > left)
        return refuse(self, SL_E_FORMAT, position, "%s has %llu bytes, but the file has %llu bytes left", what,
                      (unsigned long long)size, (unsigned long long)left);
    status = need(self, size, what);
    if (status != SL_OK) return status;
    *begin = self->in.at;
    self->in.at += size;
    return SL_OK;
}

/* Reads the name of the subject. */
static int32_t read_name(parser *self, const char *what) {
    uint64_t begin = 0;
    int32_t status = read_string(self, what, &begin);
    if (status != SL_OK) return status;
    const char *name = (const char *)self->in.bytes + begin;
    size_t size = (size_t)(self->in.at - begin), valid = sl_utf8_valid(name, size);
    if (valid < size)
        return refuse(self, SL_E_FORMAT, begin + valid, "%s holds invalid UTF-8 (byte 0x%02x)", what,
                      (unsigned char)name[valid]);
    self->subject.begin = begin;
    self->subject.end = self->in.at;
    return SL_OK;
}

/* ---- metadata ---- */

/* Bytes of a value; 0 for types without a fixed size. */
static const uint8_t VALUE_SIZES[SL_GGUF_TYPE_COUNT] = {
    [SL_GGUF_U8] = 1,  [SL_GGUF_I8] = 1,  [SL_GGUF_BOOL] = 1, [SL_GGUF_U16] = 2, [SL_GGUF_I16] = 2, [SL_GGUF_U32] = 4,
    [SL_GGUF_I32] = 4, [SL_GGUF_F32] = 4, [SL_GGUF_U64] = 8,  [SL_GGUF_I64] = 8, [SL_GGUF_F64] = 8,
};

static int32_t read_type(parser *self, uint32_t *type) {
    uint64_t position = self->in.at;
    int32_t status = need(self, 4, "the type of the value");
    if (status != SL_OK) return status;
    *type = sl_reader_u32(&self->in);
    if (*type < SL_GGUF_TYPE_COUNT) return SL_OK;
    return refuse(self, SL_E_FORMAT, position, "unknown value type %u, GGUF's end at %d", *type,
                  SL_GGUF_TYPE_COUNT - 1);
}

/* Advances past `count` values of a fixed size. `position` is the position of the count, or of a single value. */
static int32_t read_fixed(parser *self, uint32_t type, uint64_t count, uint64_t position) {
    uint64_t size = VALUE_SIZES[type];
    int32_t status = check_count(self, position, count, size, "values");
    if (status == SL_OK) status = need(self, count * size, "the value");
    if (status != SL_OK) return status;
    if (type == SL_GGUF_BOOL)
        for (uint64_t i = 0; i < count; i++)
            if (self->in.bytes[self->in.at + i] > 1)
                return refuse(self, SL_E_FORMAT, self->in.at + i, "a bool must be 0 or 1, found %d",
                              self->in.bytes[self->in.at + i]);
    self->in.at += count * size;
    return SL_OK;
}

static int32_t read_strings(parser *self, uint64_t count, uint64_t position) {
    int32_t status = check_count(self, position, count, 8, "strings");
    for (uint64_t i = 0, begin; i < count && status == SL_OK; i++)
        status = read_string(self, "a string of the array", &begin);
    return status;
}

/* Reads the type and count of an array. */
static int32_t read_array_head(parser *self, uint32_t *type, uint64_t *count, uint64_t *position) {
    int32_t status = read_type(self, type);
    *position = self->in.at;
    if (status == SL_OK) status = need(self, 8, "the length of the array");
    if (status == SL_OK) *count = sl_reader_u64(&self->in);
    return status;
}

/* Advances past an array of values or strings. */
static int32_t read_items(parser *self, uint32_t type, uint64_t count, uint64_t position) {
    return type == SL_GGUF_STRING ? read_strings(self, count, position) : read_fixed(self, type, count, position);
}

static int32_t read_array(parser *self) {
    uint32_t type = 0, inner = 0;
    uint64_t count = 0, position;
    int32_t status = read_array_head(self, &type, &count, &position);
    if (status != SL_OK) return status;
    if (type != SL_GGUF_ARRAY) return read_items(self, type, count, position);
    status = check_count(self, position, count, ARRAY_HEAD, "arrays");
    for (uint64_t i = 0, inner_count = 0; i < count && status == SL_OK; i++) {
        uint64_t begin = self->in.at;
        status = read_array_head(self, &inner, &inner_count, &position);
        if (status == SL_OK && inner == SL_GGUF_ARRAY)
            status = refuse(self, SL_E_UNSUPPORTED, begin, "arrays of arrays of arrays are not supported");
        if (status == SL_OK) status = read_items(self, inner, inner_count, position);
    }
    return status;
}

static int32_t check_alignment(parser *self, const sl_gguf_entry *entry) {
    if (entry->type != SL_GGUF_U32)
        return refuse(self, SL_E_FORMAT, entry->begin - 4, "its type is %d, but it must be %d (u32)", entry->type,
                      SL_GGUF_U32);
    uint32_t alignment = sl_load_le32(self->in.bytes + entry->begin);
    if (alignment == 0 || (alignment & (alignment - 1)) != 0)
        return refuse(self, SL_E_FORMAT, entry->begin, "%u is not a power of two", alignment);
    if (alignment > MAX_ALIGNMENT)
        return refuse(self, SL_E_LIMIT, entry->begin, "%u exceeds the largest page size, %llu", alignment,
                      (unsigned long long)MAX_ALIGNMENT);
    self->made->alignment = alignment;
    return SL_OK;
}

/* Whether the key of an entry is `key`. */
static bool is_key(const parser *self, const sl_gguf_entry *entry, const char *key, size_t size) {
    return entry->key_end - entry->key_begin == size && memcmp(self->in.bytes + entry->key_begin, key, size) == 0;
}

static int32_t keep_entry(parser *self, const sl_gguf_entry *entry) {
    if (self->entry_count == self->entry_capacity) {
        uint64_t capacity = self->entry_capacity > 0 ? 2 * self->entry_capacity : FIRST_ENTRIES;
        sl_gguf_entry *grown = realloc(self->entries, (size_t)capacity * sizeof *grown);
        if (grown == NULL) return sl_fail_memory(self->error, capacity * sizeof *grown);
        self->entries = grown;
        self->entry_capacity = capacity;
    }
    self->entries[self->entry_count++] = *entry;
    return SL_OK;
}

static int32_t read_entry(parser *self) {
    int32_t status = read_name(self, "the key");
    uint32_t type = 0;
    if (status == SL_OK) status = read_type(self, &type);
    if (status != SL_OK) return status;
    sl_gguf_entry entry = {self->subject.begin, self->subject.end, self->in.at, 0, (int32_t)type};
    uint64_t begin;
    if (type == SL_GGUF_ARRAY)
        status = read_array(self);
    else if (type == SL_GGUF_STRING)
        status = read_string(self, "the text", &begin);
    else
        status = read_fixed(self, type, 1, self->in.at);
    if (status != SL_OK) return status;
    entry.end = self->in.at;
    if (is_key(self, &entry, FILE_TYPE_KEY, sizeof FILE_TYPE_KEY - 1) && (type == SL_GGUF_U32 || type == SL_GGUF_I32))
        self->holds_i2_s = sl_load_le32(self->in.bytes + entry.begin) == FILE_TYPE_I2_S;
    if (is_key(self, &entry, ALIGNMENT_KEY, sizeof ALIGNMENT_KEY - 1)) status = check_alignment(self, &entry);
    return status == SL_OK ? keep_entry(self, &entry) : status;
}

static int compare_keys(const void *context, uint32_t a, uint32_t b) {
    const parser *self = context;
    const sl_gguf_entry *left = &self->entries[a], *right = &self->entries[b];
    const char *bytes = (const char *)self->in.bytes;
    return sl_compare_bytes(bytes + left->key_begin, left->key_end - left->key_begin, bytes + right->key_begin,
                            right->key_end - right->key_begin);
}

/* Refuses duplicate keys, because a value would hide another. */
static int32_t check_keys(parser *self) {
    uint64_t count = self->entry_count; /* fewer than 2^32 fit into MAX_HEADER */
    if (count == 0) return SL_OK;
    uint32_t *order = malloc((size_t)count * 3 * sizeof *order);
    if (order == NULL) return sl_fail_memory(self->error, count * 3 * sizeof *order);
    for (uint64_t i = 0; i < count; i++) order[i] = (uint32_t)i;
    sl_sort(order, order + count, count, compare_keys, self);
    int32_t status = SL_OK;
    for (uint64_t i = 1; i < count && status == SL_OK; i++) { /* the sort is stable, so the second key is the later */
        const sl_gguf_entry *first = &self->entries[order[i - 1]], *second = &self->entries[order[i]];
        if (compare_keys(self, order[i - 1], order[i]) != 0) continue;
        self->subject = (subject){"metadata", 0, second->key_begin, second->key_end};
        status = refuse(self, SL_E_FORMAT, second->key_begin - 8, "duplicate key, first at byte %llu",
                        (unsigned long long)first->key_begin - 8);
    }
    free(order);
    return status;
}

/* ---- tensors ---- */

static bool is_ternary(const parser *self, uint32_t type) { return type == GGML_I2_S && self->holds_i2_s; }

/* Reads the type. The dtype of I2_S is SL_U8; the dtype of unknown types and types removed from ggml is SL_UNKNOWN. */
static int32_t read_dtype(parser *self, int32_t *dtype, uint32_t *type) {
    int32_t status = need(self, 4, "the type");
    if (status != SL_OK) return status;
    *type = sl_reader_u32(&self->in);
    *dtype = is_ternary(self, *type) ? SL_U8 : sl_dtype_of_ggml(*type);
    if (*dtype < 0) *dtype = SL_UNKNOWN;
    return SL_OK;
}

/* Reads the shape in numpy's order, outermost first. */
static int32_t read_shape(parser *self, uint64_t dims[SL_MAX_RANK], uint32_t *rank) {
    uint64_t position = self->in.at;
    int32_t status = need(self, 4, "the number of dims");
    if (status != SL_OK) return status;
    *rank = sl_reader_u32(&self->in);
    if (*rank > SL_MAX_RANK)
        return refuse(self, SL_E_FORMAT, position, "%u dims, but arrays have at most %d", *rank, SL_MAX_RANK);
    status = need(self, 8 * (uint64_t)*rank, "the shape");
    for (uint32_t k = *rank; k > 0 && status == SL_OK; k--) dims[k - 1] = sl_reader_u64(&self->in);
    return status;
}

static int32_t keep_listed(parser *self, const sl_gguf_listed *one) {
    if (self->listed_count == self->listed_capacity) {
        uint64_t capacity = self->listed_capacity > 0 ? 2 * self->listed_capacity : FIRST_ENTRIES;
        sl_gguf_listed *grown = realloc(self->listed, (size_t)capacity * sizeof *grown);
        if (grown == NULL) return sl_fail_memory(self->error, capacity * sizeof *grown);
        self->listed = grown;
        self->listed_capacity = capacity;
    }
    self->listed[self->listed_count++] = *one;
    return SL_OK;
}

/* Keeps the shape of a tensor and replaces it by the shape of its bytes, whose number is still open for unknown types.
 */
static int32_t read_listed(parser *self, uint64_t dims[SL_MAX_RANK], uint32_t *rank, int32_t dtype, uint32_t type) {
    uint64_t dims_begin = self->in.at - 4 - 8 * (uint64_t)*rank; /* the type follows */
    sl_gguf_listed one = {self->subject.begin, self->subject.end, dims_begin, (int32_t)*rank, dtype, type};
    uint64_t count = 1, row = *rank > 0 ? dims[*rank - 1] : 1;
    if (dtype != SL_UNKNOWN && row % I2_S_BLOCK != 0)
        return refuse(self, SL_E_FORMAT, self->in.at, "rows of %llu elements are not whole blocks of %d (I2_S)",
                      (unsigned long long)row, I2_S_BLOCK);
    for (uint32_t k = 0; k < *rank; k++)
        if (!sl_mul_u64(count, dims[k], &count))
            return refuse(self, SL_E_FORMAT, self->in.at, "the number of elements does not fit in 64 bits");
    dims[0] = dtype == SL_UNKNOWN ? 0 : count / 4 + I2_S_TAIL;
    *rank = 1;
    return keep_listed(self, &one);
}

/* Sets the bytes of a tensor of an unknown type: they end at the next tensor, or at the end of the file. */
static void settle_unknown(parser *self, uint64_t index, uint64_t stop) {
    sl_table *table = self->table;
    table->ends[index] = stop;
    table->dims[table->dim_ends[index] - 1] = stop - table->begins[index];
}

/* Finishes the tensors that are listed as bytes. Refuses type 36 unless the bytes up to the next tensor have the size
 * of I2_S. */
static int32_t settle_listed(parser *self) {
    const sl_columns *columns = sl_table_columns(self->table);
    uint64_t mask = self->made->alignment - 1;
    for (uint64_t k = 0; k < self->listed_count; k++) {
        const sl_gguf_listed *one = &self->listed[k];
        const char *name = (const char *)self->in.bytes + one->name_begin;
        int64_t index = sl_table_find(self->table, name, one->name_end - one->name_begin);
        uint64_t end = columns->ends[index], stop = self->in.file_size, room = (end + mask) & ~mask;
        bool last = (uint64_t)index + 1 == columns->count;
        if (!last) stop = columns->begins[index + 1];
        if (one->dtype == SL_UNKNOWN) {
            settle_unknown(self, (uint64_t)index, sl_max_u64(stop, columns->begins[index]));
            continue;
        }
        if (last ? stop <= room : stop == room) continue;
        self->subject = (subject){"tensor", 0, one->name_begin, one->name_end};
        return refuse(self, SL_E_UNSUPPORTED, columns->begins[index],
                      "type %d with %s %u has %llu bytes as I2_S, but %llu bytes are there", GGML_I2_S, FILE_TYPE_KEY,
                      FILE_TYPE_I2_S, (unsigned long long)(end - columns->begins[index]),
                      (unsigned long long)(stop - columns->begins[index]));
    }
    return SL_OK;
}

static int32_t read_tensor(parser *self) {
    int32_t dtype = -1, status = read_name(self, "the name");
    uint64_t dims[SL_MAX_RANK], size = 0, end;
    uint32_t rank = 0, type = 0;
    if (status == SL_OK) status = read_shape(self, dims, &rank);
    if (status == SL_OK) status = read_dtype(self, &dtype, &type);
    if (status == SL_OK && (dtype == SL_UNKNOWN || is_ternary(self, type)))
        status = read_listed(self, dims, &rank, dtype, type);
    if (status == SL_OK) status = need(self, 8, "the offset");
    if (status != SL_OK) return status;
    uint64_t position = self->in.at, begin = sl_reader_u64(&self->in);
    if (begin % self->made->alignment != 0)
        return refuse(self, SL_E_FORMAT, position, "the offset %llu is not a multiple of the alignment %llu",
                      (unsigned long long)begin, (unsigned long long)self->made->alignment);
    bool whole_blocks;
    if (!sl_dtype_size(dtype, dims, rank, &size, &whole_blocks)) size = 0; /* the table reports the fault */
    if (!sl_add_u64(begin, size, &end))
        return refuse(self, SL_E_FORMAT, position, "the offset %llu and %llu bytes do not fit in 64 bits",
                      (unsigned long long)begin, (unsigned long long)size);
    const char *name = (const char *)self->in.bytes + self->subject.begin;
    size_t name_size = (size_t)(self->subject.end - self->subject.begin);
    sl_entry entry = {name, name_size, false, (int64_t)self->subject.begin - 8, dtype, dims, rank, begin, end};
    return sl_table_append(self->table, &entry, self->error);
}

/* ---- the whole file ---- */

/* Reads item 1 of the format: checks magic and version, and both counts against the rest of the file. */
static int32_t read_preamble(parser *self, uint64_t *tensors, uint64_t *entries) {
    static const char magic[] = "GGUF";
    int32_t status = need(self, MAGIC_SIZE + 4, "the start of a GGUF file");
    if (status != SL_OK) return status;
    const uint8_t *b = self->in.bytes;
    if (memcmp(b, magic, MAGIC_SIZE) != 0)
        return refuse(self, SL_E_FORMAT, 0,
                      "the file begins with %02x %02x %02x %02x, but a GGUF file begins with 47 47 55 46", b[0], b[1],
                      b[2], b[3]);
    self->in.at = MAGIC_SIZE;
    uint32_t version = sl_reader_u32(&self->in);
    if (version != 0 && (version & 0xffff) == 0)
        return refuse(self, SL_E_UNSUPPORTED, MAGIC_SIZE, "version 0x%08x: big-endian GGUF files are not supported",
                      version);
    if (version < OLDEST_VERSION && version > 0)
        return refuse(self, SL_E_UNSUPPORTED, MAGIC_SIZE, "version 1 (of August 2023) is not supported, only %d and %d",
                      OLDEST_VERSION, NEWEST_VERSION);
    if (version == 0 || version > NEWEST_VERSION)
        return refuse(self, version == 0 ? SL_E_FORMAT : SL_E_UNSUPPORTED, MAGIC_SIZE,
                      "version %u is not supported, only %d and %d", version, OLDEST_VERSION, NEWEST_VERSION);
    self->made->version = (int32_t)version;
    status = need(self, 16, "the number of tensors and metadata entries");
    if (status != SL_OK) return status;
    uint64_t position = self->in.at;
    *tensors = sl_reader_u64(&self->in);
    *entries = sl_reader_u64(&self->in);
    status = check_count(self, position, *tensors, SMALLEST_TENSOR, "tensors with descriptions");
    if (status != SL_OK) return status;
    return check_count(self, position + 8, *entries, SMALLEST_ENTRY, "metadata entries");
}

static int32_t read_header(parser *self) {
    uint64_t tensors = 0, entries = 0;
    int32_t status = read_preamble(self, &tensors, &entries);
    for (uint64_t i = 0; i < entries && status == SL_OK; i++) {
        self->subject = (subject){"metadata", i, 0, 0};
        status = read_entry(self);
    }
    if (status == SL_OK) status = check_keys(self);
    if (status != SL_OK) return status;
    uint64_t room = sl_min_u64(tensors, FIRST_TENSORS);
    status = sl_table_new(room, room * 32, room * 2, &self->table, self->error);
    for (uint64_t i = 0; i < tensors && status == SL_OK; i++) {
        self->subject = (subject){"tensor", i, 0, 0};
        status = read_tensor(self);
    }
    if (status != SL_OK) return status;
    uint64_t mask = self->made->alignment - 1, data_begin = (self->in.at + mask) & ~mask;
    static const sl_table_rules rules = {.ranges = "bytes of the data",
                                         .holes = true}; /* at least padding for alignment */
    status = sl_table_finish(self->table, &rules, data_begin, self->in.file_size, self->error);
    return status == SL_OK ? settle_listed(self) : status;
}

static int32_t read_file(sl_reader in, sl_table **table, sl_gguf **gguf, sl_error *error) {
    parser self = {.in = in, .error = error};
    self.made = calloc(1, sizeof *self.made);
    if (self.made == NULL) return sl_fail_memory(error, sizeof *self.made);
    self.made->alignment = DEFAULT_ALIGNMENT;
    int32_t status = read_header(&self);
    if (status == SL_OK) sl_reader_trim(&self.in);
    self.made->bytes = self.in.bytes;
    self.made->size = self.in.at;
    self.made->entries = self.entries;
    self.made->count = self.entry_count;
    self.made->listed = self.listed;
    self.made->listed_count = self.listed_count;
    if (status == SL_OK) {
        *table = self.table;
        *gguf = self.made;
    } else {
        sl_gguf_free(self.made);
        sl_table_free(self.table);
    }
    return status;
}

int32_t sl_gguf_read(int64_t file, uint64_t file_size, sl_table **table, sl_gguf **gguf, sl_error *error) {
    return read_file((sl_reader){.file = file, .file_size = file_size}, table, gguf, error);
}

int32_t sl_gguf_parse_head(const void *data, uint64_t held, uint64_t file_size, sl_table **table, sl_gguf **gguf,
                           sl_error *error) {
    sl_reader in = {.file = SL_MEMORY, .given = data, .given_size = held, .file_size = file_size};
    return read_file(in, table, gguf, error);
}

void sl_gguf_free(sl_gguf *gguf) {
    if (gguf == NULL) return;
    free((void *)gguf->bytes);
    free((void *)gguf->entries);
    free((void *)gguf->listed);
    free(gguf);
}
