/* The operating system: Windows. */
#if defined(_WIN32)

#include "platform/platform.h"

#include <errno.h>
#include <stdlib.h>

#define WIN32_LEAN_AND_MEAN
#include <windows.h>

/* ReadFile and WriteFile take 32-bit sizes. */
#define LARGEST_TRANSFER ((uint64_t)1 << 30)

/* Returns the errno value for a Windows error code. */
static int errno_of(DWORD code) {
    switch (code) {
    case ERROR_FILE_NOT_FOUND:
    case ERROR_PATH_NOT_FOUND:
    case ERROR_INVALID_NAME:
    case ERROR_INVALID_DRIVE:
    case ERROR_BAD_PATHNAME:
    case ERROR_BAD_NETPATH:
    case ERROR_BAD_NET_NAME:
    case ERROR_FILENAME_EXCED_RANGE: return ENOENT;
    case ERROR_ACCESS_DENIED:
    case ERROR_SHARING_VIOLATION:
    case ERROR_LOCK_VIOLATION:
    case ERROR_WRITE_PROTECT:
    case ERROR_USER_MAPPED_FILE: return EACCES;
    case ERROR_INVALID_HANDLE: return EBADF;
    case ERROR_TOO_MANY_OPEN_FILES: return EMFILE;
    case ERROR_DISK_FULL:
    case ERROR_HANDLE_DISK_FULL: return ENOSPC;
    case ERROR_NOT_ENOUGH_MEMORY:
    case ERROR_OUTOFMEMORY:
    case ERROR_COMMITMENT_LIMIT:
    case ERROR_NO_SYSTEM_RESOURCES: return ENOMEM;
    default: return EIO;
    }
}

static int32_t fail_last(sl_error *error, int64_t position) {
    return sl_fail_os(error, errno_of(GetLastError()), position);
}

static HANDLE handle_of(int64_t file) { return (HANDLE)(intptr_t)file; }

/* FILETIME steps of 100 ns from 1601 to 1970. */
#define EPOCH 116444736000000000

int32_t sl_file_open(const char *path_utf8, sl_file *opened, sl_error *error) {
    int length = MultiByteToWideChar(CP_UTF8, 0, path_utf8, -1, NULL, 0);
    if (length <= 0) return fail_last(error, -1);
    wchar_t *path = malloc((size_t)length * sizeof *path);
    if (path == NULL) return sl_fail_memory(error, (uint64_t)length * sizeof *path);
    MultiByteToWideChar(CP_UTF8, 0, path_utf8, -1, path, length);
    DWORD attributes = GetFileAttributesW(path);
    if (attributes != INVALID_FILE_ATTRIBUTES && (attributes & FILE_ATTRIBUTE_DIRECTORY)) {
        free(path);
        return sl_fail_os(error, EISDIR, -1);
    }
    /* FILE_SHARE_DELETE lets others rename or delete the file while we read it, as on POSIX. Without
     * FILE_FLAG_OVERLAPPED, reads of a handle by several threads would wait for each other. */
    HANDLE handle = CreateFileW(path, GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, NULL,
                                OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL | FILE_FLAG_OVERLAPPED, NULL);
    free(path);
    if (handle == INVALID_HANDLE_VALUE) return fail_last(error, -1);
    LARGE_INTEGER bytes;
    FILETIME modified;
    int32_t result = SL_OK;
    if (GetFileType(handle) != FILE_TYPE_DISK)
        result = sl_fail(error, SL_E_FORMAT, -1, "not a regular file: weights are mapped or read at offsets");
    else if (!GetFileSizeEx(handle, &bytes) || !GetFileTime(handle, NULL, NULL, &modified))
        result = fail_last(error, -1);
    if (result != SL_OK) {
        CloseHandle(handle);
        return result;
    }
    int64_t steps = ((int64_t)modified.dwHighDateTime << 32) | modified.dwLowDateTime;
    *opened = (sl_file){
        .handle = (int64_t)(intptr_t)handle, .size = (uint64_t)bytes.QuadPart, .mtime_ns = (steps - EPOCH) * 100};
    return SL_OK;
}

void sl_file_close(int64_t file) { CloseHandle(handle_of(file)); }

/* Unlike POSIX with MAP_NORESERVE, Windows charges the whole of a writable view to memory and page file, as if all of
 * it were going to be written. */
int32_t sl_file_map(int64_t file, uint64_t size, int32_t writable, void **address, sl_error *error) {
    HANDLE section = CreateFileMappingW(handle_of(file), NULL, writable ? PAGE_WRITECOPY : PAGE_READONLY, 0, 0, NULL);
    if (section == NULL) return fail_last(error, -1);
    void *mapped = MapViewOfFile(section, writable ? FILE_MAP_COPY : FILE_MAP_READ, 0, 0, (SIZE_T)size);
    int32_t result = mapped == NULL ? fail_last(error, -1) : SL_OK;
    CloseHandle(section); /* the view keeps the section alive */
    if (result == SL_OK) *address = mapped;
    return result;
}

void sl_file_unmap(void *address, uint64_t size) {
    (void)size;
    UnmapViewOfFile(address);
}

int32_t sl_file_reserve(int64_t file, uint64_t size, sl_error *error) {
    FILE_ALLOCATION_INFO reserved;
    reserved.AllocationSize.QuadPart = (LONGLONG)size;
    if (!SetFileInformationByHandle(handle_of(file), FileAllocationInfo, &reserved, sizeof reserved) &&
        errno_of(GetLastError()) == ENOSPC)
        return sl_fail_os(error, ENOSPC, -1);
    return SL_OK;
}

/* Wraps an offset for ReadFile and WriteFile, which then ignore the handle's own position. */
static OVERLAPPED overlapped_at(uint64_t offset) {
    OVERLAPPED position;
    memset(&position, 0, sizeof position);
    position.Offset = (DWORD)offset;
    position.OffsetHigh = (DWORD)(offset >> 32);
    return position;
}

/* Reads at an offset of a handle opened with FILE_FLAG_OVERLAPPED, and waits for the result; 0 bytes at the end. */
static bool read_at(HANDLE handle, HANDLE event, uint64_t offset, void *memory, DWORD size, DWORD *got) {
    OVERLAPPED position = overlapped_at(offset);
    position.hEvent = event; /* not the handle, because any thread's read signals it */
    *got = 0;
    if (!ReadFile(handle, memory, size, NULL, &position) && GetLastError() != ERROR_IO_PENDING)
        return GetLastError() == ERROR_HANDLE_EOF;
    return GetOverlappedResult(handle, &position, got, TRUE) || GetLastError() == ERROR_HANDLE_EOF;
}

int32_t sl_file_read(int64_t file, uint64_t offset, void *memory, uint64_t size, sl_error *error) {
    uint8_t *at = memory;
    uint64_t end = offset + size;
    if (size == 0) return SL_OK;
    HANDLE event = CreateEventW(NULL, TRUE, FALSE, NULL);
    if (event == NULL) return fail_last(error, (int64_t)offset);
    int32_t result = SL_OK;
    while (offset < end && result == SL_OK) {
        DWORD got;
        if (!read_at(handle_of(file), event, offset, at, (DWORD)sl_min_u64(end - offset, LARGEST_TRANSFER), &got))
            result = fail_last(error, (int64_t)offset);
        else if (got == 0)
            result = sl_fail(error, SL_E_TRUNCATED, (int64_t)offset,
                             "the file ends at byte %llu, but the read extends to byte %llu: it was truncated "
                             "after it was opened",
                             (unsigned long long)offset, (unsigned long long)end);
        at += got;
        offset += got;
    }
    CloseHandle(event);
    return result;
}

int64_t sl_file_open_direct(int64_t file) {
    (void)file;
    return 0;
}

uint64_t sl_platform_read_direct(int64_t direct, uint64_t offset, void *memory, uint64_t size) {
    (void)direct, (void)offset, (void)memory, (void)size;
    return 0;
}

int32_t sl_platform_write(int64_t file, bool append, uint64_t offset, const void *memory, uint64_t size,
                          sl_error *error) {
    const uint8_t *at = memory;
    while (size > 0) {
        OVERLAPPED position = overlapped_at(offset);
        DWORD put = 0;
        if (!WriteFile(handle_of(file), at, (DWORD)sl_min_u64(size, LARGEST_TRANSFER), &put, append ? NULL : &position))
            return fail_last(error, (int64_t)offset);
        if (put == 0) return sl_fail_os(error, EIO, (int64_t)offset);
        at += put;
        offset += put;
        size -= put;
    }
    return SL_OK;
}

void sl_platform_write_back(int64_t file, uint64_t offset, uint64_t size) { (void)file, (void)offset, (void)size; }

void sl_platform_wait_back(int64_t file, uint64_t offset, uint64_t size) { (void)file, (void)offset, (void)size; }

bool sl_platform_drop(int64_t file, uint64_t offset, uint64_t size) {
    (void)file, (void)offset, (void)size;
    return false;
}

int32_t sl_file_resident(int64_t file, uint64_t offset, uint64_t size, uint64_t *bytes, sl_error *error) {
    (void)file, (void)offset, (void)size, (void)bytes;
    return sl_fail(error, SL_E_UNSUPPORTED, -1, "the system does not say what is in the page cache");
}

uint32_t sl_file_system(int64_t file) {
    (void)file;
    return 0;
}

void *sl_memory_alloc(uint64_t size) {
    return VirtualAlloc(NULL, (SIZE_T)size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

void sl_memory_free(void *memory, uint64_t size) {
    (void)size;
    VirtualFree(memory, 0, MEM_RELEASE);
}

bool sl_platform_present(const void *memory, uint64_t size) {
    (void)memory;
    (void)size;
    return false;
}

uint64_t sl_platform_now_us(void) {
    LARGE_INTEGER ticks, frequency;
    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&frequency);
    uint64_t whole = (uint64_t)(ticks.QuadPart / frequency.QuadPart);
    uint64_t rest = (uint64_t)(ticks.QuadPart % frequency.QuadPart);
    return whole * 1000000u + rest * 1000000u / (uint64_t)frequency.QuadPart;
}

typedef struct launch {
    HANDLE thread;
    void (*work)(void *);
    void *argument;
} launch;

static DWORD WINAPI trampoline(LPVOID pointer) {
    launch *self = pointer;
    self->work(self->argument);
    return 0;
}

bool sl_thread_start(sl_thread *thread, void (*work)(void *), void *argument) {
    launch *self = malloc(sizeof *self);
    if (self == NULL) return false;
    self->work = work;
    self->argument = argument;
    self->thread = CreateThread(NULL, 0, trampoline, self, 0, NULL);
    if (self->thread == NULL) {
        free(self);
        return false;
    }
    thread->system = self;
    return true;
}

void sl_thread_join(sl_thread *thread) {
    launch *self = thread->system;
    WaitForSingleObject(self->thread, INFINITE);
    CloseHandle(self->thread);
    free(self);
    thread->system = NULL;
}

uint64_t sl_atomic_add(sl_atomic *counter, uint64_t amount) {
    return (uint64_t)InterlockedExchangeAdd64((volatile LONG64 *)&counter->value, (LONG64)amount);
}

uint64_t sl_atomic_load(const sl_atomic *counter) {
    return (uint64_t)InterlockedCompareExchange64((volatile LONG64 *)&counter->value, 0, 0);
}

void sl_atomic_lower(sl_atomic *counter, uint64_t value) {
    uint64_t seen = sl_atomic_load(counter);
    while (value < seen) {
        uint64_t found = (uint64_t)InterlockedCompareExchange64((volatile LONG64 *)&counter->value, (LONG64)value,
                                                                (LONG64)seen);
        if (found == seen) break;
        seen = found;
    }
}

void sl_atomic_raise_u32(uint32_t *number, uint32_t value) {
    volatile LONG *shared = (volatile LONG *)number;
    uint32_t seen = (uint32_t)InterlockedCompareExchange(shared, 0, 0);
    while (value > seen) {
        uint32_t found = (uint32_t)InterlockedCompareExchange(shared, (LONG)value, (LONG)seen);
        if (found == seen) break;
        seen = found;
    }
}

#endif

/* ISO C requires a declaration in every translation unit, even if this file is empty. */
typedef int sl_platform_windows_is_compiled;
