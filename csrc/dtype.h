/* Floor 3: the one table of dtypes. */
#ifndef SL_DTYPE_H
#define SL_DTYPE_H

#include "base.h"

/* Index of the dtype that safetensors writes as `code` (not NUL-terminated), or -1. `guess` is tried first: most
 * tensors have the dtype of the one before. */
int32_t sl_dtype_find(const char *code, size_t size, int32_t guess);

/* Bytes of a dense tensor: product of dims times bits over 8. False when the product does not fit in 64 bits or is
 * no whole number of bytes (*whole_bytes tells which). */
bool sl_dtype_size(int32_t dtype, const uint64_t *dims, uint64_t rank, uint64_t *size, bool *whole_bytes);

#endif
