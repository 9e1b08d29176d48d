/* The operating system. posix.c and windows.c are the only files with system headers; both are always compiled and each
 * is empty on the other's system. The sl_file_* and sl_memory_* functions of sl_api.h are implemented there too. */
#ifndef SL_PLATFORM_H
#define SL_PLATFORM_H

#include "base/error.h"

/* Writes exactly `size` bytes, at `offset` or at the file's current position (`append`). */
int32_t sl_platform_write(int64_t file, bool append, uint64_t offset, const void *memory, uint64_t size,
                          sl_error *error);

/* What sl_file_open_direct needs of memory, offsets and sizes: a page, which is a multiple of what any disk asks for.
 */
#define SL_DIRECT_PAGE ((uint64_t)4096)

/* Reads up to `size` bytes at `offset` past the page cache, all multiples of SL_DIRECT_PAGE. Returns their number;
 * fewer at the end of the file, and 0 where the system refuses for whatever reason: the file is then read as usual. */
uint64_t sl_platform_read_direct(int64_t direct, uint64_t offset, void *memory, uint64_t size);

/* Microseconds of a monotonic clock. */
uint64_t sl_platform_now_us(void);

/* One thread that runs work(argument). */
typedef struct sl_thread {
    void *system; /* the system's own handle, owned until joined */
} sl_thread;

bool sl_thread_start(sl_thread *thread, void (*work)(void *), void *argument);
void sl_thread_join(sl_thread *thread);

/* A counter shared by threads. Sequentially consistent: it is touched once per chunk of megabytes. */
typedef struct sl_atomic {
    volatile uint64_t value;
} sl_atomic;

uint64_t sl_atomic_add(sl_atomic *counter, uint64_t amount); /* returns the value before */
uint64_t sl_atomic_load(const sl_atomic *counter);
/* Lowers the counter to `value` if that is smaller. */
void sl_atomic_lower(sl_atomic *counter, uint64_t value);
/* Raises a number that threads share to `value` if that is larger. */
void sl_atomic_raise_u32(uint32_t *number, uint32_t value);

#endif
