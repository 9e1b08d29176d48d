/* The pull parser over a text. Skipping a value and walking through it are two paths through the parser: they must
 * agree on what is JSON, and what a string means must survive being written and read again. */
#include "property.h"

#include "base/utf8.h"

#define BASE 8 /* where a safetensors header begins */

static int32_t walk(sl_json *json, int depth);

/* The decoded text as JSON again, every byte below 0x20, quotes and backslashes escaped; returns its size. */
static size_t encode(const char *text, size_t size, char *out) {
    size_t used = 0;
    out[used++] = '"';
    for (size_t i = 0; i < size; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c < 0x20 || c == '"' || c == '\\')
            used += (size_t)snprintf(out + used, 7, "\\u%04x", c);
        else
            out[used++] = text[i];
    }
    out[used++] = '"';
    return used;
}

static void check_text(const sl_json_text *text) {
    char *decoded = malloc(text->size + 1);
    REQUIRE(decoded != NULL);
    size_t size = sl_json_decode(text, decoded);
    REQUIRE(size <= text->size && (text->escaped || size == text->size));
    REQUIRE(sl_utf8_valid(decoded, size) == size);
    REQUIRE(sl_json_equals(text, "data_offsets", 12) == (size == 12 && memcmp(decoded, "data_offsets", 12) == 0));

    char *written = malloc(6 * size + 3);
    REQUIRE(written != NULL);
    size_t written_size = encode(decoded, size, written);
    sl_error error = untouched_error();
    sl_json json;
    sl_json_text read;
    sl_json_init(&json, written, written_size, 0, &error);
    REQUIRE(sl_json_text_value(&json, &read, "the text") == SL_OK && sl_json_finish(&json) == SL_OK);
    REQUIRE(read.size <= 6 * size);
    char *reread = malloc(read.size + 1);
    REQUIRE(reread != NULL);
    REQUIRE(sl_json_decode(&read, reread) == size && memcmp(reread, decoded, size) == 0);
    free(reread);
    free(written);
    free(decoded);
}

/* A value that is skipped; a number that is an integer must be one for both. */
static int32_t walk_other(sl_json *json) {
    sl_json_position(json); /* past white space */
    sl_json copy = *json;
    sl_error ignored = untouched_error();
    copy.error = &ignored;
    uint64_t value = 0;
    int32_t as_integer = sl_json_u64(&copy, &value, "the number");
    const char *begin = json->at;
    int32_t status = sl_json_skip(json);
    if (as_integer != SL_OK) return status;
    REQUIRE(status == SL_OK && copy.at == json->at);
    char digits[24];
    int size = snprintf(digits, sizeof digits, "%llu", (unsigned long long)value);
    REQUIRE(size == copy.at - begin && memcmp(digits, begin, (size_t)size) == 0);
    return status;
}

static int32_t walk_object(sl_json *json, int depth) {
    int32_t status = sl_json_enter(json, '{', "the object");
    bool first = true;
    int step = SL_JSON_FAILED;
    sl_json_text key;
    while (status == SL_OK && (step = sl_json_next_key(json, &first, &key)) == SL_JSON_ITEM) {
        check_text(&key);
        status = walk(json, depth + 1);
    }
    return status != SL_OK ? status : step == SL_JSON_END ? SL_OK : SL_E_FORMAT;
}

static int32_t walk_array(sl_json *json, int depth) {
    int32_t status = sl_json_enter(json, '[', "the array");
    bool first = true;
    int step = SL_JSON_FAILED;
    while (status == SL_OK && (step = sl_json_next_element(json, &first)) == SL_JSON_ITEM)
        status = walk(json, depth + 1);
    return status != SL_OK ? status : step == SL_JSON_END ? SL_OK : SL_E_FORMAT;
}

/* The value that comes next, through the function for its kind. */
static int32_t walk(sl_json *json, int depth) {
    sl_json_text text;
    int32_t status;
    char c = sl_json_peek(json);
    if (depth == SL_JSON_MAX_DEPTH && (c == '{' || c == '[')) return sl_json_skip(json);
    switch (c) {
    case '{': return walk_object(json, depth);
    case '[': return walk_array(json, depth);
    case '"':
        status = sl_json_text_value(json, &text, "the text");
        if (status == SL_OK) check_text(&text);
        return status;
    case 'n': return sl_json_null(json);
    default: return walk_other(json);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    sl_error skip_error = untouched_error(), walk_error = untouched_error();
    sl_json json;
    sl_json_init(&json, (const char *)data, size, BASE, &skip_error);
    int32_t skipped = sl_json_skip(&json);
    if (skipped == SL_OK) skipped = sl_json_finish(&json);
    check_error(&skip_error, skipped, size + BASE);
    REQUIRE(skipped == SL_OK || skip_error.position >= BASE);

    sl_json_init(&json, (const char *)data, size, BASE, &walk_error);
    int32_t walked = walk(&json, 0);
    if (walked == SL_OK) walked = sl_json_finish(&json);
    check_error(&walk_error, walked, size + BASE);
    /* The walk does not count depth: beyond the limit it may find another fault, or none. */
    if (skipped != SL_E_LIMIT) {
        REQUIRE(walked == skipped);
        REQUIRE(walked == SL_OK || walk_error.position == skip_error.position);
    }
    return 0;
}
