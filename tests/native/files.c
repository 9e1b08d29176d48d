/* The platform's functions on the system at hand: opening, reading, writing, mapping, threads; what happens to a file
 * that is open when others rename, truncate or delete it. Prints nothing when all is well.
 *
 * usage: files FOLDER [large]        large: also files past 4 GiB and transfers past 1 GiB, where the system counts in
 * 32 bits */
#if !defined(_WIN32)
#define _POSIX_C_SOURCE 200809L /* fileno, ftruncate; before any system header */
#endif

#include <errno.h>

#include "harness.h"
#include "kernels/convert.h"
#include "platform/platform.h"

#if defined(_WIN32)
#include <io.h>
#include <windows.h>
#else
#include <sys/types.h>
#include <unistd.h>
#endif

#define MIB ((uint64_t)1 << 20)

/* ---- what the core leaves to Python ---- */

static char folder[512];

/* Not ASCII, as paths of people are. */
static const char *path_of(const char *name) {
    static char path[1024];
    snprintf(path, sizeof path, "%s/\xc3\xa9\xe6\x9d\x83-%s", folder, name);
    return path;
}

#if defined(_WIN32)
static const wchar_t *wide(const char *path) {
    static wchar_t buffers[2][1024], *out;
    out = out == buffers[0] ? buffers[1] : buffers[0];
    MultiByteToWideChar(CP_UTF8, 0, path, -1, out, 1024);
    return out;
}

static FILE *open_for_writing(const char *path) { return _wfopen(wide(path), L"wb"); }
static int64_t handle_of(FILE *stream) { return (int64_t)_get_osfhandle(_fileno(stream)); }
static bool truncate_to(FILE *stream, uint64_t size) { return _chsize_s(_fileno(stream), (int64_t)size) == 0; }
static bool rename_to(const char *from, const char *to) {
    return MoveFileExW(wide(from), wide(to), MOVEFILE_REPLACE_EXISTING) != 0;
}
static bool delete(const char *path) { return DeleteFileW(wide(path)) != 0; }
#else
static FILE *open_for_writing(const char *path) { return fopen(path, "wb"); }
static int64_t handle_of(FILE *stream) { return fileno(stream); }
static bool truncate_to(FILE *stream, uint64_t size) { return ftruncate(fileno(stream), (off_t)size) == 0; }
static bool rename_to(const char *from, const char *to) { return rename(from, to) == 0; }
static bool delete(const char *path) { return unlink(path) == 0; }
#endif

static void expect_ok(int32_t status, const sl_error *error, int line) {
    if (status != SL_OK) FAIL("line %d: status %d, errno %d: %s", line, status, error->os_errno, error->message);
}

#define OK(call) expect_ok((call), &error, __LINE__)

/* ---- jobs ---- */

static uint64_t run(const sl_job *jobs, uint64_t count, int32_t threads, sl_error *error, int32_t *status) {
    sl_cursor cursor = {0};
    do {
        *status = sl_jobs_run(jobs, count, SL_TIER_SCALAR, threads, 50, &cursor, error);
    } while (*status == SL_OK && !cursor.finished);
    return cursor.bytes_done;
}

static uint8_t *random_bytes(uint64_t size) {
    uint64_t state = size;
    uint8_t *bytes = allocate((size_t)size + 8);
    for (uint64_t i = 0; i < size; i += 8) sl_store_le64(bytes + i, random_u64(&state));
    return bytes;
}

static void write_file(const char *path, uint8_t *bytes, uint64_t size, int32_t op) {
    sl_error error = {0};
    int32_t status;
    FILE *stream = open_for_writing(path);
    EXPECT(stream != NULL);
    if (stream == NULL) exit(1);
    uint64_t half = size / 2 + 1;
    const sl_job jobs[] = {
        {.op = op, .file = handle_of(stream), .offset = 0, .memory = bytes, .size = half},
        {.op = op, .file = handle_of(stream), .offset = half, .memory = bytes + half, .size = size - half},
    };
    OK(sl_file_reserve(handle_of(stream), size, &error));
    EXPECT(run(jobs, 2, 3, &error, &status) == size);
    OK(status);
    EXPECT(fclose(stream) == 0);
}

static sl_job conversion(int64_t file, uint64_t offset, uint8_t *memory, uint64_t size) {
    return (sl_job){.op = SL_OP_CONVERT,
                    .from = SL_BF16,
                    .to = SL_F32,
                    .file = file,
                    .offset = offset,
                    .memory = memory,
                    .size = size};
}

/* Written by jobs, read by jobs that convert, with several threads, beside one conversion in memory. */
static void check_jobs(void) {
    const uint64_t size = 19 * MIB + 6, count = size / 2;
    uint8_t *bytes = random_bytes(size), *wanted = allocate(4 * count), *got = allocate(4 * count);
    sl_error error = {0};
    sl_file file;
    int32_t status;
    EXPECT(sl_convert(SL_TIER_SCALAR, SL_BF16, SL_F32, bytes, wanted, count) == SL_OK);
    const int32_t ops[] = {SL_OP_WRITE, SL_OP_APPEND, SL_OP_WRITE_BACK};
    for (size_t k = 0; k < sizeof ops / sizeof *ops; k++) {
        write_file(path_of("jobs"), bytes, size, ops[k]);
        OK(sl_file_open(path_of("jobs"), &file, &error));
        EXPECT(file.size == size);
        const uint64_t first = 5 * MIB;
        const sl_job jobs[] = {
            conversion(file.handle, 0, got, first),
            conversion(file.handle, first, got + 2 * first, size - first),
        };
        memset(got, 0, 4 * count);
        EXPECT(run(jobs, 2, 4, &error, &status) == size);
        OK(status);
        EXPECT(memcmp(got, wanted, 4 * count) == 0);
        sl_file_close(file.handle);
        EXPECT(delete(path_of("jobs")));
    }
    free(bytes);
    free(wanted);
    free(got);
}

/* ---- past the page cache ---- */

/* From anywhere to anywhere: to memory that lies within a page as the file does, and that does not. */
static void check_direct(void) {
    enum { THREADS = 3, ROOMS = THREADS * SL_DIRECT_ROOM + 4096 };
    const uint64_t size = 7 * MIB + 4099;
    const uint64_t begins[] = {0, 1, 4095, 4096, 4097, 100000}, sizes[] = {1, 4095, 4096, 8193, 3 * MIB, 6 * MIB + 17};
    uint8_t *bytes = random_bytes(size), *memory = allocate(size + 8192 + ROOMS);
    uint8_t *page = memory + (4096 - (uintptr_t)memory % 4096) % 4096, *rooms = page + (size / 4096 + 1) * 4096 + 4096;
    sl_error error = {0};
    sl_file file;
    write_file(path_of("direct"), bytes, size, SL_OP_WRITE);
    OK(sl_file_open(path_of("direct"), &file, &error));
    int64_t direct = sl_file_open_direct(file.handle);
    EXPECT(direct >= 0);
    for (size_t i = 0; i < 6; i++)
        for (size_t k = 0; k < 6; k++)
            for (uint64_t shift = 0; shift < 2; shift++) {
                uint64_t some = sl_min_u64(sizes[k], size - begins[i]);
                uint8_t *to = page + (begins[i] + shift) % 4096;
                sl_cursor cursor = {.room = rooms, .rooms = THREADS - 1}; /* the last thread has none */
                const sl_job job = {
                    .file = file.handle, .direct = direct, .offset = begins[i], .memory = to, .size = some};
                to[some] = 171;
                do OK(sl_jobs_run(&job, 1, SL_TIER_SCALAR, THREADS, 50, &cursor, &error));
                while (!cursor.finished);
                EXPECT(memcmp(to, bytes + begins[i], some) == 0 && to[some] == 171);
            }
    /* Where it ends too early. */
    sl_cursor cursor = {.room = rooms, .rooms = THREADS};
    const sl_job beyond = {
        .file = file.handle, .direct = direct, .offset = 5 * MIB + 1, .memory = page, .size = 3 * MIB};
    EXPECT(sl_jobs_run(&beyond, 1, SL_TIER_SCALAR, THREADS, 0, &cursor, &error) == SL_E_TRUNCATED &&
           error.position == (int64_t)size);
    if (direct != 0) sl_file_close(direct);
    sl_file_close(file.handle);
    EXPECT(delete(path_of("direct")));
    free(bytes);
    free(memory);
}

/* ---- refusals ---- */

static void check_refusals(void) {
    sl_error error = {0};
    sl_file file = {.handle = -7, .size = 7};
    void *mapped = NULL;
    EXPECT(sl_file_open("", &file, &error) == SL_E_OS && error.os_errno == ENOENT);
    EXPECT(sl_file_open(path_of("missing/missing"), &file, &error) == SL_E_OS && error.os_errno == ENOENT);
    EXPECT(sl_file_open(path_of("missing"), &file, &error) == SL_E_OS && error.os_errno == ENOENT);
    EXPECT(sl_file_open(folder, &file, &error) == SL_E_OS && error.os_errno == EISDIR);
#if defined(_WIN32)
    EXPECT(sl_file_open("NUL", &file, &error) == SL_E_FORMAT);
#else
    EXPECT(sl_file_open("/dev/null", &file, &error) == SL_E_FORMAT);
#endif
    EXPECT(file.handle == -7 && file.size == 7);

    uint8_t *bytes = random_bytes(1000), got[100];
    write_file(path_of("short"), bytes, 1000, SL_OP_WRITE);
    OK(sl_file_open(path_of("short"), &file, &error));
    OK(sl_file_read(file.handle, 900, got, 100, &error));
    EXPECT(memcmp(got, bytes + 900, 100) == 0);
    OK(sl_file_read(file.handle, 5000, got, 0, &error));
    EXPECT(sl_file_read(file.handle, 950, got, 100, &error) == SL_E_TRUNCATED && error.position == 1000);
    EXPECT(sl_file_read(file.handle, 5000, got, 1, &error) == SL_E_TRUNCATED && error.position == 5000);
    EXPECT(sl_file_read(file.handle, 5000, got, 1, NULL) == SL_E_TRUNCATED);
    int32_t status;
    const sl_job jobs[] = {
        {.file = file.handle, .offset = 0, .memory = got, .size = 100},
        {.file = file.handle, .offset = 960, .memory = got, .size = 100},
    };
    sl_cursor cursor = {0};
    status = sl_jobs_run(jobs, 2, SL_TIER_SCALAR, 2, 0, &cursor, &error);
    EXPECT(status == SL_E_TRUNCATED && cursor.failed_job == 1 && error.position == 1000);
    sl_file_close(file.handle);
    EXPECT(sl_file_read(file.handle, 0, got, 1, &error) == SL_E_OS && error.os_errno == EBADF);
    EXPECT(sl_file_map(file.handle, 1000, 1, &mapped, &error) == SL_E_OS && error.os_errno == EBADF && mapped == NULL);
    EXPECT(delete(path_of("short")));
    free(bytes);
}

/* ---- a file that others change while it is open ---- */

static void check_sharing(void) {
    const uint64_t size = 3 * MIB;
    uint8_t *bytes = random_bytes(size), *again = random_bytes(size / 2), got[100];
    char old[1024];
    sl_error error = {0};
    sl_file file;
    void *mapped = NULL;
    snprintf(old, sizeof old, "%s", path_of("old"));
    write_file(old, bytes, size, SL_OP_WRITE);

    /* Renamed while it is open: the name is another file's, the bytes are the same. */
    OK(sl_file_open(old, &file, &error));
    EXPECT(rename_to(old, path_of("renamed")));
    OK(sl_file_read(file.handle, size - 100, got, 100, &error));
    EXPECT(memcmp(got, bytes + size - 100, 100) == 0);
    EXPECT(rename_to(path_of("renamed"), old));

    /* A mapping outlives the handle, and what is written into it reaches no file. */
    OK(sl_file_map(file.handle, size, 1, &mapped, &error));
    sl_file_close(file.handle);
    EXPECT(memcmp(mapped, bytes, size) == 0);
    memset(mapped, 0, size);
    OK(sl_file_open(old, &file, &error));
    OK(sl_file_read(file.handle, 0, got, 100, &error));
    EXPECT(memcmp(got, bytes, 100) == 0);
    sl_file_close(file.handle);

    /* A mapping that may not be written has the same bytes. */
    void *read_only = NULL;
    OK(sl_file_open(old, &file, &error));
    OK(sl_file_map(file.handle, size, 0, &read_only, &error));
    sl_file_close(file.handle);
    EXPECT(memcmp(read_only, bytes, size) == 0);
    sl_file_unmap(read_only, size);

    /* Replaced while it is mapped: POSIX does it and the mapping stays; Windows refuses it. */
    write_file(path_of("new"), again, size / 2, SL_OP_WRITE);
    bool replaced = rename_to(path_of("new"), old);
    sl_file_unmap(mapped, size);
#if defined(_WIN32)
    if (!replaced) EXPECT(rename_to(path_of("new"), old));
#else
    EXPECT(replaced);
#endif
    OK(sl_file_open(old, &file, &error));
    EXPECT(file.size == size / 2);

    /* Deleted while it is open. */
    EXPECT(delete(old));
    OK(sl_file_read(file.handle, size / 2 - 100, got, 100, &error));
    EXPECT(memcmp(got, again + size / 2 - 100, 100) == 0);
    sl_file_close(file.handle);
    EXPECT(sl_file_open(old, &file, &error) == SL_E_OS && error.os_errno == ENOENT);
    free(bytes);
    free(again);
}

/* ---- large files ---- */

static void check_large(void) {
    const uint64_t size = ((uint64_t)9 << 29) + 12345, piece = ((uint64_t)1 << 30) + 77777;
    uint8_t *bytes = random_bytes(MIB), *memory;
    sl_error error = {0};
    sl_file file;
    void *mapped = NULL;
    FILE *stream = open_for_writing(path_of("large"));
    EXPECT(stream != NULL && truncate_to(stream, size));
    if (stream == NULL) return;
    OK(sl_platform_write(handle_of(stream), false, size - MIB, bytes, MIB, &error));
    EXPECT(fclose(stream) == 0);

    OK(sl_file_open(path_of("large"), &file, &error));
    EXPECT(file.size == size);
    memory = sl_memory_alloc(piece);
    EXPECT(memory != NULL);
    if (memory != NULL) {
        OK(sl_file_read(file.handle, size - piece, memory, piece, &error));
        EXPECT(memcmp(memory + piece - MIB, bytes, MIB) == 0 && memory[0] == 0 && memory[piece - MIB - 1] == 0);
        sl_memory_free(memory, piece);
    }
    OK(sl_file_map(file.handle, size, 1, &mapped, &error));
    if (mapped != NULL) {
        EXPECT(memcmp((uint8_t *)mapped + size - MIB, bytes, MIB) == 0);
        sl_file_unmap(mapped, size);
    }
    sl_file_close(file.handle);
    EXPECT(delete(path_of("large")));
    free(bytes);
}

/* ---- threads ---- */

typedef struct counters {
    sl_atomic total, lowest;
    uint32_t highest;
} counters;

static void count_up(void *argument) {
    counters *all = argument;
    for (uint32_t i = 0; i < 20000; i++) {
        uint64_t before = sl_atomic_add(&all->total, 1);
        sl_atomic_lower(&all->lowest, 100000 - before);
        sl_atomic_raise_u32(&all->highest, (uint32_t)before);
    }
}

static void check_threads(void) {
    counters all = {{0}, {UINT64_MAX}, 0};
    sl_thread threads[4];
    uint64_t start = sl_platform_now_us();
    for (int i = 0; i < 4; i++) EXPECT(sl_thread_start(&threads[i], count_up, &all));
    count_up(&all);
    for (int i = 0; i < 4; i++) sl_thread_join(&threads[i]);
    EXPECT(sl_atomic_load(&all.total) == 100000);
    EXPECT(sl_atomic_load(&all.lowest) == 1);
    EXPECT(all.highest == 99999);
    EXPECT(sl_platform_now_us() >= start && sl_platform_now_us() - start < 60000000);
}

int main(int count, char **arguments) {
    if (count < 2) return 2;
    snprintf(folder, sizeof folder, "%s", arguments[1]);
    check_jobs();
    check_direct();
    check_refusals();
    check_sharing();
    check_threads();
    if (count > 2 && strcmp(arguments[2], "large") == 0) check_large();
    return failures == 0 ? 0 : 1;
}
