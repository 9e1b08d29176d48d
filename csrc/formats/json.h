/* A strict pull parser for JSON (RFC 8259) that builds no tree and allocates nothing.
 *
 * The caller asks for the value that it expects, and gets the value or an error with the first differing byte. Exactly
 * as strict as RFC 8259: no trailing commas, no comments, no leading zeros, no control characters in strings, no lone
 * surrogates, and valid UTF-8 (RFC 3629) in strings.
 */
#ifndef SL_JSON_H
#define SL_JSON_H

#include "base/error.h"

/* Maximum depth of a skipped value. Upstream's reader, serde_json, stops at level 128. The header and the tensor's
 * entry are the first two levels, and level 127 is the last that is allowed. */
#define SL_JSON_MAX_DEPTH 125

typedef struct sl_json {
    const char *begin, *at, *end;
    int64_t base; /* position of `begin` in the file, added to every reported position */
    sl_error *error;
} sl_json;

/* A string as written, without its quotes. */
typedef struct sl_json_text {
    const char *data;
    size_t size;
    bool escaped;     /* contains a backslash; sl_json_decode removes escapes */
    int64_t position; /* of the opening quote */
} sl_json_text;

/* Result of a step through an object or an array. */
enum { SL_JSON_ITEM, SL_JSON_END, SL_JSON_FAILED };

void sl_json_init(sl_json *json, const char *text, size_t size, int64_t base, sl_error *error);

/* First byte of the next value, or '\0' at the end of the text. */
char sl_json_peek(sl_json *json);

/* Position of the next value. */
int64_t sl_json_position(sl_json *json);

/* Enters '{' or '['; `what` names the subject in an error: "the header". Returns a status. */
int32_t sl_json_enter(sl_json *json, char bracket, const char *what);

/* Steps to the next member of the object and reads its key, so that its value comes next; or to the next element of the
 * array. *first must be true before the first step. */
int sl_json_next_key(sl_json *json, bool *first, sl_json_text *key);
int sl_json_next_element(sl_json *json, bool *first);

/* Reads the next value, which must have the kind of the function's name. Each returns a status. */
int32_t sl_json_text_value(sl_json *json, sl_json_text *text, const char *what);
int32_t sl_json_u64(sl_json *json, uint64_t *value, const char *what);
int32_t sl_json_null(sl_json *json);
int32_t sl_json_skip(sl_json *json);

/* Only white space may follow. */
int32_t sl_json_finish(sl_json *json);

/* Writes the decoded text, at most text->size bytes, into `out` and returns its size. The text is already validated. */
size_t sl_json_decode(const sl_json_text *text, char *out);

/* Whether the decoded text equals an ASCII word. */
bool sl_json_equals(const sl_json_text *text, const char *word, size_t word_size);

#endif
