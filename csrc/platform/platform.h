/* The operating system. Only posix.c and windows.c include system headers. Both are always compiled; on the other
 * system they are empty. They also implement the sl_file_* and sl_memory_* functions of sl_api.h. */
#ifndef SL_PLATFORM_H
#define SL_PLATFORM_H

#include "base/error.h"

/* Writes exactly `size` bytes, at `offset` or at the file's current position (`append`). */
int32_t sl_platform_write(int64_t file, bool append, uint64_t offset, const void *memory, uint64_t size,
                          sl_error *error);

/* Has the system begin to write bytes of a file to the disk, if it can. Errors of the disk are left to fsync. */
void sl_platform_write_back(int64_t file, uint64_t offset, uint64_t size);

/* Waits until written bytes are on the disk, if the system can; their pages can then be dropped. */
void sl_platform_wait_back(int64_t file, uint64_t offset, uint64_t size);

/* Drops the whole pages in a range from the page cache, unless they are dirty or mapped. False if the system cannot. */
bool sl_platform_drop(int64_t file, uint64_t offset, uint64_t size);

/* Alignment of memory, offsets and sizes for sl_file_open_direct: a page, which satisfies any disk. */
#define SL_DIRECT_PAGE ((uint64_t)4096)

/* Reads up to `size` bytes at `offset` past the page cache, all multiples of SL_DIRECT_PAGE. Returns the number of
 * bytes: fewer at the end of the file, and 0 if the system refuses for any reason; the file should then be read as
 * usual. */
uint64_t sl_platform_read_direct(int64_t direct, uint64_t offset, void *memory, uint64_t size);

/* Whether the system has provided all pages of a buffer, judged by a sample of them. False if it does not say. */
bool sl_platform_present(const void *memory, uint64_t size);

/* A monotonic clock in microseconds. */
uint64_t sl_platform_now_us(void);

/* A thread that runs work(argument). */
typedef struct sl_thread {
    void *system; /* the system's handle, owned until the thread is joined */
} sl_thread;

bool sl_thread_start(sl_thread *thread, void (*work)(void *), void *argument);
void sl_thread_join(sl_thread *thread);

/* A counter shared by threads. Sequentially consistent, which is cheap at one access per chunk of megabytes. */
typedef struct sl_atomic {
    volatile uint64_t value;
} sl_atomic;

uint64_t sl_atomic_add(sl_atomic *counter, uint64_t amount); /* returns the previous value */
uint64_t sl_atomic_load(const sl_atomic *counter);
/* Lowers the counter to `value` if `value` is smaller. */
void sl_atomic_lower(sl_atomic *counter, uint64_t value);
/* Raises a shared number to `value` if `value` is larger. */
void sl_atomic_raise_u32(uint32_t *number, uint32_t value);

#endif
