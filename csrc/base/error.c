/* Filling the caller's error. */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>

int32_t sl_fail(sl_error *error, int32_t status, int64_t position, const char *format, ...) {
    if (error == NULL) return status;
    error->status = status;
    error->os_errno = 0;
    error->position = position;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
    return status;
}

int32_t sl_fail_os(sl_error *error, int os_errno, int64_t position) {
    sl_fail(error, SL_E_OS, position, "a system call failed (errno %d)", os_errno);
    if (error != NULL) error->os_errno = os_errno;
    return SL_E_OS;
}

int32_t sl_fail_memory(sl_error *error, uint64_t size) {
    return sl_fail(error, SL_E_MEMORY, -1, "cannot allocate %llu bytes", (unsigned long long)size);
}

const char *sl_quote(char out[SL_QUOTE_SIZE], const char *text, size_t size) {
    static const char hex[] = "0123456789abcdef";
    /* Room for the longest unit (\xNN or a 4-byte character), "...", the closing quote and NUL. */
    const size_t room = SL_QUOTE_SIZE - 4 - 3 - 2;
    size_t used = 0;
    out[used++] = '\'';
    for (size_t i = 0; i < size;) {
        if (used > room) {
            memcpy(out + used, "...", 3);
            used += 3;
            break;
        }
        unsigned char c = (unsigned char)text[i++];
        /* U+0080 to U+009F, two bytes each, are control characters too: a terminal treats U+009B as ESC [. */
        bool c1 = c == 0xc2 && i < size && (unsigned char)text[i] >= 0x80 && (unsigned char)text[i] < 0xa0;
        if (c1) c = (unsigned char)text[i++];
        if (c < 0x20 || c == 0x7f || c1) {
            out[used++] = '\\';
            out[used++] = 'x';
            out[used++] = hex[c >> 4];
            out[used++] = hex[c & 15];
        } else {
            out[used++] = (char)c;
            for (int k = 0; k < 3 && i < size && ((unsigned char)text[i] & 0xc0) == 0x80; k++) out[used++] = text[i++];
        }
    }
    out[used++] = '\'';
    out[used] = '\0';
    return out;
}
