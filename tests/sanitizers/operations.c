/* What each operation of a job takes: every operation with and without a grid, channels, packed codes and a merge, for
 * dtypes of every kind, from memory and from a file. What its row below does not allow must be refused with a message
 * that names it; nothing may be written then. Also: malformed jobs, and all operations in one run. */
#define _DEFAULT_SOURCE
#include <fcntl.h>

#include "checkpoints.h"

enum { ROWS = 128, COLUMNS = 65, ELEMENTS = ROWS * COLUMNS, ROOM = 1 << 18, BLOCK = 32 };
enum { NO, YES, MAYBE };

/* A job of each that must run: dtypes, and what it takes. */
static const struct {
    int32_t op;
    const char *name;
    int grid, channels, packed, merge;
    int32_t from, to;
} ROWS_OF_OPS[] = {
    {SL_OP_COPY, "copy", NO, NO, NO, NO, SL_F32, SL_F32},
    {SL_OP_CONVERT, "convert", NO, NO, NO, NO, SL_F32, SL_BF16},
    {SL_OP_GRID, "grid", YES, NO, NO, NO, SL_F32, SL_BF16},
    {SL_OP_WRITE, "write", NO, NO, NO, NO, SL_F32, SL_F32},
    {SL_OP_APPEND, "append", NO, NO, NO, NO, SL_F32, SL_F32},
    {SL_OP_INT8, "int8", NO, YES, MAYBE, NO, SL_F32, SL_I8},
    {SL_OP_ABSMAX, "absmax", NO, YES, MAYBE, NO, SL_F32, SL_F32},
    {SL_OP_FINITE, "finite", NO, NO, MAYBE, NO, SL_F32, SL_F32},
    {SL_OP_STATS, "stats", NO, NO, MAYBE, NO, SL_F32, SL_F32},
    {SL_OP_HISTOGRAM, "histogram", NO, NO, MAYBE, NO, SL_F32, SL_F32},
    {SL_OP_RESTORE, "restore", NO, NO, YES, NO, SL_F32, SL_BF16},
    {SL_OP_WEIGHTED, "quantize with importance", NO, YES, MAYBE, NO, SL_F32, SL_Q4_0},
    {SL_OP_MERGE, "merge", NO, NO, NO, YES, SL_F32, SL_BF16},
    {SL_OP_WRITE_BACK, "write back", NO, NO, NO, NO, SL_F32, SL_F32},
};
_Static_assert(sizeof ROWS_OF_OPS / sizeof *ROWS_OF_OPS == SL_OP_COUNT, "one row for each operation");

static uint8_t *source, *memory, *again; /* ROOM bytes each */
static float factors[ELEMENTS];
/* As many numbers as there are elements: codes of int8, with a scale for each row. */
static const sl_packed PACKED = {.layout = SL_LAYOUT_ROWS,
                                 .bits = 8,
                                 .codes = SL_I8,
                                 .forbidden = -1,
                                 .size = ELEMENTS,
                                 .matrices = 1,
                                 .rows = ROWS,
                                 .columns = COLUMNS,
                                 .row_bytes = COLUMNS,
                                 .row_block = 1,
                                 .column_block = COLUMNS,
                                 .grid_rows = ROWS,
                                 .grid_columns = 1,
                                 .scales = factors};
/* Products of ranks 3 and 1, of exactly as many factors. */
enum { RANK = 3, PANELS = (COLUMNS - 1) / SL_MERGE_PANEL + 1 };
static float *left, *right;
static sl_update updates[2];
static const sl_merge MERGE = {COLUMNS, 2, updates};
static int64_t source_file, direct_file, target_file;
static uint8_t *rooms;
static unsigned runs, refusals;

static sl_grid grid_of(int32_t from, int32_t to) {
    int64_t a = sl_dtype_get(from)->block_bytes, b = sl_dtype_get(to)->block_bytes;
    return (sl_grid){ROWS, COLUMNS, COLUMNS * a, a, b, ROWS * b};
}

static uint64_t size_of(int32_t dtype) {
    const sl_dtype_info *info = sl_dtype_get(dtype);
    return (uint64_t)ELEMENTS / (uint64_t)info->block * (uint64_t)info->block_bytes;
}

static int32_t run(const sl_job *jobs, uint64_t count, int32_t threads, sl_error *error) {
    sl_cursor cursor = {.room = rooms, .rooms = 2}; /* a third thread has none */
    memset(error, 0, sizeof *error);
    while (!cursor.finished) {
        int32_t status = sl_jobs_run(jobs, count, SL_TIER_SCALAR, threads, 1, &cursor, error);
        if (status != SL_OK) return status;
    }
    return SL_OK;
}

static bool writes(int32_t op) { return op == SL_OP_WRITE || op == SL_OP_WRITE_BACK || op == SL_OP_APPEND; }

/* Where a job's source is. */
enum { IN_MEMORY, IN_FILE, DIRECTLY, PLACES };

static sl_job job_of(int32_t op, int32_t from, int32_t to, int place) {
    sl_job job = {.op = op, .from = from, .to = to, .memory = memory, .size = size_of(from)};
    job.file = writes(op) ? target_file : place == IN_MEMORY ? SL_MEMORY : source_file;
    if (place == DIRECTLY) job.direct = direct_file;
    if (job.file == SL_MEMORY) job.offset = (uint64_t)(uintptr_t)source;
    return job;
}

/* Each byte equals the next, and the first is 0: a loop would take most of the time of this program. */
static bool untouched(void) { return memory[0] == 0 && memcmp(memory, memory + 1, ROOM - 1) == 0; }

static bool names(const char *message, const char *name) { return strstr(message, name) != NULL; }

/* ---- every combination ---- */

static bool takes(int what, bool given) { return what == MAYBE || what == (int)given; }

/* The job of `row` with what it is given, of which everything but the dtypes is right. */
static void try(size_t row, int32_t from, int32_t to, const sl_grid *grid, const sl_channels *channels,
                const sl_packed *packed, const sl_merge *merge, int place) {
    sl_job job = job_of(ROWS_OF_OPS[row].op, from, to, place);
    sl_error error;
    job.grid = grid;
    job.channels = channels;
    job.packed = packed;
    job.merge = merge;
    memset(memory, 0, ROOM);
    int32_t status = run(&job, 1, 2, &error);
    bool taken = takes(ROWS_OF_OPS[row].grid, grid != NULL) && takes(ROWS_OF_OPS[row].channels, channels != NULL) &&
                 takes(ROWS_OF_OPS[row].packed, packed != NULL) && takes(ROWS_OF_OPS[row].merge, merge != NULL);
    /* Codes stand for f32, which have no channels of int8. */
    int32_t own = packed != NULL ? SL_F32 : ROWS_OF_OPS[row].from;
    bool of_int8 = packed != NULL && channels != NULL && ROWS_OF_OPS[row].channels == MAYBE;
    if (job.op == SL_OP_WEIGHTED && taken && channels->count != BLOCK) own = -1; /* rows are not whole blocks */
    if (taken && from == own && to == ROWS_OF_OPS[row].to && !of_int8) CHECK(status == SL_OK);
    runs++;
    if (status == SL_OK) {
        CHECK(taken);
        return;
    }
    if (status == SL_E_RANGE) { /* of a value, which the bytes of another dtype may hold */
        CHECK(taken && (job.op == SL_OP_CONVERT || job.op == SL_OP_FINITE || job.op == SL_OP_WEIGHTED));
        return;
    }
    refusals++;
    CHECK(status == SL_E_ARGUMENT && error.status == status && error.message[0] != '\0');
    CHECK(taken || names(error.message, ROWS_OF_OPS[row].name));
    CHECK(untouched());
}

static void try_all(void) {
    static const int32_t DTYPES[] = {SL_F32, SL_BF16,    SL_I8,   SL_F64,  SL_I64, SL_C64,
                                     SL_F4,  SL_F6_E2M3, SL_Q4_0, SL_Q4_K, SL_Q8_K};
    static const sl_channels CHANNELS[] = {
        {COLUMNS, 1, factors}, {ROWS, COLUMNS, factors}, {1, 1, factors}, {BLOCK, 1, factors}};
    enum { DTYPE_COUNT = sizeof DTYPES / sizeof *DTYPES };
    for (size_t row = 0; row < SL_OP_COUNT; row++)
        for (size_t k = 0; k < PLACES * DTYPE_COUNT * DTYPE_COUNT; k++) {
            int32_t from = DTYPES[k / PLACES % DTYPE_COUNT], to = DTYPES[k / PLACES / DTYPE_COUNT];
            const sl_grid grid = grid_of(from, to);
            for (int with = 0; with < 8; with++) {
                const sl_grid *strided = with % 2 != 0 ? &grid : NULL;
                const sl_packed *packed = with / 2 % 2 != 0 ? &PACKED : NULL;
                const sl_merge *merge = with / 4 != 0 ? &MERGE : NULL;
                try(row, from, to, strided, NULL, packed, merge, (int)(k % PLACES));
                for (size_t c = 0; c < sizeof CHANNELS / sizeof *CHANNELS; c++)
                    try(row, from, to, strided, &CHANNELS[c], packed, merge, (int)(k % PLACES));
            }
        }
}

/* ---- malformed jobs ---- */

static void refuse(sl_job job, const char *fragment) {
    sl_error error;
    memset(memory, 0, ROOM);
    CHECK(run(&job, 1, 2, &error) == SL_E_ARGUMENT);
    if (!names(error.message, fragment)) fprintf(stderr, "%s\n", error.message);
    CHECK(names(error.message, fragment) && untouched());
    refusals++;
}

static void refuse_channels(int32_t op, int32_t from, uint64_t count, uint64_t inner, const float *scales,
                            const char *fragment) {
    const sl_channels channels = {count, inner, scales};
    sl_job job = job_of(op, from, SL_F32, false);
    job.channels = &channels;
    refuse(job, fragment);
}

static void refuse_merge(int32_t from, int32_t to, sl_merge merge, uint64_t less, const char *fragment) {
    sl_job job = job_of(SL_OP_MERGE, from, to, false);
    job.merge = &merge;
    job.size -= less;
    refuse(job, fragment);
}

static void refuse_merges(void) {
    const sl_update rankless = {0, left, right, 1.0f, 0}, leftless = {1, NULL, right, 1.0f, 0};
    const sl_update rightless = {1, left, NULL, 1.0f, 0}, alone = {1, left, right, 1.0f, 1};
    const sl_update *const lacking[] = {&rankless, &leftless, &rightless};
    for (size_t k = 0; k < sizeof lacking / sizeof *lacking; k++)
        refuse_merge(SL_F32, SL_F32, (sl_merge){COLUMNS, 1, lacking[k]}, 0, "lacks a factor");
    refuse_merge(SL_F32, SL_F32, (sl_merge){COLUMNS, 1, &alone}, 0, "no product to multiply");
    refuse_merge(SL_F32, SL_F32, (sl_merge){0, 2, updates}, 0, "rows of 0 columns");
    refuse_merge(SL_F32, SL_F32, (sl_merge){UINT64_MAX, 2, updates}, 0, "not whole blocks");
    refuse_merge(SL_F32, SL_F32, (sl_merge){UINT64_MAX / 8, 2, updates}, 0, "not whole rows");
    refuse_merge(SL_Q4_0, SL_F32, MERGE, 0, "not whole blocks");
    refuse_merge(SL_F32, SL_F32, MERGE, 4, "not whole rows");
    refuse_merge(SL_F32, SL_Q4_0, MERGE, 0, "no merging");
    refuse_merge(SL_F32, SL_F4, MERGE, 0, "no merging");
    refuse_merge(SL_F32, SL_I8, MERGE, 0, "no merging");
    refuse_merge(SL_F32, -1, MERGE, 0, "no merging");
    refuse_merge(SL_C64, SL_F32, MERGE, 0, "no conversion");
}

static void refuse_malformed(void) {
    sl_job job;
    sl_error error;
    sl_cursor cursor = {0};
    for (size_t row = 0; row < SL_OP_COUNT; row++)
        CHECK(strcmp(sl_op_name(ROWS_OF_OPS[row].op), ROWS_OF_OPS[row].name) == 0);
    CHECK(sl_op_name(-1) == NULL && sl_op_name(SL_OP_COUNT) == NULL);
    refuse(job_of(-1, SL_F32, SL_F32, false), "unknown operation -1");
    refuse(job_of(SL_OP_COUNT, SL_F32, SL_F32, false), "unknown operation 14");
    job = job_of(SL_OP_COPY, SL_F32, SL_F32, false);
    CHECK(sl_jobs_run(&job, 1, SL_TIER_COUNT, 1, 0, &cursor, &error) == SL_E_ARGUMENT &&
          names(error.message, "unknown tier"));
    CHECK(sl_jobs_run(&job, 1, -1, 1, 0, &cursor, &error) == SL_E_ARGUMENT && untouched());
    refuse(job_of(SL_OP_COPY, SL_F32, SL_BF16, false), "copying cannot");
    refuse(job_of(SL_OP_CONVERT, SL_BF16, SL_BF16, false), "no conversion");
    job = job_of(SL_OP_WRITE, SL_F32, SL_F32, false);
    job.file = SL_MEMORY;
    refuse(job, "only a file");
    job.op = SL_OP_APPEND;
    refuse(job, "only a file");

    const sl_channels one = {1, 1, factors};
    static const int32_t BY_BLOCK[] = {SL_OP_CONVERT, SL_OP_INT8,  SL_OP_ABSMAX,
                                       SL_OP_FINITE,  SL_OP_STATS, SL_OP_HISTOGRAM};
    for (size_t k = 0; k < sizeof BY_BLOCK / sizeof *BY_BLOCK; k++) {
        job = job_of(BY_BLOCK[k], SL_Q4_0, SL_F32, false);
        job.size -= 1;
        if (BY_BLOCK[k] == SL_OP_INT8 || BY_BLOCK[k] == SL_OP_ABSMAX) job.channels = &one;
        refuse(job, "not a whole number of blocks of 18");
    }
    for (int32_t op = SL_OP_INT8; op <= SL_OP_ABSMAX; op++) {
        refuse_channels(op, SL_I8, 0, 1, factors, "channel count 0");
        refuse_channels(op, SL_I8, 1, 0, factors, "inner size 0");
        if (op != SL_OP_ABSMAX) refuse_channels(op, SL_I8, COLUMNS, 1, NULL, "lack factors");
        refuse_channels(op, SL_F4, COLUMNS, 1, factors, "not a whole number of blocks of 2");
    }
    const sl_channels blocks = {BLOCK, 1, factors}, split = {BLOCK, 2, factors}, bare = {BLOCK, 1, NULL};
    job = job_of(SL_OP_WEIGHTED, SL_F32, SL_Q4_0, false);
    job.channels = &split;
    refuse(job, "not whole blocks with importance");
    job.channels = &bare;
    refuse(job, "not whole blocks with importance");
    job.channels = &blocks;
    job.size -= 4;
    refuse(job, "not whole rows of 128");
    job = job_of(SL_OP_WEIGHTED, SL_F32, SL_Q8_0, false);
    job.channels = &blocks;
    refuse(job, "no quantization with importance");
    refuse_channels(SL_OP_STATS, SL_I8, COLUMNS, 1, factors, "takes no channels");
}

/* ---- all operations in one run ---- */

/* One thread after the other, then all at once with three: the same bytes. */
static void run_together(void) {
    enum { STEP = (ROOM - 2 * ELEMENTS) / SL_OP_COUNT / 64 * 64 };
    const sl_grid grid = grid_of(SL_F32, SL_BF16);
    const sl_channels channels = {COLUMNS, 1, factors}; /* an odd number: scratch of an odd size */
    const sl_channels blocks = {BLOCK, 1, factors};
    sl_job jobs[SL_OP_COUNT];
    sl_error error;
    for (size_t row = 0; row < SL_OP_COUNT; row++) {
        sl_job *job = &jobs[row];
        *job = job_of(ROWS_OF_OPS[row].op, ROWS_OF_OPS[row].from, ROWS_OF_OPS[row].to, (int)(row % PLACES));
        if (ROWS_OF_OPS[row].grid == YES) job->grid = &grid;
        if (ROWS_OF_OPS[row].channels == YES) job->channels = job->op == SL_OP_WEIGHTED ? &blocks : &channels;
        if (ROWS_OF_OPS[row].packed == YES) job->packed = &PACKED;
        if (ROWS_OF_OPS[row].merge == YES) job->merge = &MERGE;
        job->memory = memory + STEP * row;
        if (job->grid == NULL && job->packed == NULL) job->size /= 4; /* places do not overlap */
        if (job->op == SL_OP_GRID) job->memory = memory + ROOM - 2 * ELEMENTS;
    }
    memset(memory, 0, ROOM);
    for (size_t row = 0; row < SL_OP_COUNT; row++) CHECK(run(&jobs[row], 1, 1, &error) == SL_OK);
    memcpy(again, memory, ROOM);
    memset(memory, 0, ROOM);
    for (size_t row = 0; row < SL_OP_COUNT; row++)
        if (jobs[row].op == SL_OP_APPEND) jobs[row].op = SL_OP_WRITE; /* one of them would make it one thread */
    CHECK(run(jobs, SL_OP_COUNT, 3, &error) == SL_OK);
    CHECK(memcmp(again, memory, ROOM) == 0);
}

static int64_t open_again(const char *path) {
    int file = open(path, O_RDWR);
    CHECK(file >= 0);
    return file;
}

int main(void) {
    char source_path[32], target_path[32];
    bytes content = {NULL, 0, 0};
    source = malloc(ROOM);
    memory = malloc(ROOM);
    again = malloc(ROOM);
    CHECK(source != NULL && memory != NULL && again != NULL);
    for (size_t i = 0; i < ROOM; i++) source[i] = (uint8_t)(i % 4 == 3 ? 0x3c : i * 37 >> 3); /* finite in all dtypes */
    for (size_t i = 0; i < ELEMENTS; i++) factors[i] = 0.25f + (float)(i % 7);
    left = malloc(ROWS * RANK * sizeof(float));
    right = malloc(PANELS * RANK * SL_MERGE_PANEL * sizeof(float));
    CHECK(left != NULL && right != NULL);
    for (size_t i = 0; i < ROWS * RANK; i++) left[i] = 0.5f - (float)(i % 5);
    for (size_t i = 0; i < PANELS * RANK * SL_MERGE_PANEL; i++) right[i] = 0.125f * (float)(i % 3);
    updates[0] = (sl_update){RANK, left, right, 0.5f, 1};
    updates[1] = (sl_update){1, left, right, -1.0f, 0};
    add(&content, source, ROOM);
    write_file(content, source_path);
    write_file((bytes){NULL, 0, 0}, target_path);
    source_file = open_again(source_path);
    direct_file = sl_file_open_direct(source_file);
    CHECK(direct_file >= 0); /* 0 where the file system has none */
    rooms = aligned_alloc(4096, 2 * SL_DIRECT_ROOM);
    CHECK(rooms != NULL);
    target_file = open_again(target_path);
    try_all();
    refuse_malformed();
    refuse_merges();
    run_together();
    if (direct_file != 0) sl_file_close(direct_file);
    close((int)source_file);
    free(rooms);
    close((int)target_file);
    unlink(source_path);
    unlink(target_path);
    free(left);
    free(right);
    free(source);
    free(memory);
    free(again);
    printf("%d operations: %u combinations, %u refused\n", SL_OP_COUNT, runs, refusals);
    return 0;
}
