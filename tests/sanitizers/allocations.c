/* Lets the first allocation of each operation of the core fail, then the second, ... until none is left. Each time the
 * operation must say SL_E_MEMORY (or do without), and give back all it took: memory, mappings and descriptors are
 * counted here, AddressSanitizer looks for the rest. Linked with --wrap for the functions below. */
#define _DEFAULT_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>

#include "checkpoints.h"

/* More allocations than any operation here makes. */
#define MOST 10000

static struct {
    bool armed;
    unsigned long calls, nth;  /* the nth call fails */
    long blocks, pages, files; /* held by the core */
} core;

/* ---- what the core calls instead of the system ---- */

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *memory, size_t size);
void __real_free(void *memory);
void *__real_mmap(void *address, size_t size, int protection, int flags, int file, off_t offset);
int __real_munmap(void *address, size_t size);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*work)(void *), void *argument);
int __real_open(const char *path, int flags, ...);
int __real_close(int file);

void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *memory, size_t size);
void __wrap_free(void *memory);
void *__wrap_mmap(void *address, size_t size, int protection, int flags, int file, off_t offset);
int __wrap_munmap(void *address, size_t size);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*work)(void *), void *argument);
int __wrap_open(const char *path, int flags, ...);
int __wrap_close(int file);

static bool refused(void) {
    if (!core.armed || __atomic_add_fetch(&core.calls, 1, __ATOMIC_SEQ_CST) != core.nth) return false;
    errno = ENOMEM;
    return true;
}

static void hold(long *count, long amount) {
    if (core.armed) __atomic_add_fetch(count, amount, __ATOMIC_SEQ_CST);
}

static long pages_of(size_t size) { return (long)((size + 4095) / 4096); }

void *__wrap_malloc(size_t size) {
    if (refused()) return NULL;
    hold(&core.blocks, 1);
    return __real_malloc(size);
}

void *__wrap_calloc(size_t count, size_t size) {
    if (refused()) return NULL;
    hold(&core.blocks, 1);
    return __real_calloc(count, size);
}

void *__wrap_realloc(void *memory, size_t size) {
    if (refused()) return NULL;
    if (memory == NULL) hold(&core.blocks, 1);
    return __real_realloc(memory, size);
}

void __wrap_free(void *memory) {
    if (memory != NULL) hold(&core.blocks, -1);
    __real_free(memory);
}

void *__wrap_mmap(void *address, size_t size, int protection, int flags, int file, off_t offset) {
    if (refused()) return MAP_FAILED;
    hold(&core.pages, pages_of(size));
    return __real_mmap(address, size, protection, flags, file, offset);
}

int __wrap_munmap(void *address, size_t size) {
    hold(&core.pages, -pages_of(size));
    return __real_munmap(address, size);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*work)(void *), void *argument) {
    return refused() ? EAGAIN : __real_pthread_create(thread, attributes, work, argument);
}

int __wrap_open(const char *path, int flags, ...) {
    int file = __real_open(path, flags);
    if (file >= 0) hold(&core.files, 1);
    return file;
}

int __wrap_close(int file) {
    hold(&core.files, -1);
    return __real_close(file);
}

/* ---- operations ---- */

static char safetensors_path[32], long_path[32], gguf_path[32];
static float *values; /* of job_values elements, also where results go */
static float *results;
enum { ROWS = 1024, COLUMNS = 2048, ELEMENTS = ROWS * COLUMNS };

static int32_t open_path(const char *path, sl_error *error) {
    sl_file file;
    sl_table *table;
    int32_t status = sl_safetensors_open(path, &file, &table, error);
    if (status != SL_OK) return status;
    CHECK(sl_table_columns(table)->count > 0 && sl_table_find(table, "layer.3.weight", 14) >= 0);
    void *mapping;
    status = sl_file_map(file.handle, file.size, 1, &mapping, error);
    if (status == SL_OK) sl_file_unmap(mapping, file.size);
    sl_table_free(table);
    sl_file_close(file.handle);
    return status;
}

static int32_t load_path(sl_error *error) {
    sl_loaded loaded;
    int32_t status = sl_safetensors_load(safetensors_path, UINT64_MAX, &loaded);
    if (status != SL_OK) {
        *error = loaded.error;
        return status;
    }
    CHECK(loaded.file.handle == -1 && sl_table_find(loaded.table, "layer.3.weight", 14) >= 0);
    sl_table_free(loaded.table);
    sl_free(loaded.content);
    return status;
}

static int32_t open_short(sl_error *error) { return open_path(safetensors_path, error); }
static int32_t open_long(sl_error *error) { return open_path(long_path, error); }

static int32_t open_gguf(sl_error *error) {
    sl_file file;
    sl_table *table;
    sl_gguf *gguf;
    int32_t status = sl_file_open(gguf_path, &file, error);
    if (status != SL_OK) return status;
    status = sl_gguf_read(file.handle, file.size, &table, &gguf, error);
    if (status == SL_OK) {
        CHECK(gguf->count == sl_table_columns(table)->count && gguf->listed_count == gguf->count / 2);
        sl_table_free(table);
        sl_gguf_free(gguf);
    }
    sl_file_close(file.handle);
    return status;
}

/* Writes the header of the tensors that a file has. */
static int32_t write_header(sl_error *error) {
    sl_file file;
    uint64_t *sizes, header_size;
    sl_table *table;
    void *header;
    int32_t status = sl_safetensors_open(safetensors_path, &file, &table, error);
    if (status != SL_OK) return status;
    const sl_columns *columns = sl_table_columns(table);
    uint32_t *order = __real_malloc(columns->count * sizeof *order);
    sizes = __real_malloc(columns->count * sizeof *sizes);
    CHECK(order != NULL && sizes != NULL);
    status = sl_safetensors_header(columns, order, sizes, &header, &header_size, error);
    if (status == SL_OK) sl_free(header);
    __real_free(order);
    __real_free(sizes);
    sl_table_free(table);
    sl_file_close(file.handle);
    return status;
}

static int32_t run_jobs(sl_job job, sl_error *error) {
    sl_cursor cursor = {0};
    while (!cursor.finished) {
        int32_t status = sl_jobs_run(&job, 1, SL_TIER_SCALAR, 3, 1, &cursor, error);
        if (status != SL_OK) return status;
    }
    return SL_OK;
}

static sl_job job_of(int32_t op, int32_t to) {
    return (sl_job){.op = op,
                    .from = SL_F32,
                    .to = to,
                    .file = SL_MEMORY,
                    .offset = (uint64_t)(uintptr_t)values,
                    .memory = results,
                    .size = ELEMENTS * sizeof *values};
}

static int32_t convert(sl_error *error) { return run_jobs(job_of(SL_OP_CONVERT, SL_BF16), error); }
static int32_t quantize_blocks(sl_error *error) { return run_jobs(job_of(SL_OP_CONVERT, SL_Q4_0), error); }

static int32_t transpose(sl_error *error) {
    sl_grid grid = {ROWS, COLUMNS, COLUMNS * 4, 4, 4, ROWS * 4};
    sl_job job = job_of(SL_OP_GRID, SL_F32);
    job.grid = &grid;
    return run_jobs(job, error);
}

static int32_t absmax(sl_error *error) {
    sl_channels channels = {COLUMNS, 1, NULL};
    sl_job job = job_of(SL_OP_ABSMAX, SL_F32);
    job.channels = &channels;
    memset(results, 0, COLUMNS * 4);
    return run_jobs(job, error);
}

static int32_t allocate_pages(sl_error *error) {
    void *memory = sl_memory_alloc(5 << 20);
    error->status = SL_E_MEMORY;
    if (memory == NULL) {
        strcpy(error->message, "NULL says it");
        return SL_E_MEMORY;
    }
    sl_memory_free(memory, 5 << 20);
    return SL_OK;
}

static const struct {
    const char *name;
    int32_t (*run)(sl_error *error);
} OPERATIONS[] = {
    {"open safetensors", open_short},
    {"load safetensors", load_path},
    {"open safetensors with a header of megabytes", open_long},
    {"open GGUF", open_gguf},
    {"write a header", write_header},
    {"convert", convert},
    {"quantize", quantize_blocks},
    {"transpose", transpose},
    {"absmax of channels", absmax},
    {"huge pages", allocate_pages},
};

/* Runs an operation once; whether an allocation failed. */
static bool strike(int32_t (*run)(sl_error *error), unsigned long nth, unsigned long *errors) {
    sl_error error = {.status = SL_OK};
    core.calls = 0;
    core.nth = nth;
    core.armed = true;
    int32_t status = run(&error);
    core.armed = false;
    CHECK(core.blocks == 0 && core.pages == 0 && core.files == 0);
    bool hit = core.calls >= nth;
    if (status == SL_OK) return hit;
    CHECK(hit && error.status == status && error.message[0] != '\0');
    CHECK(status == SL_E_MEMORY || (status == SL_E_OS && error.os_errno == ENOMEM));
    ++*errors;
    return hit;
}

int main(void) {
    write_file(make_safetensors(40, 8), safetensors_path);
    write_file(make_safetensors(30000, 1), long_path);
    write_file(make_gguf(1500), gguf_path);
    values = __real_calloc(ELEMENTS, sizeof *values);
    results = __real_calloc(ELEMENTS, sizeof *results);
    CHECK(values != NULL && results != NULL);
    for (size_t k = 0; k < sizeof OPERATIONS / sizeof OPERATIONS[0]; k++) {
        unsigned long nth = 1, errors = 0;
        while (strike(OPERATIONS[k].run, nth, &errors)) CHECK(++nth < MOST);
        CHECK(errors > 0);
        printf("%s: %lu allocations, %lu errors\n", OPERATIONS[k].name, nth - 1, errors);
    }
    __real_free(values);
    __real_free(results);
    unlink(safetensors_path);
    unlink(long_path);
    unlink(gguf_path);
    return 0;
}
