/* The safetensors format, https://github.com/huggingface/safetensors#format
 *
 *   1. 8 bytes: N, unsigned little-endian, the size of the header.
 *   2. N bytes: a JSON object in UTF-8. It may be padded with spaces.
 *        - "__metadata__": an object of string to string, or null; optional.
 *        - every other key is the name of a tensor, and its value is an object with
 *            "dtype": one of the codes in dtype.c,
 *            "shape": an array of integers >= 0, outermost first ([] is a scalar),
 *            "data_offsets": [begin, end), bytes counted from the end of the header,
 *          or an array of these three values in this order. Other fields are ignored.
 *   3. The data to the end of the file: row-major, little-endian. In the order of data_offsets, the tensors cover the
 *      data without hole or overlap, and the length of each range matches dtype and shape.
 *
 * Refused although upstream's reader accepts it: a duplicate name.
 */
#include <stdio.h>
#include <stdlib.h>

#include "base/sort.h"
#include "formats/json.h"
#include "formats/table.h"
#include "platform/platform.h"

/* The format's own limit on N. */
#define MAX_HEADER ((uint64_t)100000000)
#define LENGTH_SIZE 8

/* A single read covers the header of a model of about 250 tensors; a larger header takes a second read. */
#define FIRST_READ 32768

#define METADATA_KEY "__metadata__"

/* Compares the size inline, which avoids a call for most texts. */
#define EQUALS(text, word) \
    (((text)->escaped || (text)->size == sizeof(word) - 1) && sl_json_equals(text, word, sizeof(word) - 1))

/* ---- read ---- */

typedef struct fields {
    bool has_dtype, has_shape, has_offsets;
    int32_t dtype;
    uint64_t rank, dims[SL_MAX_RANK];
    uint64_t begin, end;
} fields;

static int32_t fail_entry(const sl_json *json, const sl_json_text *name, int64_t position, const char *fault) {
    char quoted[SL_QUOTE_SIZE];
    return sl_fail(json->error, SL_E_FORMAT, position, "tensor %s: %s", sl_quote(quoted, name->data, name->size),
                   fault);
}

static int32_t read_dtype(sl_json *json, const sl_json_text *name, fields *entry) {
    sl_json_text code;
    int32_t status = sl_json_text_value(json, &code, "dtype");
    if (status != SL_OK) return status;
    char decoded[66]; /* the longest code has 11 characters, each at most 6 bytes in the text (\u0046) */
    size_t size = code.size <= sizeof decoded ? sl_json_decode(&code, decoded) : 0;
    entry->dtype = sl_dtype_find(decoded, size, SL_F32);
    entry->has_dtype = true;
    if (entry->dtype >= 0) return SL_OK;
    char quoted_name[SL_QUOTE_SIZE], quoted_code[SL_QUOTE_SIZE], codes[256];
    size_t used = 0;
    for (int32_t i = 0; i < SL_SAFETENSORS_COUNT; i++)
        used += (size_t)snprintf(codes + used, sizeof codes - used, "%s%s", i > 0 ? " " : "", sl_dtype_get(i)->code);
    return sl_fail(json->error, SL_E_FORMAT, code.position, "tensor %s: unknown dtype %s, expected one of %s",
                   sl_quote(quoted_name, name->data, name->size), sl_quote(quoted_code, code.data, code.size), codes);
}

static int32_t read_shape(sl_json *json, const sl_json_text *name, fields *entry) {
    int64_t position = sl_json_position(json);
    int32_t status = sl_json_enter(json, '[', "shape");
    if (status != SL_OK) return status;
    bool first = true;
    int step;
    entry->rank = 0;
    entry->has_shape = true;
    while ((step = sl_json_next_element(json, &first)) == SL_JSON_ITEM) {
        if (entry->rank == SL_MAX_RANK) {
            char quoted[SL_QUOTE_SIZE];
            return sl_fail(json->error, SL_E_LIMIT, position, "tensor %s: shape has more than %d dims",
                           sl_quote(quoted, name->data, name->size), SL_MAX_RANK);
        }
        status = sl_json_u64(json, &entry->dims[entry->rank++], "shape");
        if (status != SL_OK) return status;
    }
    return step == SL_JSON_END ? SL_OK : SL_E_FORMAT;
}

static int32_t read_offsets(sl_json *json, const sl_json_text *name, fields *entry) {
    int64_t position = sl_json_position(json);
    int32_t status = sl_json_enter(json, '[', "data_offsets");
    if (status != SL_OK) return status;
    uint64_t *values[2] = {&entry->begin, &entry->end};
    bool first = true;
    int step, read = 0;
    entry->has_offsets = true;
    while ((step = sl_json_next_element(json, &first)) == SL_JSON_ITEM) {
        if (read == 2) return fail_entry(json, name, position, "data_offsets must be two integers, found more");
        status = sl_json_u64(json, values[read++], "data_offsets");
        if (status != SL_OK) return status;
    }
    if (step == SL_JSON_FAILED) return SL_E_FORMAT;
    return read == 2 ? SL_OK : fail_entry(json, name, position, "data_offsets must be two integers, found fewer");
}

/* Reads an entry written as an object: each of the three fields once, in any order. Other fields are skipped. */
static int32_t read_entry_object(sl_json *json, const sl_json_text *name, fields *entry) {
    int32_t status = sl_json_enter(json, '{', "tensor entry");
    if (status != SL_OK) return status;
    sl_json_text key;
    bool first = true;
    int step;
    while ((step = sl_json_next_key(json, &first, &key)) == SL_JSON_ITEM) {
        if (EQUALS(&key, "dtype")) {
            if (entry->has_dtype) return fail_entry(json, name, key.position, "duplicate dtype");
            status = read_dtype(json, name, entry);
        } else if (EQUALS(&key, "shape")) {
            if (entry->has_shape) return fail_entry(json, name, key.position, "duplicate shape");
            status = read_shape(json, name, entry);
        } else if (EQUALS(&key, "data_offsets")) {
            if (entry->has_offsets) return fail_entry(json, name, key.position, "duplicate data_offsets");
            status = read_offsets(json, name, entry);
        } else
            status = sl_json_skip(json);
        if (status != SL_OK) return status;
    }
    if (step == SL_JSON_FAILED) return SL_E_FORMAT;
    if (!entry->has_dtype) return fail_entry(json, name, name->position, "dtype is missing");
    if (!entry->has_shape) return fail_entry(json, name, name->position, "shape is missing");
    if (!entry->has_offsets) return fail_entry(json, name, name->position, "data_offsets is missing");
    return SL_OK;
}

static int32_t read_entry_array(sl_json *json, const sl_json_text *name, fields *entry) {
    static int32_t (*const readers[3])(sl_json *, const sl_json_text *, fields *) = {read_dtype, read_shape,
                                                                                     read_offsets};
    int32_t status = sl_json_enter(json, '[', "tensor entry");
    if (status != SL_OK) return status;
    bool first = true;
    int step, read = 0;
    while ((step = sl_json_next_element(json, &first)) == SL_JSON_ITEM) {
        if (read == 3)
            return fail_entry(json, name, name->position, "an entry written as an array has 3 elements, found more");
        status = readers[read++](json, name, entry);
        if (status != SL_OK) return status;
    }
    if (step == SL_JSON_FAILED) return SL_E_FORMAT;
    return read == 3
               ? SL_OK
               : fail_entry(json, name, name->position, "an entry written as an array has 3 elements, found fewer");
}

/* Moves *at past `literal` if the text continues with it. A macro, so that the compiler knows the size and compares
 * words.
 */
#define TAKE(at, end, literal)                                                                           \
    ((size_t)(end - *(at)) >= sizeof(literal) - 1 && memcmp(*(at), literal, sizeof(literal) - 1) == 0 && \
     (*(at) += sizeof(literal) - 1, true))

/* Moves *at past an integer of 1 to 18 digits, which cannot overflow. */
static bool take_u64(const char **at, const char *end, uint64_t *value) {
    const char *start = *at, *digit = start;
    uint64_t number = 0;
    while (digit < end && *digit >= '0' && *digit <= '9') number = number * 10 + (uint64_t)(*digit++ - '0');
    *at = digit;
    *value = number;
    return digit > start && digit - start <= 18 && (*start != '0' || digit - start == 1);
}

/* Fast path: reads an entry in the form that every known writer produces, with the fields in this order and no white
 * space. Otherwise returns false and changes nothing; the general readers above then accept or refuse the entry. */
static bool read_usual_entry(sl_json *json, int32_t last_dtype, fields *entry) {
    const char *at = json->at, *end = json->end;
    if (!TAKE(&at, end, "{\"dtype\":\"")) return false;
    const char *code = at;
    while (at < end && *at != '"') at++;
    entry->dtype = sl_dtype_find(code, (size_t)(at - code), last_dtype);
    entry->rank = 0;
    if (entry->dtype < 0 || !TAKE(&at, end, "\",\"shape\":[")) return false;
    if (at < end && *at != ']') {
        do {
            if (entry->rank == SL_MAX_RANK || !take_u64(&at, end, &entry->dims[entry->rank++])) return false;
        } while (TAKE(&at, end, ","));
    }
    if (!TAKE(&at, end, "],\"data_offsets\":[") || !take_u64(&at, end, &entry->begin) || !TAKE(&at, end, ",") ||
        !take_u64(&at, end, &entry->end) || !TAKE(&at, end, "]}"))
        return false;
    json->at = at;
    return true;
}

/* A large header is parsed in windows of this size, which stay in the second-level cache: to fill fresh memory with the
 * whole header takes as long as parsing it. */
#define WINDOW 131072

/* The next bytes are read when fewer are left in the window, so a window holds every usual member. */
#define LONGEST_USUAL_MEMBER 4096

/* The state of reading a header. */
typedef struct reader {
    sl_json json;
    sl_table *table;
    char *decoded; /* the last decoded text with escapes */
    size_t room;
    /* Unless the JSON is the whole header: */
    char *window;
    int64_t file;
    uint64_t unread, end; /* the bytes of the file that no window has held yet */
    sl_error *error;      /* of reading them */
    bool failed;          /* whether that failed */
} reader;

/* Moves the rest of the window to its front, and fills the window from the file, if little is left in it. */
static int32_t refill(reader *self) {
    sl_json *json = &self->json;
    size_t left = (size_t)(json->end - json->at);
    if (SL_LIKELY(left >= LONGEST_USUAL_MEMBER || self->unread == self->end)) return SL_OK;
    size_t size = (size_t)sl_min_u64(WINDOW - left, self->end - self->unread);
    memmove(self->window, json->at, left);
    int32_t status = sl_file_read(self->file, self->unread, self->window + left, size, self->error);
    self->failed = status != SL_OK;
    sl_json_init(json, self->window, left + size, (int64_t)(self->unread - left), json->error);
    self->unread += size;
    return status;
}

/* Returns the text without escapes: in place, or decoded and valid until the next call. */
static int32_t plain_text(reader *self, const sl_json_text *text, const char **data, size_t *size) {
    *data = text->data;
    *size = text->size;
    if (!text->escaped) return SL_OK;
    if (text->size > self->room) {
        size_t room = text->size > 2 * self->room ? text->size : 2 * self->room;
        char *grown = realloc(self->decoded, room);
        if (grown == NULL) return sl_fail_memory(self->json.error, room);
        self->decoded = grown;
        self->room = room;
    }
    *data = self->decoded;
    *size = sl_json_decode(text, self->decoded);
    return SL_OK;
}

static int32_t read_entry(reader *self, const sl_json_text *name) {
    fields entry;
    sl_json *json = &self->json;
    const sl_table *table = self->table;
    uint64_t count = table->columns.count;
    if (!read_usual_entry(json, count > 0 ? table->dtypes[count - 1] : SL_F32, &entry)) {
        entry.has_dtype = entry.has_shape = entry.has_offsets = false;
        int32_t status = sl_json_peek(json) == '[' ? read_entry_array(json, name, &entry)
                                                   : read_entry_object(json, name, &entry);
        if (status != SL_OK) return status;
    }
    /* A text without escapes contains no newline. */
    sl_entry made = {NULL,       0,          !name->escaped, name->position, entry.dtype,
                     entry.dims, entry.rank, entry.begin,    entry.end};
    int32_t status = plain_text(self, name, &made.name, &made.name_size);
    return status == SL_OK ? sl_table_append(self->table, &made, json->error) : status;
}

static int32_t append_metadata(reader *self, const sl_json_text *text) {
    const char *data;
    size_t size;
    int32_t status = plain_text(self, text, &data, &size);
    return status == SL_OK ? sl_table_append_metadata(self->table, data, size, self->json.error) : status;
}

static int32_t read_metadata(reader *self) {
    sl_json *json = &self->json;
    if (sl_json_peek(json) == 'n') return sl_json_null(json);
    int32_t status = sl_json_enter(json, '{', METADATA_KEY);
    if (status != SL_OK) return status;
    self->table->columns.has_metadata = 1;
    sl_json_text text, value;
    bool first = true;
    int step;
    while ((step = sl_json_next_key(json, &first, &text)) == SL_JSON_ITEM) {
        status = sl_json_text_value(json, &value, METADATA_KEY);
        if (status == SL_OK) status = append_metadata(self, &text);
        if (status == SL_OK) status = append_metadata(self, &value);
        if (status != SL_OK) return status;
    }
    return step == SL_JSON_END ? SL_OK : SL_E_FORMAT;
}

static int32_t read_members(reader *self) {
    sl_json *json = &self->json;
    sl_json_peek(json);
    int32_t status = refill(self);
    if (status == SL_OK) status = sl_json_enter(json, '{', "the header");
    if (status != SL_OK) return status;
    sl_json_text name;
    bool first = true, metadata_seen = false;
    int step;
    while ((step = sl_json_next_key(json, &first, &name)) == SL_JSON_ITEM) {
        bool is_metadata = EQUALS(&name, METADATA_KEY);
        if (is_metadata && metadata_seen)
            return sl_fail(json->error, SL_E_FORMAT, name.position, "duplicate %s", METADATA_KEY);
        metadata_seen |= is_metadata;
        status = is_metadata ? read_metadata(self) : read_entry(self, &name);
        if (status == SL_OK) status = refill(self);
        if (status != SL_OK) return status;
    }
    if (step != SL_JSON_END) return SL_E_FORMAT;
    do {
        status = sl_json_finish(json);
        if (status == SL_OK) status = refill(self);
    } while (status == SL_OK && json->at < json->end);
    return status;
}

/* Reads N from the first bytes of a file of `file_size` bytes. */
static int32_t header_size_of(const void *start, uint64_t file_size, uint64_t *header_size, sl_error *error) {
    if (file_size < LENGTH_SIZE)
        return sl_fail(error, SL_E_FORMAT, (int64_t)file_size,
                       "the file has %llu bytes, but safetensors starts with an 8-byte header size",
                       (unsigned long long)file_size);
    uint64_t size = sl_load_le64(start);
    if (size > MAX_HEADER)
        return sl_fail(error, SL_E_FORMAT, 0, "header too large: %llu bytes, safetensors allows %llu",
                       (unsigned long long)size, (unsigned long long)MAX_HEADER);
    if (size > file_size - LENGTH_SIZE)
        return sl_fail(error, SL_E_FORMAT, 0, "the header of %llu bytes ends past the end of the file, which has %llu",
                       (unsigned long long)size, (unsigned long long)file_size);
    *header_size = size;
    return SL_OK;
}

/* Sets *table to a finished table; leaves it untouched on failure. */
static int32_t make_table(reader *self, uint64_t header_size, uint64_t file_size, sl_table **table, sl_error *error) {
    static const sl_table_rules rules = {.ranges = "data_offsets", .holes = false};
    /* Entries of real headers take 90 to 150 bytes, less than half of which is the name, and have one to four dims. */
    int32_t status = sl_table_new(header_size / 64 + 1, header_size / 2, header_size / 32, &self->table, error);
    if (status != SL_OK) return status;
    status = read_members(self);
    free(self->decoded);
    if (status == SL_OK) status = sl_table_finish(self->table, &rules, LENGTH_SIZE + header_size, file_size, error);
    if (status == SL_OK)
        *table = self->table;
    else
        sl_table_free(self->table);
    return status;
}

/* Like make_table, from a whole header. */
static int32_t parse_header(const char *header, uint64_t header_size, uint64_t file_size, sl_table **table,
                            sl_error *error) {
    reader self = {.file = -1};
    sl_json_init(&self.json, header, (size_t)header_size, LENGTH_SIZE, error);
    return make_table(&self, header_size, file_size, table, error);
}

int32_t sl_safetensors_parse_head(const void *data, uint64_t held, uint64_t file_size, sl_table **table,
                                  sl_error *error) {
    uint64_t header_size;
    if (held < sl_min_u64(file_size, LENGTH_SIZE))
        return sl_fail(error, SL_E_ARGUMENT, -1, "%llu bytes do not hold the size of the header",
                       (unsigned long long)held);
    int32_t status = header_size_of(data, file_size, &header_size, error);
    if (status != SL_OK) return status;
    if (held - LENGTH_SIZE < header_size)
        return sl_fail(error, SL_E_ARGUMENT, -1, "%llu bytes do not hold a header of %llu", (unsigned long long)held,
                       (unsigned long long)header_size);
    return parse_header((const char *)data + LENGTH_SIZE, header_size, file_size, table, error);
}

int32_t sl_safetensors_parse(const void *data, uint64_t size, sl_table **table, sl_error *error) {
    return sl_safetensors_parse_head(data, size, size, table, error);
}

sl_table *sl_safetensors_table(const void *data, uint64_t size) {
    sl_table *table;
    return sl_safetensors_parse(data, size, &table, NULL) == SL_OK ? table : NULL;
}

sl_table *sl_safetensors_brief(const void *data, uint64_t size, sl_lone *lone) {
    sl_table *table = sl_safetensors_table(data, size);
    lone->set = 0;
    if (table == NULL) return NULL;
    const sl_columns *columns = sl_table_columns(table);
    lone->columns = *columns;
    if (columns->count != 1 || !columns->plain) return table;
    uint64_t rank = columns->dim_ends[0], name_size = columns->names_size - 1;
    if (rank > sizeof lone->dims / sizeof lone->dims[0] || name_size > sizeof lone->name) return table;
    lone->set = 1;
    lone->dtype = columns->dtypes[0];
    lone->begin = columns->begins[0];
    lone->name_size = name_size;
    lone->rank = rank;
    if (rank > 0) memcpy(lone->dims, columns->dims, rank * sizeof lone->dims[0]);
    memcpy(lone->name, columns->names, name_size);
    sl_table_free(table);
    return NULL;
}

/* Reads a whole file; nothing else of the file is needed afterwards. */
static int32_t read_whole(int64_t file, uint64_t file_size, sl_table **table, void **content, sl_error *error) {
    uint64_t header_size = 0;
    char *bytes = malloc((size_t)file_size + 1);
    if (bytes == NULL) return sl_fail_memory(error, file_size);
    int32_t status = sl_file_read(file, 0, bytes, file_size, error);
    if (status == SL_OK) status = header_size_of(bytes, file_size, &header_size, error);
    if (status == SL_OK) status = parse_header(bytes + LENGTH_SIZE, header_size, file_size, table, error);
    if (status == SL_OK)
        *content = bytes;
    else
        free(bytes);
    return status;
}

/* Reads a large header, of which the first bytes are in memory, in windows. *whole is set if it has to be read whole: a
 * member may be larger than a window, and errors are reported from the whole header. */
static int32_t read_in_windows(int64_t file, const char *first, uint64_t header_size, uint64_t file_size,
                               sl_table **table, bool *whole, sl_error *error) {
    reader self = {
        .window = malloc(WINDOW), .file = file, .unread = FIRST_READ, .end = LENGTH_SIZE + header_size, .error = error};
    if (self.window == NULL) return sl_fail_memory(error, WINDOW);
    sl_json_init(&self.json, first + LENGTH_SIZE, FIRST_READ - LENGTH_SIZE, LENGTH_SIZE, NULL);
    int32_t status = make_table(&self, header_size, file_size, table, NULL);
    *whole = status != SL_OK && !self.failed;
    free(self.window);
    return status;
}

/* The header is read and never mapped, so that a file that shrinks meanwhile causes an error, not a SIGBUS. */
static int32_t read_file(int64_t file, uint64_t file_size, sl_table **table, sl_error *error) {
    uint64_t header_size = 0, got = sl_min_u64(file_size, FIRST_READ);
    char first[FIRST_READ];
    bool whole = false;
    int32_t status = sl_file_read(file, 0, first, got, error);
    if (status == SL_OK) status = header_size_of(first, file_size, &header_size, error);
    if (status != SL_OK) return status;
    if (LENGTH_SIZE + header_size <= got)
        return parse_header(first + LENGTH_SIZE, header_size, file_size, table, error);
    status = read_in_windows(file, first, header_size, file_size, table, &whole, error);
    if (!whole) return status;

    char *header = sl_memory_alloc(header_size);
    if (header == NULL) return sl_fail_memory(error, header_size);
    status = sl_file_read(file, LENGTH_SIZE, header, header_size, error);
    if (status == SL_OK) status = parse_header(header, header_size, file_size, table, error);
    sl_memory_free(header, header_size);
    return status;
}

int32_t sl_safetensors_open(const char *path_utf8, sl_file *opened, sl_table **table, sl_error *error) {
    sl_file file;
    int32_t status = sl_file_open(path_utf8, &file, error);
    if (status != SL_OK) return status;
    status = read_file(file.handle, file.size, table, error);
    if (status != SL_OK) {
        sl_file_close(file.handle);
        return status;
    }
    *opened = file;
    return SL_OK;
}

int32_t sl_safetensors_load(const char *path_utf8, uint64_t largest, sl_loaded *loaded) {
    sl_file file;
    void *content = NULL;
    int32_t status = sl_file_open(path_utf8, &file, &loaded->error);
    if (status != SL_OK) return status;
    if (file.size <= largest)
        status = read_whole(file.handle, file.size, &loaded->table, &content, &loaded->error);
    else
        status = read_file(file.handle, file.size, &loaded->table, &loaded->error);
    if (status != SL_OK || content != NULL) {
        sl_file_close(file.handle);
        file.handle = -1;
    }
    if (status != SL_OK) return status;
    loaded->file = file;
    loaded->content = content;
    loaded->columns = *sl_table_columns(loaded->table);
    return SL_OK;
}

/* ---- write ---- */

/* Appends to growing memory; after a failure, further appends do nothing. */
typedef struct text {
    char *data;
    uint64_t size, capacity;
    bool failed;
} text;

static void put(text *out, const char *bytes, uint64_t size) {
    if (out->failed || size == 0) return; /* memcpy from NULL would be undefined */
    if (size > out->capacity - out->size) {
        /* Capacity and size are below MAX_HEADER or a name's size; a small header takes a single allocation. */
        uint64_t capacity = (out->capacity + size) * 2 + 256;
        char *grown = realloc(out->data, (size_t)capacity);
        if (grown == NULL) {
            out->failed = true;
            return;
        }
        out->data = grown;
        out->capacity = capacity;
    }
    memcpy(out->data + out->size, bytes, (size_t)size);
    out->size += size;
}

static void put_word(text *out, const char *word) { put(out, word, strlen(word)); }

static void put_u64(text *out, uint64_t value) {
    char digits[20], *first = digits + sizeof digits; /* snprintf would take most of the time of a header */
    do {
        *--first = (char)('0' + value % 10);
        value /= 10;
    } while (value > 0);
    put(out, first, (uint64_t)(digits + sizeof digits - first));
}

/* Writes a string like serde_json: short escapes, \u00xx in lower case for other control characters, and everything
 * else unchanged. Files must have the same bytes as upstream's. */
static void put_string(text *out, const char *bytes, uint64_t size) {
    static const char hex[] = "0123456789abcdef";
    static const char letters[] = {['\b'] = 'b', ['\f'] = 'f', ['\n'] = 'n', ['\r'] = 'r',
                                   ['\t'] = 't', ['"'] = '"',  ['\\'] = '\\'};
    put_word(out, "\"");
    uint64_t plain = 0;
    for (uint64_t i = 0; i < size; i++) {
        unsigned char c = (unsigned char)bytes[i];
        if (c >= 0x20 && c != '"' && c != '\\') continue;
        put(out, bytes + plain, i - plain);
        plain = i + 1;
        char escape[6] = {'\\', letters[c], '0', '0', hex[c >> 4], hex[c & 15]};
        if (letters[c] == 0) escape[1] = 'u';
        put(out, escape, letters[c] != 0 ? 2 : 6);
    }
    put(out, bytes + plain, size - plain);
    put_word(out, "\"");
}

static const char *name_of(const sl_columns *tensors, uint64_t i, uint64_t *size) {
    uint64_t begin = i > 0 ? tensors->name_ends[i - 1] + 1 : 0;
    *size = tensors->name_ends[i] - begin;
    return tensors->names + begin;
}

static void put_metadata(text *out, const sl_columns *tensors) {
    put(out, "\"", 1);
    put_word(out, METADATA_KEY);
    put_word(out, "\":{");
    uint64_t begin = 0;
    for (uint64_t i = 0; i < 2 * tensors->metadata_count; i++) {
        if (i > 0) put_word(out, i % 2 == 0 ? "," : ":");
        uint64_t size = tensors->metadata_ends[i] - begin;
        put_string(out, size > 0 ? tensors->metadata_text + begin : "", size); /* NULL if all texts are empty */
        begin += size;
    }
    put_word(out, "}");
}

static void put_entry(text *out, const sl_columns *tensors, uint64_t i, uint64_t begin, uint64_t end) {
    uint64_t name_size;
    const char *name = name_of(tensors, i, &name_size);
    put_string(out, name, name_size);
    put_word(out, ":{\"dtype\":\"");
    put_word(out, sl_dtype_get(tensors->dtypes[i])->code);
    put_word(out, "\",\"shape\":[");
    uint64_t first = i > 0 ? tensors->dim_ends[i - 1] : 0;
    for (uint64_t k = first; k < tensors->dim_ends[i]; k++) {
        if (k > first) put_word(out, ",");
        put_u64(out, tensors->dims[k]);
    }
    put_word(out, "],\"data_offsets\":[");
    put_u64(out, begin);
    put_word(out, ",");
    put_u64(out, end);
    put_word(out, "]}");
}

/* Upstream's order: widest dtype first, so that each tensor starts aligned, then by name. */
static int compare_tensors(const void *context, uint32_t a, uint32_t b) {
    const sl_columns *tensors = context;
    if (tensors->dtypes[a] != tensors->dtypes[b]) return tensors->dtypes[a] > tensors->dtypes[b] ? -1 : 1;
    uint64_t a_size, b_size;
    const char *a_name = name_of(tensors, a, &a_size), *b_name = name_of(tensors, b, &b_size);
    return sl_compare_bytes(a_name, a_size, b_name, b_size);
}

static int32_t fail_tensor(const sl_columns *tensors, uint64_t i, int32_t status, const char *fault, sl_error *error) {
    char quoted[SL_QUOTE_SIZE];
    uint64_t size;
    const char *name = name_of(tensors, i, &size);
    return sl_fail(error, status, -1, "tensor %s: %s", sl_quote(quoted, name, (size_t)size), fault);
}

static int32_t compute_sizes(const sl_columns *tensors, uint64_t *sizes, sl_error *error) {
    uint64_t total = 0;
    for (uint64_t i = 0; i < tensors->count; i++) {
        uint64_t first = i > 0 ? tensors->dim_ends[i - 1] : 0;
        bool whole_blocks;
        if (!sl_dtype_size(tensors->dtypes[i], tensors->dims + first, tensors->dim_ends[i] - first, &sizes[i],
                           &whole_blocks))
            return fail_tensor(tensors, i, SL_E_ARGUMENT,
                               whole_blocks ? "its size does not fit in 64 bits"
                                            : "its size is not a whole number of bytes",
                               error);
        if (!sl_add_u64(total, sizes[i], &total) || total > INT64_MAX)
            return fail_tensor(tensors, i, SL_E_ARGUMENT, "with it the file would exceed the largest file size", error);
        uint64_t name_size;
        const char *name = name_of(tensors, i, &name_size);
        if (name_size == sizeof METADATA_KEY - 1 && memcmp(name, METADATA_KEY, name_size) == 0)
            return fail_tensor(tensors, i, SL_E_ARGUMENT, "this name is reserved for the metadata of safetensors",
                               error);
    }
    return SL_OK;
}

int32_t sl_safetensors_header(const sl_columns *tensors, uint32_t *order, uint64_t *sizes, void **header,
                              uint64_t *header_size, sl_error *error) {
    int32_t status = compute_sizes(tensors, sizes, error);
    if (status != SL_OK) return status;
    uint64_t count = tensors->count, offset = 0;
    uint32_t *spare = malloc((size_t)count * 2 * sizeof *spare + 1);
    if (spare == NULL) return sl_fail_memory(error, count * 2 * sizeof *spare);
    for (uint64_t i = 0; i < count; i++) order[i] = (uint32_t)i;
    if (!tensors->keeps_order) sl_sort(order, spare, count, compare_tensors, tensors);
    free(spare);

    text out = {NULL, 0, 0, false};
    char length[LENGTH_SIZE] = {0};
    put(&out, length, LENGTH_SIZE);
    put_word(&out, "{");
    if (tensors->has_metadata) put_metadata(&out, tensors);
    for (uint64_t k = 0; k < count; k++) {
        if (k > 0 || tensors->has_metadata) put_word(&out, ",");
        put_entry(&out, tensors, order[k], offset, offset + sizes[order[k]]);
        offset += sizes[order[k]];
        if (out.size > MAX_HEADER + LENGTH_SIZE) break;
    }
    put_word(&out, "}");
    while (out.size % 8 != 0 && !out.failed) put_word(&out, " ");
    if (out.failed || out.size - LENGTH_SIZE > MAX_HEADER) {
        status = out.failed ? sl_fail_memory(error, out.capacity * 2)
                            : sl_fail(error, SL_E_ARGUMENT, -1, "header too large: safetensors allows %llu bytes",
                                      (unsigned long long)MAX_HEADER);
        free(out.data);
        return status;
    }
    sl_store_le64(out.data, out.size - LENGTH_SIZE);
    *header = out.data;
    *header_size = out.size;
    return SL_OK;
}

uint64_t sl_safetensors_brief_header(const char *texts, const uint64_t *numbers, sl_brief_header *brief) {
    uint64_t name_ends[SL_BRIEF], sizes[SL_BRIEF], dims[SL_BRIEF_AXES], dim_ends[SL_BRIEF], axes = 0, ends = 0, size;
    uint8_t dtypes[SL_BRIEF];
    uint32_t order[SL_BRIEF];
    void *header;
    uint64_t count = *numbers++, names_size = *numbers++;
    if (count > SL_BRIEF) return 0;
    for (uint64_t i = 0; i < count; i++) {
        dtypes[i] = (uint8_t)*numbers++;
        uint64_t rank = *numbers++;
        if (rank > SL_BRIEF_AXES - axes) return 0;
        for (uint64_t k = 0; k < rank; k++) dims[axes++] = *numbers++;
        dim_ends[i] = axes;
    }
    for (uint64_t i = 0; i < names_size; i++) {
        if (texts[i] != '\n') continue;
        if (ends == count) return 0; /* a name contains a newline */
        name_ends[ends++] = i;
    }
    const sl_columns columns = {.count = count,
                                .names = texts,
                                .name_ends = name_ends,
                                .dtypes = dtypes,
                                .dims = dims,
                                .dim_ends = dim_ends,
                                .has_metadata = numbers[0] != 0,
                                .metadata_count = numbers[1],
                                .metadata_text = texts + names_size,
                                .metadata_ends = numbers + 2};
    if (ends != count || sl_safetensors_header(&columns, order, sizes, &header, &size, NULL) != SL_OK) return 0;
    bool fits = size <= sizeof brief->header;
    if (fits) memcpy(brief->header, header, (size_t)size);
    free(header);
    for (uint64_t i = 0; i < count; i++) {
        brief->places[i] = order[i];
        brief->places[count + i] = sizes[i];
    }
    return fits ? size : 0;
}
