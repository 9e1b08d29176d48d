/* Threads that do what Python's may do beside each other, for ThreadSanitizer: all read one table and one file, run
 * jobs of their own with threads of the engine's, and open and close the same path; jobs of several threads fail at
 * once. Results are compared with those of one thread. */
#define _DEFAULT_SOURCE
#include <pthread.h>

#include "checkpoints.h"

enum { CALLERS = 4, ROUNDS = 3, TENSORS = 4, ROWS = 2048, COLUMNS = 1024, ELEMENTS = ROWS * COLUMNS };

static char path[32];
static sl_file file;
static sl_table *table;
static const sl_grid TRANSPOSED = {ROWS, COLUMNS, COLUMNS * 4, 4, 4, ROWS * 4};
static const sl_channels CHANNELS = {COLUMNS, 1, NULL};

typedef struct work {
    const char *name;
    int32_t op, to;
    const sl_grid *grid;
    const sl_channels *channels;
    uint64_t size; /* of the result of one tensor */
} work;

static const work WORK[] = {
    {"read", SL_OP_COPY, SL_F32, NULL, NULL, ELEMENTS * 4},
    {"convert", SL_OP_CONVERT, SL_BF16, NULL, NULL, ELEMENTS * 2},
    {"quantize", SL_OP_CONVERT, SL_Q4_0, NULL, NULL, ELEMENTS / 32 * 18},
    {"transpose", SL_OP_GRID, SL_F32, &TRANSPOSED, NULL, ELEMENTS * 4},
    {"absmax of channels", SL_OP_ABSMAX, SL_F32, NULL, &CHANNELS, COLUMNS * 4},
    {"statistics", SL_OP_HISTOGRAM, SL_F32, NULL, NULL,
     SL_HISTOGRAM_BINS * 8 + ELEMENTS / SL_STATS_SEGMENT * sizeof(sl_stats)},
};
enum { KINDS = sizeof WORK / sizeof WORK[0] };

static uint8_t *expected[KINDS]; /* by one thread, of all tensors */

static int tier(void) {
    for (int best = SL_TIER_COUNT - 1; best > 0; best--)
        if (sl_tier_available(best)) return best;
    return SL_TIER_SCALAR;
}

/* Runs the same work over all tensors at once, in slices as short as there are. */
static int32_t run(const work *kind, uint8_t *results, int32_t threads, uint64_t beyond, sl_cursor *cursor,
                   sl_error *error) {
    const sl_columns *columns = sl_table_columns(table);
    sl_job jobs[TENSORS];
    memset(results, 0, TENSORS * kind->size);
    for (uint64_t i = 0; i < TENSORS; i++)
        jobs[i] = (sl_job){.op = kind->op,
                           .from = SL_F32,
                           .to = kind->to,
                           .file = file.handle,
                           .offset = columns->begins[i] + beyond,
                           .memory = results + i * kind->size,
                           .size = ELEMENTS * 4,
                           .grid = kind->grid,
                           .channels = kind->channels};
    memset(cursor, 0, sizeof *cursor);
    while (!cursor->finished) {
        int32_t status = sl_jobs_run(jobs, TENSORS, tier(), threads, 1, cursor, error);
        if (status != SL_OK) return status;
    }
    return SL_OK;
}

static void reopen(void) {
    sl_file own;
    sl_table *another;
    sl_error error;
    CHECK(sl_safetensors_open(path, &own, &another, &error) == SL_OK);
    const sl_columns *mine = sl_table_columns(another), *shared = sl_table_columns(table);
    CHECK(own.size == file.size && own.inode == file.inode && mine->count == shared->count);
    CHECK(memcmp(mine->names, shared->names, shared->names_size) == 0);
    CHECK(sl_table_find(table, "layer.2.weight", 14) >= 0 && sl_table_find(table, "layer.9.weight", 14) == -1);
    sl_table_free(another);
    sl_file_close(own.handle);
}

static void *call(void *argument) {
    size_t first = (size_t)(uintptr_t)argument;
    uint8_t *results = malloc((size_t)TENSORS * ELEMENTS * 4);
    CHECK(results != NULL);
    sl_error error;
    sl_cursor cursor;
    for (size_t k = 0; k < ROUNDS * KINDS; k++) {
        size_t kind = (first + k) % KINDS;
        reopen();
        CHECK(run(&WORK[kind], results, 3, 0, &cursor, &error) == SL_OK);
        CHECK(memcmp(results, expected[kind], TENSORS * WORK[kind].size) == 0);
        /* Every job but those of the first tensors reads past the end of the file: the lowest that fails is told. */
        CHECK(run(&WORK[kind], results, 3, file.size - sl_table_columns(table)->ends[1], &cursor, &error) ==
              SL_E_TRUNCATED);
        CHECK(cursor.failed_job == 2 && error.position == (int64_t)file.size);
    }
    free(results);
    return NULL;
}

int main(void) {
    sl_error error;
    sl_cursor cursor;
    write_file(make_safetensors(TENSORS, ELEMENTS), path);
    CHECK(sl_safetensors_open(path, &file, &table, &error) == SL_OK);
    for (size_t kind = 0; kind < KINDS; kind++) {
        expected[kind] = malloc(TENSORS * WORK[kind].size);
        CHECK(expected[kind] != NULL);
        CHECK(run(&WORK[kind], expected[kind], 1, 0, &cursor, &error) == SL_OK);
    }
    pthread_t callers[CALLERS];
    for (uintptr_t i = 0; i < CALLERS; i++) CHECK(pthread_create(&callers[i], NULL, call, (void *)i) == 0);
    for (int i = 0; i < CALLERS; i++) pthread_join(callers[i], NULL);
    for (size_t kind = 0; kind < KINDS; kind++) free(expected[kind]);
    sl_table_free(table);
    sl_file_close(file.handle);
    unlink(path);
    printf("%d callers with 3 threads each: %d kinds of jobs, %d rounds\n", CALLERS, KINDS, ROUNDS);
    return 0;
}
