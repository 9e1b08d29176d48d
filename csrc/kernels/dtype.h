/* The table of dtypes. */
#ifndef SL_DTYPE_H
#define SL_DTYPE_H

#include "base/base.h"

/* Number of the element type with the safetensors code `code` (not NUL-terminated), or -1. `guess` is tried first,
 * because most tensors have the previous tensor's dtype. */
int32_t sl_dtype_find(const char *code, size_t size, int32_t guess);

/* Number of the dtype with this ggml_type, or -1. */
int32_t sl_dtype_of_ggml(uint32_t type);

/* Sets the size of a dense tensor in bytes. Returns false if it does not fit in 64 bits, or if the elements (of a row,
 * for block types) are not whole blocks, as *whole_blocks tells. */
bool sl_dtype_size(int32_t dtype, const uint64_t *dims, uint64_t rank, uint64_t *size, bool *whole_blocks);

/* Bytes of `count` elements, which must be whole blocks. */
static inline uint64_t sl_dtype_bytes(const sl_dtype_info *info, uint64_t count) {
    return count / (uint64_t)info->block * (uint64_t)info->block_bytes;
}

#endif
