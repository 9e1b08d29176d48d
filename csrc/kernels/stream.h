/* Copies past the cache. A plain store reads its line from memory first, which takes half as much time again. A store
 * past the cache does not, but is slower into memory that the system has not provided yet, because the system has just
 * brought its page into the cache, filled with zeros. */
#ifndef SL_STREAM_H
#define SL_STREAM_H

#include "base/base.h"

/* Smaller buffers can stay in the last level of the cache until they are used; glibc's memcpy begins near this, too. */
#define SL_STREAM_FROM ((uint64_t)24 << 20)

/* Whether copies of `size` bytes past the cache are faster: a buffer of at least `from` bytes, used before. */
bool sl_stream_pays(const void *memory, uint64_t size, uint64_t from);

/* Copies `size` bytes past the cache if the processor can, otherwise like memcpy. Other threads see the bytes after
 * sl_stream_end. */
void sl_stream_copy(void *destination, const void *source, size_t size);

/* Completes the copies of this thread. */
void sl_stream_end(void);

#endif
