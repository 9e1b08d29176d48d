/* The operating system: POSIX. */
#if !defined(_WIN32)

#if defined(__linux__)
#define _GNU_SOURCE /* fallocate, MAP_NORESERVE; before any system header */
#elif !defined(__APPLE__)
#define _POSIX_C_SOURCE 200809L
#endif

#include "platform/platform.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <sys/vfs.h>
#endif
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

_Static_assert(sizeof(off_t) == 8, "files larger than 2 GiB need a 64-bit off_t");

/* Linux moves at most 0x7ffff000 bytes per call, and macOS refuses more than INT_MAX; see read(2). */
#define LARGEST_TRANSFER ((uint64_t)1 << 30)

/* The huge page of x86-64, and of AArch64 with 4 KiB pages. */
#define HUGE_PAGE ((size_t)2 << 20)

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

#if defined(__APPLE__)
#define MODIFIED(status) ((status).st_mtimespec)
#else
#define MODIFIED(status) ((status).st_mtim)
#endif

int32_t sl_file_open(const char *path_utf8, sl_file *opened, sl_error *error) {
    int descriptor;
    /* With O_NONBLOCK, a FIFO without a writer is refused below instead of awaited; regular files are unaffected. */
    do {
        descriptor = open(path_utf8, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    } while (descriptor < 0 && errno == EINTR);
    if (descriptor < 0) return sl_fail_os(error, errno, -1);
    struct stat status;
    int32_t result = SL_OK;
    if (fstat(descriptor, &status) != 0)
        result = sl_fail_os(error, errno, -1);
    else if (S_ISDIR(status.st_mode))
        result = sl_fail_os(error, EISDIR, -1);
    else if (!S_ISREG(status.st_mode))
        result = sl_fail(error, SL_E_FORMAT, -1, "not a regular file: weights are mapped or read at offsets");
    if (result != SL_OK) {
        close(descriptor);
        return result;
    }
    opened->handle = descriptor;
    opened->size = (uint64_t)status.st_size;
    opened->mtime_ns = (int64_t)MODIFIED(status).tv_sec * 1000000000 + MODIFIED(status).tv_nsec;
    opened->device = (uint64_t)status.st_dev;
    opened->inode = (uint64_t)status.st_ino;
    return SL_OK;
}

void sl_file_close(int64_t file) { close((int)file); }

int32_t sl_file_map(int64_t file, uint64_t size, int32_t writable, void **address, sl_error *error) {
    /* Private: a write copies the page and never reaches the file. Without NORESERVE, a kernel with strict overcommit
     * would count every writable byte as if it were going to be written, and RLIMIT_DATA counts them all the same. */
    int access = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void *mapped = mmap(NULL, (size_t)size, access, MAP_PRIVATE | MAP_NORESERVE, (int)file, 0);
    if (mapped == MAP_FAILED) return sl_fail_os(error, errno, -1);
#if defined(__linux__)
    /* Doubles the readahead of page faults in a single call, without reading anything itself. MADV_SEQUENTIAL is
     * slower, and its pages are evicted first; WILLNEED reads no more than a window, yet takes far longer than the
     * mapping. */
    posix_fadvise((int)file, 0, 0, POSIX_FADV_SEQUENTIAL);
#endif
    *address = mapped;
    return SL_OK;
}

void sl_file_unmap(void *address, uint64_t size) { munmap(address, (size_t)size); }

int32_t sl_file_reserve(int64_t file, uint64_t size, sl_error *error) {
#if defined(__linux__)
    /* Not posix_fallocate: if the filesystem cannot reserve, glibc writes a byte into every block. */
    int result;
    do {
        result = size > 0 ? fallocate((int)file, 0, 0, (off_t)size) : 0;
    } while (result != 0 && errno == EINTR);
    if (result != 0 && errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL && errno != EPERM)
        return sl_fail_os(error, errno, -1);
#elif defined(__APPLE__)
    fstore_t store = {F_ALLOCATEALL, F_PEOFPOSMODE, 0, (off_t)size, 0};
    if (size > 0 && fcntl((int)file, F_PREALLOCATE, &store) != 0 && errno == ENOSPC)
        return sl_fail_os(error, ENOSPC, -1);
#else
    (void)file, (void)size, (void)error;
#endif
    return SL_OK;
}

int32_t sl_file_read(int64_t file, uint64_t offset, void *memory, uint64_t size, sl_error *error) {
    uint8_t *at = memory;
    uint64_t end = offset + size;
    while (offset < end) {
        ssize_t got = pread((int)file, at, (size_t)sl_min_u64(end - offset, LARGEST_TRANSFER), (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return sl_fail_os(error, errno, (int64_t)offset);
        if (got == 0)
            return sl_fail(error, SL_E_TRUNCATED, (int64_t)offset,
                           "the file ends at byte %llu, but the read extends to byte %llu: it was truncated "
                           "after it was opened",
                           (unsigned long long)offset, (unsigned long long)end);
        at += got;
        offset += (uint64_t)got;
    }
    return SL_OK;
}

#if defined(__linux__)

/* Missing in some C libraries: statx(2) since Linux 4.11, STATX_DIOALIGN since 6.1. */
#define DIOALIGN 0x2000u

/* The beginning of struct statx, up to the fields of STATX_DIOALIGN. */
typedef struct extended_status {
    uint32_t mask;
    uint8_t before[148];
    uint32_t memory_align, offset_align;
    uint8_t after[96];
} extended_status;

_Static_assert(offsetof(extended_status, memory_align) == 0x98 && sizeof(extended_status) == 0x100, "see statx(2)");

/* Whether the kernel reports that direct reads of the file are impossible, or need more than SL_DIRECT_PAGE. */
static bool refuses(int file) {
#if defined(SYS_statx)
    extended_status status;
    memset(&status, 0, sizeof status);
    if (syscall(SYS_statx, file, "", AT_EMPTY_PATH, DIOALIGN, &status) != 0 || (status.mask & DIOALIGN) == 0)
        return false; /* unknown: the reads will show */
    return status.offset_align == 0 || SL_DIRECT_PAGE % status.offset_align != 0 || status.memory_align == 0 ||
           SL_DIRECT_PAGE % status.memory_align != 0;
#else
    (void)file;
    return false;
#endif
}

#endif

int64_t sl_file_open_direct(int64_t file) {
#if defined(__linux__)
    /* Not by its path, which may lead to another file by now, and not by the descriptor, which other reads use. */
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", (int)file);
    int descriptor;
    do {
        descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_DIRECT);
    } while (descriptor < 0 && errno == EINTR);
    if (descriptor == 0) { /* standard input was closed, but 0 means none */
        descriptor = fcntl(0, F_DUPFD_CLOEXEC, 1);
        close(0);
    }
    if (descriptor < 0) return 0;
    if (!refuses(descriptor)) return descriptor;
    close(descriptor);
#else
    (void)file;
#endif
    return 0;
}

uint64_t sl_platform_read_direct(int64_t direct, uint64_t offset, void *memory, uint64_t size) {
    ssize_t got;
    do {
        got = pread((int)direct, memory, (size_t)size, (off_t)offset);
    } while (got < 0 && errno == EINTR);
    return got < 0 ? 0 : (uint64_t)got;
}

int32_t sl_platform_write(int64_t file, bool append, uint64_t offset, const void *memory, uint64_t size,
                          sl_error *error) {
    const uint8_t *at = memory;
    while (size > 0) {
        size_t piece = (size_t)sl_min_u64(size, LARGEST_TRANSFER);
        ssize_t put = append ? write((int)file, at, piece) : pwrite((int)file, at, piece, (off_t)offset);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return sl_fail_os(error, errno, (int64_t)offset);
        if (put == 0) return sl_fail_os(error, EIO, (int64_t)offset);
        at += put;
        offset += (uint64_t)put;
        size -= (uint64_t)put;
    }
    return SL_OK;
}

void sl_platform_write_back(int64_t file, uint64_t offset, uint64_t size) {
#if defined(__linux__)
    sync_file_range((int)file, (off_t)offset, (off_t)size, SYNC_FILE_RANGE_WRITE);
#else
    (void)file, (void)offset, (void)size;
#endif
}

void sl_platform_wait_back(int64_t file, uint64_t offset, uint64_t size) {
#if defined(__linux__)
    sync_file_range((int)file, (off_t)offset, (off_t)size,
                    SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
#else
    (void)file, (void)offset, (void)size;
#endif
}

bool sl_platform_drop(int64_t file, uint64_t offset, uint64_t size) {
#if defined(POSIX_FADV_DONTNEED)
    /* Its length 0 means all of the file. */
    return size == 0 || posix_fadvise((int)file, (off_t)offset, (off_t)size, POSIX_FADV_DONTNEED) == 0;
#else
    (void)file, (void)offset, (void)size;
    return false;
#endif
}

#if defined(__linux__)

/* Missing in older C libraries: cachestat(2) since Linux 6.5, with the same number on all processors but Alpha. */
#if defined(SYS_cachestat)
#define CACHESTAT SYS_cachestat
#elif !defined(__alpha__) && !defined(__mips__)
#define CACHESTAT 451
#endif

static bool cached_pages(int file, uint64_t offset, uint64_t size, uint64_t *pages) {
#if defined(CACHESTAT)
    uint64_t range[2] = {offset, size}, counts[5]; /* the first count is that of the pages in the cache */
    if (syscall(CACHESTAT, file, range, counts, 0u) != 0) return false;
    *pages = counts[0];
    return true;
#else
    (void)file, (void)offset, (void)size, (void)pages;
    return false;
#endif
}

/* Like cached_pages, for a file of this user: mincore(2) says of others' files that all pages are there. */
static bool mapped_pages(int file, uint64_t offset, uint64_t size, uint64_t page, uint64_t *pages) {
    struct stat status;
    if (fstat(file, &status) != 0 || (status.st_uid != geteuid() && geteuid() != 0)) return false;
    uint64_t first = offset - offset % page, length = offset + size - first;
    uint8_t *mapped = mmap(NULL, (size_t)length, PROT_READ, MAP_SHARED, file, (off_t)first);
    if (mapped == MAP_FAILED) return false;
    unsigned char present[1024];
    bool known = true;
    *pages = 0;
    for (uint64_t at = 0; known && at < length; at += sizeof present * page) {
        uint64_t some = sl_min_u64(length - at, sizeof present * page);
        known = mincore(mapped + at, (size_t)some, present) == 0;
        for (uint64_t i = 0; known && i * page < some; i++) *pages += present[i] & 1;
    }
    munmap(mapped, (size_t)length);
    return known;
}

#endif

int32_t sl_file_resident(int64_t file, uint64_t offset, uint64_t size, uint64_t *bytes, sl_error *error) {
#if defined(__linux__)
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), pages = 0;
    if (size == 0 || cached_pages((int)file, offset, size, &pages) ||
        mapped_pages((int)file, offset, size, page, &pages)) {
        *bytes = sl_min_u64(pages * page, size);
        return SL_OK;
    }
#else
    (void)file, (void)offset, (void)size, (void)bytes;
#endif
    return sl_fail(error, SL_E_UNSUPPORTED, -1, "the system does not say what is in the page cache");
}

uint32_t sl_file_system(int64_t file) {
#if defined(__linux__)
    struct statfs status;
    if (fstatfs((int)file, &status) == 0) return (uint32_t)status.f_type;
#else
    (void)file;
#endif
    return 0;
}

void *sl_memory_alloc(uint64_t size) {
    /* Huge pages must be aligned to their size. The blocks of malloc and numpy are not, which would leave up to 2 MiB
     * of every block in small pages. */
    size_t length = (size_t)size, slack = size >= HUGE_PAGE ? HUGE_PAGE : 0;
    if (length > SIZE_MAX - slack) return NULL;
    uint8_t *mapped = mmap(NULL, length + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (mapped == MAP_FAILED) return NULL;
    if (slack == 0) return mapped;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (length + page - 1) / page * page;
    size_t head = (HUGE_PAGE - (uintptr_t)mapped % HUGE_PAGE) % HUGE_PAGE, tail = slack - head;
    if (head > 0) munmap(mapped, head);
    if (tail > 0) munmap(mapped + head + whole, tail);
#if defined(MADV_HUGEPAGE)
    madvise(mapped + head, whole, MADV_HUGEPAGE); /* a hint: failure is harmless */
#endif
    return mapped + head;
}

void sl_memory_free(void *memory, uint64_t size) { munmap(memory, (size_t)size); }

/* Pages to ask the system about. */
#define SAMPLES ((uint64_t)16)

bool sl_platform_present(const void *memory, uint64_t size) {
#if defined(__linux__)
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), pages = size / page;
    if (pages == 0) return false;
    for (uint64_t i = 0; i < SAMPLES; i++) { /* the first and the last among them */
        uintptr_t at = (uintptr_t)memory + (pages - 1) * i / (SAMPLES - 1) * page;
        unsigned char present = 0;
        if (mincore((void *)(at - at % page), 1, &present) != 0 || (present & 1) == 0) return false;
    }
    return true;
#else
    (void)memory;
    (void)size;
    return false;
#endif
}

uint64_t sl_platform_now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

typedef struct launch {
    pthread_t thread;
    void (*work)(void *);
    void *argument;
} launch;

static void *trampoline(void *pointer) {
    launch *self = pointer;
    self->work(self->argument);
    return NULL;
}

bool sl_thread_start(sl_thread *thread, void (*work)(void *), void *argument) {
    launch *self = malloc(sizeof *self);
    if (self == NULL) return false;
    self->work = work;
    self->argument = argument;
    if (pthread_create(&self->thread, NULL, trampoline, self) != 0) {
        free(self);
        return false;
    }
    thread->system = self;
    return true;
}

void sl_thread_join(sl_thread *thread) {
    launch *self = thread->system;
    pthread_join(self->thread, NULL);
    free(self);
    thread->system = NULL;
}

uint64_t sl_atomic_add(sl_atomic *counter, uint64_t amount) {
    return __atomic_fetch_add(&counter->value, amount, __ATOMIC_SEQ_CST);
}

uint64_t sl_atomic_load(const sl_atomic *counter) { return __atomic_load_n(&counter->value, __ATOMIC_SEQ_CST); }

void sl_atomic_lower(sl_atomic *counter, uint64_t value) {
    uint64_t seen = sl_atomic_load(counter);
    while (value < seen &&
           !__atomic_compare_exchange_n(&counter->value, &seen, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
}

void sl_atomic_raise_u32(uint32_t *number, uint32_t value) {
    uint32_t seen = __atomic_load_n(number, __ATOMIC_RELAXED);
    while (value > seen &&
           !__atomic_compare_exchange_n(number, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

#endif

/* ISO C requires a declaration in every translation unit, even if this file is empty. */
typedef int sl_platform_posix_is_compiled;
