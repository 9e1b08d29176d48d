/* Filling the caller-owned sl_error. Nothing is logged and nothing aborts. */
#ifndef SL_ERROR_H
#define SL_ERROR_H

#include "base/base.h"

/* Fills *error (NULL: nothing) and returns `status`, so that callers can write `return sl_fail(...)`. */
int32_t sl_fail(sl_error *error, int32_t status, int64_t position, const char *format, ...) SL_PRINTF(4, 5);

/* Returns SL_E_OS with the system's errno value; the text comes from Python, which knows the path. */
int32_t sl_fail_os(sl_error *error, int os_errno, int64_t position);

/* Returns SL_E_MEMORY for an allocation of `size` bytes. */
int32_t sl_fail_memory(sl_error *error, uint64_t size);

/* A quoted name is clipped to this number of bytes, so that a message stays a single readable line. */
#define SL_QUOTE_SIZE 160

/* Makes text from a file safe for a message: quoted, control characters as \xNN, and clipped at a character with "..."
 * if it is long. `text` must be valid UTF-8. Returns `out`. */
const char *sl_quote(char out[SL_QUOTE_SIZE], const char *text, size_t size);

#endif
