/* The JSON pull parser. */
#include "formats/json.h"

#include "base/utf8.h"

static int64_t position_of(const sl_json *json, const char *at) { return json->base + (at - json->begin); }

/* Fails at json->at with the expected and the actual text. */
static int32_t unexpected(sl_json *json, const char *expected, const char *what) {
    int64_t position = position_of(json, json->at);
    const char *subject = what != NULL ? what : "JSON";
    if (json->at == json->end)
        return sl_fail(json->error, SL_E_FORMAT, position, "%s: the JSON ends where %s was expected", subject,
                       expected);
    unsigned char c = (unsigned char)*json->at;
    if (c > 0x20 && c < 0x7f)
        return sl_fail(json->error, SL_E_FORMAT, position, "%s: found '%c' where %s was expected", subject, c,
                       expected);
    return sl_fail(json->error, SL_E_FORMAT, position, "%s: found byte 0x%02x where %s was expected", subject, c,
                   expected);
}

static void skip_space(sl_json *json) {
    while (json->at < json->end && (*json->at == ' ' || *json->at == '\n' || *json->at == '\r' || *json->at == '\t'))
        json->at++;
}

void sl_json_init(sl_json *json, const char *text, size_t size, int64_t base, sl_error *error) {
    json->begin = json->at = text;
    json->end = text + size;
    json->base = base;
    json->error = error;
}

char sl_json_peek(sl_json *json) {
    skip_space(json);
    return json->at < json->end ? *json->at : '\0';
}

int64_t sl_json_position(sl_json *json) {
    skip_space(json);
    return position_of(json, json->at);
}

int32_t sl_json_enter(sl_json *json, char bracket, const char *what) {
    if (sl_json_peek(json) != bracket || json->at == json->end)
        return unexpected(json, bracket == '{' ? "'{'" : "'['", what);
    json->at++;
    return SL_OK;
}

/* ---- strings ---- */

/* Marks the top bit of each byte that ends the plain run of a string: a quote, a backslash, a byte below 0x20 or above
 * 0x7f. Mycroft's zero-byte test: a borrow may also mark a byte above a marked byte, so only the lowest mark is exact.
 */
static uint64_t special_bytes(uint64_t word) {
    const uint64_t ones = 0x0101010101010101u, tops = 0x8080808080808080u;
    uint64_t quote = word ^ (ones * '"'), slash = word ^ (ones * '\\');
    return (((quote - ones) & ~quote) | ((slash - ones) & ~slash) | (word - ones * 0x20) | word) & tops;
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/* The value of the four digits after \u, or -1. */
static int32_t hex4(const char *at, const char *end) {
    if (end - at < 4) return -1;
    int32_t value = 0;
    for (int i = 0; i < 4; i++) {
        int digit = hex_digit(at[i]);
        if (digit < 0) return -1;
        value = value << 4 | digit;
    }
    return value;
}

/* Reads the escape at the backslash: sets *point to its code point and returns its length in the text, or 0 if it is
 * invalid. */
static size_t read_escape(const char *at, const char *end, uint32_t *point) {
    if (end - at < 2) return 0;
    switch (at[1]) {
    case '"': *point = '"'; return 2;
    case '\\': *point = '\\'; return 2;
    case '/': *point = '/'; return 2;
    case 'b': *point = '\b'; return 2;
    case 'f': *point = '\f'; return 2;
    case 'n': *point = '\n'; return 2;
    case 'r': *point = '\r'; return 2;
    case 't': *point = '\t'; return 2;
    case 'u': break;
    default: return 0;
    }
    int32_t high = hex4(at + 2, end);
    if (high < 0 || (high >= 0xdc00 && high <= 0xdfff)) return 0;
    if (high < 0xd800 || high > 0xdbff) {
        *point = (uint32_t)high;
        return 6;
    }
    if (end - at < 12 || at[6] != '\\' || at[7] != 'u') return 0;
    int32_t low = hex4(at + 8, end);
    if (low < 0xdc00 || low > 0xdfff) return 0;
    *point = 0x10000u + (((uint32_t)high - 0xd800u) << 10) + ((uint32_t)low - 0xdc00u);
    return 12;
}

/* Reads the string with its opening quote at json->at. */
static int32_t read_string(sl_json *json, sl_json_text *text, const char *what) {
    const char *open = json->at, *at = open + 1, *end = json->end;
    bool escaped = false;
    for (;;) {
        uint64_t special = 0;
        while (end - at >= 8 && (special = special_bytes(sl_load_le64(at))) == 0) at += 8;
        if (special != 0) at += sl_trailing_zeros(special) / 8;
        if (at == end) {
            json->at = open;
            return sl_fail(json->error, SL_E_FORMAT, position_of(json, open),
                           "%s: the string that starts here has no closing quote", what);
        }
        unsigned char c = (unsigned char)*at;
        if (c == '"') break;
        size_t length = 1;
        uint32_t point;
        const char *fault = NULL;
        if (c == '\\') {
            escaped = true;
            length = read_escape(at, end, &point);
            fault = "an invalid escape";
        } else if (c < 0x20) {
            length = 0;
            fault = "an unescaped control character";
        } else if (c >= 0x80) {
            length = sl_utf8_length(at, end);
            fault = "invalid UTF-8";
        }
        if (length == 0) {
            json->at = at;
            return sl_fail(json->error, SL_E_FORMAT, position_of(json, at), "%s: the string holds %s (byte 0x%02x)",
                           what, fault, c);
        }
        at += length;
    }
    text->data = open + 1;
    text->size = (size_t)(at - (open + 1));
    text->escaped = escaped;
    text->position = position_of(json, open);
    json->at = at + 1;
    return SL_OK;
}

int32_t sl_json_text_value(sl_json *json, sl_json_text *text, const char *what) {
    if (sl_json_peek(json) != '"') return unexpected(json, "a string", what);
    return read_string(json, text, what);
}

static size_t encode_utf8(uint32_t point, char *out) {
    if (point < 0x80) {
        out[0] = (char)point;
        return 1;
    }
    if (point < 0x800) {
        out[0] = (char)(0xc0 | point >> 6);
        out[1] = (char)(0x80 | (point & 0x3f));
        return 2;
    }
    if (point < 0x10000) {
        out[0] = (char)(0xe0 | point >> 12);
        out[1] = (char)(0x80 | (point >> 6 & 0x3f));
        out[2] = (char)(0x80 | (point & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | point >> 18);
    out[1] = (char)(0x80 | (point >> 12 & 0x3f));
    out[2] = (char)(0x80 | (point >> 6 & 0x3f));
    out[3] = (char)(0x80 | (point & 0x3f));
    return 4;
}

size_t sl_json_decode(const sl_json_text *text, char *out) {
    if (!text->escaped) {
        memcpy(out, text->data, text->size);
        return text->size;
    }
    const char *at = text->data, *end = at + text->size;
    size_t used = 0;
    while (at < end) {
        uint32_t point = 0;
        size_t length = *at == '\\' ? read_escape(at, end, &point) : 0;
        if (length == 0)
            out[used++] = *at++;
        else {
            used += encode_utf8(point, out + used); /* at most 3 bytes for an escape of 6, and 4 for an escape of 12 */
            at += length;
        }
    }
    return used;
}

bool sl_json_equals(const sl_json_text *text, const char *word, size_t word_size) {
    if (!text->escaped) return text->size == word_size && memcmp(text->data, word, word_size) == 0;
    char decoded[256]; /* enough, because our words are short and an escaped ASCII character has 6 bytes */
    if (text->size > sizeof decoded) return false;
    return sl_json_decode(text, decoded) == word_size && memcmp(decoded, word, word_size) == 0;
}

/* ---- steps through containers ---- */

/* Advances past the comma to the next member (SL_JSON_ITEM), or past the end. */
static int next_member(sl_json *json, bool *first, char bracket, const char *member) {
    const char *closing = bracket == '}' ? "',' or '}'" : "',' or ']'";
    char c = sl_json_peek(json);
    if (c == bracket) {
        json->at++;
        return SL_JSON_END;
    }
    if (!*first) {
        if (c != ',') {
            unexpected(json, closing, NULL);
            return SL_JSON_FAILED;
        }
        json->at++;
        c = sl_json_peek(json);
    }
    *first = false;
    if (json->at == json->end || c == bracket || c == ',') {
        unexpected(json, member, NULL);
        return SL_JSON_FAILED;
    }
    return SL_JSON_ITEM;
}

int sl_json_next_element(sl_json *json, bool *first) { return next_member(json, first, ']', "a value"); }

int sl_json_next_key(sl_json *json, bool *first, sl_json_text *key) {
    int step = next_member(json, first, '}', "a name in quotes");
    if (step != SL_JSON_ITEM) return step;
    if (*json->at != '"') {
        unexpected(json, "a name in quotes", NULL);
        return SL_JSON_FAILED;
    }
    if (read_string(json, key, "JSON") != SL_OK) return SL_JSON_FAILED;
    if (sl_json_peek(json) != ':' || json->at == json->end) {
        unexpected(json, "':'", NULL);
        return SL_JSON_FAILED;
    }
    json->at++;
    return SL_JSON_ITEM;
}

/* ---- other values ---- */

static bool is_digit(const sl_json *json) { return json->at < json->end && *json->at >= '0' && *json->at <= '9'; }

int32_t sl_json_u64(sl_json *json, uint64_t *value, const char *what) {
    static const char expected[] = "an integer from 0 to 18446744073709551615";
    skip_space(json);
    const char *start = json->at;
    uint64_t number = 0;
    if (!is_digit(json)) return unexpected(json, expected, what);
    while (is_digit(json)) {
        if (!sl_mul_u64(number, 10, &number) || !sl_add_u64(number, (uint64_t)(*json->at - '0'), &number)) {
            json->at = start;
            return sl_fail(json->error, SL_E_FORMAT, position_of(json, start), "%s: the number does not fit in 64 bits",
                           what);
        }
        json->at++;
    }
    if (json->at - start > 1 && *start == '0') {
        json->at = start;
        return sl_fail(json->error, SL_E_FORMAT, position_of(json, start), "%s: the number has a leading zero", what);
    }
    if (json->at < json->end && (*json->at == '.' || *json->at == 'e' || *json->at == 'E'))
        return unexpected(json, "the end of an integer", what);
    *value = number;
    return SL_OK;
}

static int32_t skip_word(sl_json *json, const char *word) {
    size_t size = strlen(word);
    if ((size_t)(json->end - json->at) < size || memcmp(json->at, word, size) != 0)
        return unexpected(json, "a JSON value", NULL);
    json->at += size;
    return SL_OK;
}

int32_t sl_json_null(sl_json *json) {
    skip_space(json);
    return skip_word(json, "null");
}

static int32_t skip_digits(sl_json *json) {
    if (!is_digit(json)) return unexpected(json, "a digit", NULL);
    while (is_digit(json)) json->at++;
    return SL_OK;
}

/* number = [ "-" ] int [ "." digits ] [ ("e" / "E") [ "+" / "-" ] digits ] */
static int32_t skip_number(sl_json *json) {
    int32_t status;
    if (*json->at == '-') json->at++;
    if (json->at < json->end && *json->at == '0') {
        json->at++;
        if (is_digit(json)) return unexpected(json, "no digit after a leading zero", NULL);
    } else if ((status = skip_digits(json)) != SL_OK)
        return status;
    if (json->at < json->end && *json->at == '.') {
        json->at++;
        if ((status = skip_digits(json)) != SL_OK) return status;
    }
    if (json->at < json->end && (*json->at == 'e' || *json->at == 'E')) {
        json->at++;
        if (json->at < json->end && (*json->at == '+' || *json->at == '-')) json->at++;
        if ((status = skip_digits(json)) != SL_OK) return status;
    }
    return SL_OK;
}

/* Skips the value at json->at, which must not be an object or an array. */
static int32_t skip_scalar(sl_json *json) {
    sl_json_text text;
    switch (json->at < json->end ? *json->at : '\0') {
    case '"': return read_string(json, &text, "JSON");
    case 't': return skip_word(json, "true");
    case 'f': return skip_word(json, "false");
    case 'n': return skip_word(json, "null");
    case '-': return skip_number(json);
    default: return is_digit(json) ? skip_number(json) : unexpected(json, "a JSON value", NULL);
    }
}

int32_t sl_json_skip(sl_json *json) {
    struct {
        char bracket; /* the closing bracket of the container */
        bool first;
    } open[SL_JSON_MAX_DEPTH];
    int depth = 0;
    do {
        if (depth > 0) { /* to the next member of the innermost container, or out of it */
            sl_json_text key;
            int step = open[depth - 1].bracket == '}' ? sl_json_next_key(json, &open[depth - 1].first, &key)
                                                      : sl_json_next_element(json, &open[depth - 1].first);
            if (step == SL_JSON_FAILED) return SL_E_FORMAT;
            if (step == SL_JSON_END) {
                depth--;
                continue;
            }
        }
        char c = sl_json_peek(json);
        if (c == '{' || c == '[') {
            if (depth == SL_JSON_MAX_DEPTH)
                return sl_fail(json->error, SL_E_LIMIT, position_of(json, json->at),
                               "JSON: values are nested deeper than %d", SL_JSON_MAX_DEPTH);
            open[depth].bracket = c == '{' ? '}' : ']';
            open[depth].first = true;
            depth++;
            json->at++;
        } else {
            int32_t status = skip_scalar(json);
            if (status != SL_OK) return status;
        }
    } while (depth > 0);
    return SL_OK;
}

int32_t sl_json_finish(sl_json *json) {
    skip_space(json);
    return json->at == json->end ? SL_OK : unexpected(json, "the end of the header", NULL);
}
