/* UTF-8 (RFC 3629). */
#ifndef SL_UTF8_H
#define SL_UTF8_H

#include "base/base.h"

/* Length of the character at `at`, whose first byte is >= 0x80, or 0 if it is invalid. The ranges are from table 3-7 of
 * the Unicode Standard: no overlong forms, no surrogates, nothing above U+10FFFF. */
static inline size_t sl_utf8_length(const char *at, const char *end) {
    const unsigned char *b = (const unsigned char *)at;
    size_t left = (size_t)(end - at);
    size_t length = b[0] >= 0xc2 && b[0] <= 0xdf   ? 2
                    : b[0] >= 0xe0 && b[0] <= 0xef ? 3
                    : b[0] >= 0xf0 && b[0] <= 0xf4 ? 4
                                                   : 0;
    if (length == 0 || left < length) return 0;
    unsigned char low = b[0] == 0xe0 ? 0xa0 : b[0] == 0xf0 ? 0x90 : 0x80;
    unsigned char high = b[0] == 0xed ? 0x9f : b[0] == 0xf4 ? 0x8f : 0xbf;
    if (b[1] < low || b[1] > high) return 0;
    for (size_t i = 2; i < length; i++)
        if (b[i] < 0x80 || b[i] > 0xbf) return 0;
    return length;
}

/* Number of bytes of `text` before the first invalid byte; `size` if all are valid UTF-8. */
static inline size_t sl_utf8_valid(const char *text, size_t size) {
    const char *at = text, *end = text + size;
    while (at < end) {
        size_t length = (unsigned char)*at < 0x80 ? 1 : sl_utf8_length(at, end);
        if (length == 0) break;
        at += length;
    }
    return (size_t)(at - text);
}

#endif
