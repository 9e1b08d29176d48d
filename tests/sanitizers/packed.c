/* Hostile descriptions of packed codes: every field out of range, one at a time and in pairs, sizes that overflow and
 * that do not match. Each is refused, or restored without touching a byte beyond what it claims, alike from memory and
 * from a file, with one thread and three, on every tier. */
#define _DEFAULT_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <sys/mman.h>

#include "checkpoints.h"

/* Larger claims are mapped, not allocated; what is larger still is not tried. */
static uint64_t small = 1 << 20;
#define LARGEST ((uint64_t)1 << 42)
/* Groups are looked at one by one. */
#define MOST_GROUPS ((uint64_t)1 << 24)

/* Stands for memory that is allocated when the size is known. */
static uint32_t given[1];
#define GIVEN ((void *)given)

static uint64_t state = 20260101;
static unsigned runs, refusals, cases;
/* Every case on every tier; else tiers take turns, as in tests/builders/thorough.py, and so do shapes and values. */
static bool thorough;

static uint64_t random_u64(void) {
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return state >> 16;
}

/* ---- good descriptions, whose sizes `repair` fills in ---- */

static const sl_packed GOOD[] = {
    {.layout = SL_LAYOUT_ROWS,
     .bits = 3,
     .forbidden = -1,
     .matrices = 2,
     .rows = 32,
     .columns = 67,
     .row_block = 5,
     .column_block = 7,
     .table = GIVEN,
     .scales = GIVEN,
     .zeros = GIVEN,
     .biases = GIVEN,
     .factors = GIVEN},
    {.layout = SL_LAYOUT_ROWS,
     .bits = 4,
     .forbidden = -1,
     .high_first = 1,
     .matrices = 3,
     .rows = 32,
     .columns = 33,
     .transpose = 1,
     .row_block = 1,
     .column_block = 16,
     .table = GIVEN,
     .scales = GIVEN},
    {.layout = SL_LAYOUT_ROWS,
     .bits = 3,
     .forbidden = -1,
     .word_codes = 10,
     .matrices = 1,
     .rows = 32,
     .columns = 41,
     .row_block = 4,
     .column_block = 41,
     .table = GIVEN,
     .scales = GIVEN,
     .zeros = GIVEN},
    {.layout = SL_LAYOUT_ROWS,
     .bits = 8,
     .codes = SL_I8,
     .forbidden = -1,
     .matrices = 1,
     .rows = 64,
     .columns = 96,
     .transpose = 1,
     .row_block = 16,
     .column_block = 17,
     .scales = GIVEN},
    {.layout = SL_LAYOUT_ROWS,
     .bits = 8,
     .forbidden = -1,
     .matrices = 2,
     .rows = 9,
     .columns = 64,
     .row_block = 9,
     .table = GIVEN,
     .scales = GIVEN,
     .biases = GIVEN,
     .groups = GIVEN,
     .factors = GIVEN},
    {.layout = SL_LAYOUT_COLUMNS,
     .bits = 3,
     .forbidden = -1,
     .matrices = 2,
     .rows = 96,
     .columns = 70,
     .transpose = 1,
     .row_block = 24,
     .column_block = 1,
     .table = GIVEN,
     .scales = GIVEN,
     .zeros = GIVEN,
     .factors = GIVEN},
    {.layout = SL_LAYOUT_COLUMNS,
     .bits = 4,
     .forbidden = -1,
     .matrices = 1,
     .rows = 64,
     .columns = 130,
     .transpose = 1,
     .column_block = 1,
     .table = GIVEN,
     .scales = GIVEN,
     .zeros = GIVEN,
     .groups = GIVEN},
    {.layout = SL_LAYOUT_WORDS,
     .bits = 4,
     .forbidden = -1,
     .matrices = 2,
     .rows = 96,
     .columns = 72,
     .transpose = 1,
     .row_block = 32,
     .column_block = 1,
     .table = GIVEN,
     .scales = GIVEN,
     .zeros = GIVEN},
    {.layout = SL_LAYOUT_PLANES,
     .bits = 2,
     .forbidden = 3,
     .matrices = 2,
     .rows = 32,
     .columns = 37,
     .row_block = 32,
     .column_block = 37,
     .table = GIVEN,
     .scales = GIVEN},
    {.layout = SL_LAYOUT_PLANES,
     .bits = 4,
     .forbidden = -1,
     .interleaved = 1,
     .high_first = 1,
     .matrices = 1,
     .rows = 32,
     .columns = 50,
     .row_block = 3,
     .column_block = 50,
     .table = GIVEN,
     .scales = GIVEN},
    {.layout = SL_LAYOUT_BLOCKS,
     .bits = 4,
     .codes = SL_NVFP4,
     .forbidden = -1,
     .matrices = 2,
     .rows = 32,
     .columns = 192,
     .row_block = 32,
     .column_block = 192,
     .scales = GIVEN},
    {.layout = SL_LAYOUT_BLOCKS,
     .bits = 2,
     .codes = SL_I2_S,
     .forbidden = 3,
     .matrices = 1,
     .rows = 32,
     .columns = 256,
     .row_block = 32,
     .column_block = 256,
     .scales = GIVEN},
    {.layout = SL_LAYOUT_WORDS,
     .bits = 4,
     .forbidden = -1,
     .matrices = 2,
     .rows = 4,
     .columns = 2072,
     .row_block = 1,
     .column_block = 2072,
     .table = GIVEN,
     .scales = GIVEN,
     .zeros = GIVEN},
    {.layout = SL_LAYOUT_MASKED,
     .bits = 8,
     .codes = SL_F16,
     .forbidden = -1,
     .matrices = 1,
     .rows = 32,
     .columns = 77,
     .mask = GIVEN,
     .starts = GIVEN,
     .mask_columns = 77},
    {.layout = SL_LAYOUT_MASKED,
     .bits = 8,
     .codes = SL_I8,
     .forbidden = -1,
     .matrices = 2,
     .rows = 16,
     .columns = 50,
     .row_block = 3,
     .column_block = 7,
     .scales = GIVEN,
     .zeros = GIVEN,
     .factors = GIVEN,
     .mask = GIVEN,
     .starts = GIVEN,
     .mask_columns = 19},
    {.layout = SL_LAYOUT_ROWS,
     .bits = 4,
     .forbidden = -1,
     .matrices = 2,
     .rows = 32,
     .columns = 67,
     .row_block = 3,
     .column_block = 5,
     .table = GIVEN,
     .stored_scales = GIVEN,
     .scale_dtype = SL_F8_E4M3,
     .shared = GIVEN,
     .shared_step = 1,
     .stored_zeros = GIVEN,
     .zero_layout = SL_LAYOUT_COLUMNS,
     .zero_table = GIVEN,
     .stored_biases = GIVEN,
     .bias_dtype = SL_BF16},
    {.layout = SL_LAYOUT_COLUMNS,
     .bits = 4,
     .forbidden = -1,
     .matrices = 2,
     .rows = 96,
     .columns = 72,
     .transpose = 1,
     .row_block = 32,
     .column_block = 1,
     .table = GIVEN,
     .stored_scales = GIVEN,
     .scale_dtype = SL_F16,
     .stored_zeros = GIVEN,
     .zero_layout = SL_LAYOUT_ROWS,
     .zero_table = GIVEN},
    {.layout = SL_LAYOUT_COLUMNS,
     .bits = 3,
     .forbidden = -1,
     .matrices = 1,
     .rows = 96,
     .columns = 130,
     .transpose = 1,
     .column_block = 1,
     .table = GIVEN,
     .stored_scales = GIVEN,
     .scale_dtype = SL_BF16,
     .shared = GIVEN,
     .shared_divides = 1,
     .zeros = GIVEN,
     .stored_biases = GIVEN,
     .bias_dtype = SL_I8,
     .groups = GIVEN},
    {.layout = SL_LAYOUT_WORDS,
     .bits = 4,
     .forbidden = -1,
     .matrices = 2,
     .rows = 96,
     .columns = 72,
     .transpose = 1,
     .row_block = 32,
     .column_block = 1,
     .table = GIVEN,
     .stored_scales = GIVEN,
     .scale_dtype = SL_F16,
     .stored_zeros = GIVEN,
     .zero_layout = SL_LAYOUT_WORDS,
     .zero_table = GIVEN},
    {.layout = SL_LAYOUT_COLUMNS,
     .bits = 3,
     .forbidden = -1,
     .matrices = 2,
     .rows = 96,
     .columns = 70,
     .column_block = 1,
     .table = GIVEN,
     .scales = GIVEN,
     .zeros = GIVEN,
     .groups = GIVEN,
     .factors = GIVEN},
    {.layout = SL_LAYOUT_COLUMNS,
     .bits = 4,
     .forbidden = -1,
     .matrices = 2,
     .rows = 64,
     .columns = 130,
     .row_block = 16,
     .column_block = 1,
     .table = GIVEN,
     .stored_scales = GIVEN,
     .scale_dtype = SL_F16,
     .stored_zeros = GIVEN,
     .zero_layout = SL_LAYOUT_ROWS,
     .zero_table = GIVEN},
    {.layout = SL_LAYOUT_BLOCKS,
     .bits = 4,
     .codes = SL_Q4_0,
     .forbidden = -1,
     .matrices = 2,
     .rows = 32,
     .columns = 96,
     .row_block = 1,
     .column_block = 32,
     .table = GIVEN,
     .scales = GIVEN,
     .zeros = GIVEN},
};
enum { GOOD_COUNT = sizeof GOOD / sizeof *GOOD };

static bool by_row(const sl_packed *packed) {
    return packed->layout == SL_LAYOUT_COLUMNS || (packed->layout == SL_LAYOUT_WORDS && packed->transpose != 0);
}

/* Products that stay at the largest number. */
static uint64_t times(uint64_t a, uint64_t b) { return b != 0 && a > UINT64_MAX / b ? UINT64_MAX : a * b; }

static uint64_t bytes_of(int32_t dtype, uint64_t values) {
    const sl_dtype_info *info = sl_dtype_get(dtype);
    return info == NULL ? 0 : times(values / (uint64_t)info->block, (uint64_t)info->block_bytes);
}

static uint64_t quotient(uint64_t a, uint64_t b) { return b == 0 ? 0 : a / b + (a % b != 0); }

/* Fields that follow from others: sizes, and the grid unless a field of it is under test. Wraps around. */
static void repair(sl_packed *packed, bool row_bytes, bool grid) {
    uint64_t bits = (uint64_t)packed->bits, per_word = (uint64_t)packed->word_codes, stored = packed->rows;
    uint64_t row = per_word > 0 ? quotient(packed->columns, per_word) * 4 : quotient(packed->columns * bits, 8);
    if (packed->layout == SL_LAYOUT_COLUMNS) {
        stored = packed->rows * bits / 32;
        row = packed->columns * 4;
    } else if (packed->layout == SL_LAYOUT_PLANES) {
        stored = packed->rows * bits / 8;
        row = packed->columns;
    } else if (packed->layout == SL_LAYOUT_BLOCKS)
        row = bytes_of(packed->codes, packed->columns);
    else if (packed->layout == SL_LAYOUT_MASKED) /* as if none were 0 */
        row = bytes_of(packed->codes, packed->columns) + 1;
    if (row_bytes) packed->row_bytes = row + 1;
    packed->size = packed->matrices * stored * packed->row_bytes;
    if (row_bytes && packed->size > 0) packed->size -= 1; /* the last row ends with its codes */
    if (!grid) return;
    packed->grid_rows = packed->groups != NULL && by_row(packed) ? 3 : quotient(packed->rows, packed->row_block);
    packed->grid_columns = packed->groups != NULL && !by_row(packed) ? 3
                                                                     : quotient(packed->columns, packed->column_block);
    packed->grid_step = packed->matrices > 2 ? 0 : packed->grid_rows * packed->grid_columns + 1;
    packed->zero_bytes = packed->zero_layout == SL_LAYOUT_COLUMNS ? packed->grid_columns * 4
                         : packed->zero_layout == SL_LAYOUT_WORDS ? quotient(packed->grid_columns, 8) * 4
                                                                  : quotient(packed->grid_columns, 2);
}

static sl_packed good(size_t k) {
    sl_packed packed = GOOD[k];
    repair(&packed, true, true);
    return packed;
}

/* ---- memory of exactly the size that a description claims ---- */

typedef struct claim {
    uint64_t size;
    void *memory;
} claim;

static bool is_possible(uint64_t size) { return size <= LARGEST; }

static claim claimed(uint64_t size) {
    claim self = {size, NULL};
    if (size <= small) {
        self.memory = malloc(size + (size == 0)); /* one byte too many for none: malloc(0) may be NULL */
        CHECK(self.memory != NULL);
        memset(self.memory, 0, size);
        return self;
    }
    self.memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(self.memory != MAP_FAILED);
    return self;
}

static void release(claim *self) {
    if (self->size <= small)
        free(self->memory);
    else
        munmap(self->memory, self->size);
}

static void fill_floats(claim *self) {
    for (uint64_t i = 0; self->size <= small && i < self->size / sizeof(float); i++)
        ((float *)self->memory)[i] = 0.25f + (float)(random_u64() % 16);
}

/* Sums that stay at the largest number. */
static uint64_t plus(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

static uint64_t grid_claim(const sl_packed *packed) {
    uint64_t before = packed->matrices > 1 ? times(packed->grid_step, packed->matrices - 1) : 0;
    return times(plus(before, times(packed->grid_rows, packed->grid_columns)), sizeof(float));
}

/* Elements of the grids, and rows of zeros, all matrices together. */
static uint64_t stored_claim(const sl_packed *packed, int32_t dtype) {
    return bytes_of(dtype, grid_claim(packed) == UINT64_MAX ? UINT64_MAX : grid_claim(packed) / sizeof(float));
}

static uint64_t zeros_claim(const sl_packed *packed) {
    uint64_t rows = packed->zero_layout == SL_LAYOUT_COLUMNS ? quotient(packed->grid_rows, 8) : packed->grid_rows;
    return times(times(rows, packed->zero_bytes), packed->grid_step == 0 ? 1 : packed->matrices);
}

enum {
    CODES,
    TABLE,
    SCALES,
    ZEROS,
    BIASES,
    GROUPS,
    FACTORS,
    MASK,
    STARTS,
    SHARED,
    ZERO_TABLE,
    STORED_SCALES,
    STORED_ZEROS,
    STORED_BIASES,
    CLAIMS
};

/* Random places, and where the values of each part of a row begin; none where there is more memory than is filled. */
static void fill_places(const sl_packed *packed, uint8_t *mask, uint64_t *starts) {
    uint64_t at = 0, width = quotient(packed->columns, 8), lines = packed->matrices * packed->rows;
    for (uint64_t i = 0; i < lines * width; i++) mask[i] = (uint8_t)random_u64();
    for (uint64_t line = 0; line < lines; line++)
        for (uint64_t column = 0; column < packed->columns; column++) {
            if (column % packed->mask_columns == 0) *starts++ = at;
            at += (uint64_t)mask[line * width + column / 8] >> column % 8 & 1;
        }
    *starts = at;
}

/* Gives a description its memory. False if it claims more than there is; then it has none. */
static bool give(sl_packed *packed, claim claims[CLAIMS]) {
    uint64_t line = by_row(packed) ? packed->rows : packed->columns, grid = grid_claim(packed);
    uint64_t sizes[CLAIMS] = {
        [CODES] = packed->size,    [TABLE] = packed->bits >= 1 && packed->bits <= 8 ? 4u << packed->bits : 0,
        [SCALES] = grid,           [ZEROS] = grid,
        [BIASES] = grid,           [GROUPS] = line <= MOST_GROUPS ? 4 * line : UINT64_MAX,
        [FACTORS] = times(4, line)};
    uint64_t lines = times(packed->matrices, packed->rows);
    sizes[MASK] = times(lines, quotient(packed->columns, 8));
    sizes[STARTS] = times(plus(times(lines, quotient(packed->columns, packed->mask_columns)), 1), 8);
    sizes[SHARED] = times(plus(times(packed->matrices > 0 ? packed->matrices - 1 : 0, packed->shared_step), 1), 4);
    sizes[ZERO_TABLE] = 64;
    sizes[STORED_SCALES] = stored_claim(packed, packed->scale_dtype);
    sizes[STORED_ZEROS] = zeros_claim(packed);
    sizes[STORED_BIASES] = stored_claim(packed, packed->bias_dtype);
    const void *const needed[CLAIMS] = {given,
                                        packed->table,
                                        packed->scales,
                                        packed->zeros,
                                        packed->biases,
                                        packed->groups,
                                        packed->factors,
                                        packed->mask,
                                        packed->starts,
                                        packed->shared,
                                        packed->zero_table,
                                        packed->stored_scales,
                                        packed->stored_zeros,
                                        packed->stored_biases};
    for (size_t i = 0; i < CLAIMS; i++) {
        if (needed[i] == NULL) sizes[i] = 0;
        if (!is_possible(sizes[i])) return false;
    }
    for (size_t i = 0; i < CLAIMS; i++) claims[i] = claimed(sizes[i]);
    /* Halves below 1. */
    uint64_t kept = packed->layout == SL_LAYOUT_MASKED ? 0x3b : packed->forbidden < 0 ? 255 : 0xaa;
    for (uint64_t i = 0; i < claims[CODES].size && claims[CODES].size <= small; i++) /* no code 3 in pairs of bits */
        ((uint8_t *)claims[CODES].memory)[i] = (uint8_t)(random_u64() & kept);
    for (size_t i = TABLE; i < GROUPS; i++) fill_floats(&claims[i]);
    fill_floats(&claims[FACTORS]);
    fill_floats(&claims[SHARED]);
    fill_floats(&claims[ZERO_TABLE]);
    for (size_t i = STORED_SCALES; i <= STORED_BIASES; i++) /* below 2 in every float */
        for (uint64_t k = 0; claims[i].size <= small && k < claims[i].size; k++)
            ((uint8_t *)claims[i].memory)[k] = (uint8_t)(random_u64() & 0x3b);
    bool filled = claims[MASK].size <= small && claims[STARTS].size <= small && packed->mask_columns > 0;
    if (packed->layout == SL_LAYOUT_MASKED && packed->mask != NULL && packed->starts != NULL && filled)
        fill_places(packed, claims[MASK].memory, claims[STARTS].memory);
    bool sequence = packed->layout == SL_LAYOUT_COLUMNS && random_u64() % 2 == 0; /* has a kernel of its own */
    for (uint64_t i = 0; sequence && i < claims[TABLE].size / sizeof(float); i++)
        ((float *)claims[TABLE].memory)[i] = (float)i - 8;
    uint64_t limit = by_row(packed) ? packed->grid_rows : packed->grid_columns;
    for (uint64_t i = 0; i < claims[GROUPS].size / 4; i++)
        ((uint32_t *)claims[GROUPS].memory)[i] = limit == 0 ? 0 : (uint32_t)(random_u64() % limit);
#define POINT(field, which) packed->field = packed->field == NULL ? NULL : claims[which].memory
    POINT(table, TABLE);
    POINT(scales, SCALES);
    POINT(zeros, ZEROS);
    POINT(biases, BIASES);
    POINT(groups, GROUPS);
    POINT(factors, FACTORS);
    POINT(mask, MASK);
    POINT(starts, STARTS);
    POINT(shared, SHARED);
    POINT(zero_table, ZERO_TABLE);
    POINT(stored_scales, STORED_SCALES);
    POINT(stored_zeros, STORED_ZEROS);
    POINT(stored_biases, STORED_BIASES);
#undef POINT
    return true;
}

/* ---- runs ---- */

/* The layout that values are stored in as codes; NULL: they are stored as a dtype. */
static const sl_codes *onto;

/* Codes of a row of values. */
static uint64_t width_of(const sl_packed *packed) { return packed->transpose != 0 ? packed->rows : packed->columns; }

static uint64_t target_of(const sl_packed *packed, uint64_t size, int32_t to) {
    if (onto == NULL) return bytes_of(to, size / 4);
    return width_of(packed) == 0 ? 0 : times(size / 4 / width_of(packed), onto->row_bytes);
}

static int32_t run(const sl_job *job, int32_t tier, int32_t threads, sl_error *error) {
    sl_cursor cursor = {0};
    memset(error, 0, sizeof *error);
    while (!cursor.finished) {
        int32_t status = sl_jobs_run(job, 1, tier, threads, 50, &cursor, error);
        if (status != SL_OK) return status;
    }
    return SL_OK;
}

static bool is_clean(int32_t status, bool in_file) {
    return status == SL_OK || status == SL_E_ARGUMENT || status == SL_E_FORMAT || status == SL_E_RANGE ||
           (in_file && status == SL_E_TRUNCATED);
}

/* Whether a case runs on a tier: on the scalar one, and on the next of the others. */
static bool is_tried_on(int32_t tier) {
    int32_t others[SL_TIER_COUNT], count = 0;
    for (int32_t k = SL_TIER_SCALAR + 1; k < SL_TIER_COUNT; k++)
        if (sl_tier_available(k)) others[count++] = k;
    if (tier == SL_TIER_SCALAR) return true;
    return sl_tier_available(tier) && (thorough || tier == others[cases % (unsigned)count]);
}

/* Runs a description from memory with three threads, and from a file with one, on several tiers: the same bytes.
 * Returns the status, or -1 where it claims what there is no memory for. */
static int32_t restore(sl_packed packed, uint64_t size, int32_t to, sl_error *error) {
    claim claims[CLAIMS];
    uint64_t target = target_of(&packed, size, to);
    int32_t status = -1;
    /* An empty mask reads nothing of a file, which then ends nothing. */
    if (packed.layout == SL_LAYOUT_MASKED && size > small) return -1;
    if (!is_possible(target) || !give(&packed, claims)) return -1;
    claim first = claimed(target);
    char path[32];
    bytes content = {claims[CODES].memory, claims[CODES].size <= small ? claims[CODES].size : 0, 0};
    write_file((bytes){NULL, 0, 0}, path);
    int file = open(path, O_RDWR);
    CHECK(file >= 0 && write(file, content.data, content.size) == (ssize_t)content.size);
    for (int32_t k = 0; k < 2 * SL_TIER_COUNT; k++) {
        int32_t tier = k / 2;
        bool in_file = k % 2 == 0;
        /* What is larger than the file ends where the file does. */
        if (!is_tried_on(tier) || (!in_file && (size > small || packed.size > small))) continue;
        claim memory = claimed(target);
        sl_job job = {.op = SL_OP_RESTORE, .from = SL_F32, .to = to, .memory = memory.memory, .size = size};
        job.packed = &packed;
        job.codes = onto;
        job.file = in_file ? file : SL_MEMORY;
        job.offset = in_file ? 0 : (uint64_t)(uintptr_t)claims[CODES].memory;
        int32_t now = run(&job, tier, in_file ? 1 : 3, error);
        CHECK(is_clean(now, in_file) && error->status == now && (now == SL_OK || error->message[0] != '\0'));
        if (status < 0) {
            status = now;
            if (target <= small) memcpy(first.memory, memory.memory, target);
        }
        CHECK(now == status);
        if (status == SL_OK && target <= small) CHECK(memcmp(first.memory, memory.memory, target) == 0);
        release(&memory);
        runs++;
        refusals += status != SL_OK;
    }
    cases++;
    close(file);
    unlink(path);
    release(&first);
    for (size_t i = 0; i < CLAIMS; i++) release(&claims[i]);
    return status;
}

static uint64_t size_of(const sl_packed *packed) { return packed->matrices * packed->rows * packed->columns * 4; }

/* ---- every target ---- */

static void restore_to_all(void) {
    static const int32_t TO[] = {SL_F32,  SL_F64,  SL_F16,  SL_BF16, SL_F8_E4M3, SL_F8_E5M2,
                                 SL_Q4_0, SL_Q4_1, SL_Q5_0, SL_Q5_1, SL_Q8_0,    SL_Q4_0_ABSMAX};
    static const int32_t NEVER[] = {-1, SL_DTYPE_LIMIT, INT32_MAX, SL_I8, SL_C64, SL_F4, SL_BOOL, SL_Q8_K, SL_IQ1_S};
    sl_error error;
    for (size_t k = 0; k < GOOD_COUNT; k++) {
        sl_packed packed = good(k);
        for (size_t i = 0; i < sizeof TO / sizeof *TO; i++)
            CHECK(restore(packed, size_of(&packed), TO[i], &error) == SL_OK);
        for (size_t i = 0; i < sizeof NEVER / sizeof *NEVER; i++)
            CHECK(restore(packed, size_of(&packed), NEVER[i], &error) == SL_E_ARGUMENT &&
                  strstr(error.message, "no conversion from f32") != NULL);
        packed.matrices = 0;
        repair(&packed, true, true);
        CHECK(restore(packed, 0, SL_F32, &error) == SL_OK);
        packed = good(k);
        packed.rows = 0;
        repair(&packed, true, true);
        CHECK(restore(packed, 0, SL_Q8_0, &error) == SL_OK);
        packed = good(k);
        packed.columns = 0;
        repair(&packed, true, true);
        CHECK(restore(packed, 0, SL_BF16, &error) == SL_OK);
        packed.row_bytes = 0;
        packed.size = 0;
        CHECK(restore(packed, 0, SL_BF16, &error) == SL_OK);
    }
}

/* Every layout of codes, with rows that are just long enough, and what none can be. */
static void restore_to_codes(void) {
    static const sl_codes NEVER[] = {
        {0, SL_ORDER_STREAM, 4096, 0},
        {9, SL_ORDER_STREAM, 4096, 0},
        {INT32_MIN, SL_ORDER_STREAM, 4096, 0},
        {4, -1, 4096, 0},
        {4, INT32_MAX, 4096, 0},
        {3, SL_ORDER_HALVES, 4096, 0},
        {8, SL_ORDER_WORDS, 4096, 0},
        {4, SL_ORDER_STREAM, 0, 0},
        {4, SL_ORDER_HALVES, 4096, UINT64_MAX},
        {4, SL_ORDER_HALVES, 4096, 15},
    };
    sl_error error;
    for (size_t k = 0; k < GOOD_COUNT; k++)
        for (uint64_t more = 0; more < (thorough ? 2 : 1); more++) {
            sl_packed packed = GOOD[k];
            if (packed.transpose != 0) packed.rows += 32 * more;
            if (packed.transpose == 0 && packed.layout != SL_LAYOUT_BLOCKS) packed.columns += 8 * more;
            repair(&packed, true, true);
            uint64_t width = width_of(&packed);
            for (int32_t order = SL_ORDER_STREAM; order <= SL_ORDER_WORDS; order++)
                for (int32_t bits = order == SL_ORDER_STREAM ? 1 : 4; bits <= (order == SL_ORDER_STREAM ? 8 : 4);
                     bits++) {
                    if (!thorough && (k + more + (uint64_t)bits) % 4 != 0) continue;
                    uint64_t unit = order == SL_ORDER_HALVES ? 32 : order == SL_ORDER_WORDS ? 8 : 1;
                    sl_codes codes = {bits, order, quotient(width * (uint64_t)bits, 8), 0};
                    onto = &codes;
                    CHECK(restore(packed, size_of(&packed), SL_U8, &error) ==
                          (width % unit == 0 ? SL_OK : SL_E_ARGUMENT));
                    codes.row_bytes--;
                    CHECK(restore(packed, size_of(&packed), SL_U8, &error) == SL_E_ARGUMENT);
                    uint64_t own = 4 * (uint64_t)bits, blocks = width / 32;
                    codes = (sl_codes){bits, order, blocks == 0 ? 1 : (blocks - 1) * (own + 3) + own, own + 3};
                    CHECK(restore(packed, size_of(&packed), SL_U8, &error) ==
                          (width % 32 == 0 ? SL_OK : SL_E_ARGUMENT));
                }
            for (size_t i = thorough ? 0 : k % 2; i < sizeof NEVER / sizeof *NEVER; i += thorough ? 1 : 2) {
                onto = &NEVER[i];
                CHECK(restore(packed, size_of(&packed), SL_U8, &error) == SL_E_ARGUMENT);
            }
            CHECK(restore(packed, size_of(&packed), SL_F32, &error) == SL_E_ARGUMENT);
        }
    onto = NULL;
}

/* Rows that exceed what is read at a time, and matrices that exceed a chunk. */
static void restore_large(void) {
    static const uint64_t SHAPES[][2] = {{32, 400000}, {1024, 1000}};
    uint64_t before = small;
    sl_error error;
    small = 1 << 28;
    for (size_t k = 0; k < GOOD_COUNT; k++)
        for (size_t i = 0; i < sizeof SHAPES / sizeof *SHAPES; i++) {
            if (!thorough && (k + i) % 2 != 0) continue;
            sl_packed packed = GOOD[k];
            packed.matrices = 1;
            packed.rows = SHAPES[i][0];
            packed.columns = SHAPES[i][1];
            if (packed.layout == SL_LAYOUT_BLOCKS) packed.columns -= packed.columns % 128;
            repair(&packed, true, true);
            CHECK(restore(packed, size_of(&packed), i == 0 ? SL_F16 : SL_Q8_0, &error) == SL_OK);
        }
    small = before;
}

/* ---- one field at a time, and pairs ---- */

#define FIELD(name) offsetof(sl_packed, name)
static const size_t INTS[] = {FIELD(layout),        FIELD(bits),        FIELD(codes),      FIELD(word_codes),
                              FIELD(high_first),    FIELD(transpose),   FIELD(forbidden),  FIELD(interleaved),
                              FIELD(divide),        FIELD(scale_dtype), FIELD(bias_dtype), FIELD(zero_layout),
                              FIELD(shared_divides)};
static const size_t SIZES[] = {FIELD(size),         FIELD(matrices),  FIELD(rows),         FIELD(columns),
                               FIELD(row_bytes),    FIELD(row_block), FIELD(column_block), FIELD(grid_rows),
                               FIELD(grid_columns), FIELD(grid_step), FIELD(zero_bytes),   FIELD(shared_step),
                               FIELD(mask_columns), FIELD(first_row)};
static const size_t POINTERS[] = {FIELD(table),     FIELD(scales),        FIELD(zeros),        FIELD(biases),
                                  FIELD(groups),    FIELD(factors),       FIELD(mask),         FIELD(starts),
                                  FIELD(shared),    FIELD(stored_scales), FIELD(stored_zeros), FIELD(stored_biases),
                                  FIELD(zero_table)};
#define COUNT(array) (sizeof(array) / sizeof *(array))
enum { FIELDS = COUNT(INTS) + COUNT(SIZES) + COUNT(POINTERS) };

static const int32_t BAD_INTS[] = {
    0,  1,   2,   3,   4,   5,  6,  7,   8,    9,    10,      12,      16,        31,        32,      33,        63,
    64, 103, 255, 256, 259, -1, -2, -32, -256, 9999, 1 << 28, 1 << 29, INT32_MAX, INT32_MIN, 1 << 30, 0x10000003};
static const uint64_t BAD_SIZES[] = {0,
                                     1,
                                     2,
                                     3,
                                     4,
                                     5,
                                     7,
                                     8,
                                     16,
                                     31,
                                     32,
                                     33,
                                     64,
                                     65,
                                     128,
                                     256,
                                     1000,
                                     2048,
                                     2049,
                                     4096,
                                     98304,
                                     98305,
                                     196608,
                                     196609,
                                     UINT64_C(1) << 28,
                                     UINT64_C(1) << 31,
                                     UINT64_C(1) << 32,
                                     (UINT64_C(1) << 32) + 1,
                                     UINT64_C(1) << 36,
                                     UINT64_C(1) << 40,
                                     UINT64_C(1) << 58,
                                     UINT64_C(1) << 60,
                                     UINT64_C(1) << 61,
                                     UINT64_C(1) << 62,
                                     UINT64_C(0x5555555555555556),
                                     (UINT64_C(1) << 63) - 1,
                                     UINT64_C(1) << 63,
                                     UINT64_MAX - 7,
                                     UINT64_MAX - 1,
                                     UINT64_MAX};

/* Number of values that a field is given. */
static size_t values_of(size_t field) {
    if (field < COUNT(INTS)) return COUNT(BAD_INTS);
    return field < COUNT(INTS) + COUNT(SIZES) ? COUNT(BAD_SIZES) + 3 : 2;
}

static void set(sl_packed *packed, size_t field, size_t k) {
    if (field < COUNT(INTS)) {
        memcpy((char *)packed + INTS[field], &BAD_INTS[k], sizeof(int32_t));
        return;
    }
    field -= COUNT(INTS);
    if (field < COUNT(SIZES)) { /* the last are near the right one */
        uint64_t value;
        memcpy(&value, (char *)packed + SIZES[field], sizeof value);
        value = k < COUNT(BAD_SIZES)    ? BAD_SIZES[k]
                : k == COUNT(BAD_SIZES) ? value - 1
                                        : value * (k - COUNT(BAD_SIZES));
        memcpy((char *)packed + SIZES[field], &value, sizeof value);
        return;
    }
    void *pointer = k == 0 ? NULL : GIVEN;
    memcpy((char *)packed + POINTERS[field - COUNT(SIZES)], &pointer, sizeof pointer);
}

static bool is_in_grid(size_t field) { return field >= COUNT(INTS) + 5 && field < COUNT(INTS) + 11; }

/* As it is; then with the sizes that follow from it, so that more of the checks are reached. */
static void try(const sl_packed *changed, size_t size, bool row_bytes, bool grid) {
    static const int32_t TO[] = {SL_F32, SL_BF16, SL_Q8_0, SL_F64};
    sl_error error;
    int32_t to = TO[random_u64() % COUNT(TO)];
    restore(*changed, size, to, &error);
    sl_packed repaired = *changed;
    repair(&repaired, row_bytes, grid);
    restore(repaired, size_of(&repaired), to, &error);
}

static void try_fields(void) {
    for (size_t k = 0; k < GOOD_COUNT; k++)
        for (size_t field = 0; field < FIELDS; field++)
            for (size_t i = thorough ? 0 : (k + field) % 2; i < values_of(field); i += thorough ? 1 : 2) {
                sl_packed packed = good(k);
                uint64_t size = size_of(&packed);
                set(&packed, field, i);
                try(&packed, size, field != COUNT(INTS) + 4, !is_in_grid(field));
            }
}

static void try_pairs(unsigned count) {
    while (count-- > 0) {
        sl_packed packed = good(random_u64() % GOOD_COUNT);
        uint64_t size = size_of(&packed);
        size_t a = random_u64() % FIELDS, b = random_u64() % FIELDS;
        set(&packed, a, random_u64() % values_of(a));
        set(&packed, b, random_u64() % values_of(b));
        try(&packed, size, a != COUNT(INTS) + 4 && b != COUNT(INTS) + 4, !is_in_grid(a) && !is_in_grid(b));
    }
}

/* ---- what must be refused, and why ---- */

static void refuse(const sl_packed *packed, uint64_t size, const char *fragment) {
    sl_error error;
    int32_t status = restore(*packed, size, SL_F32, &error);
    bool refused = status == SL_E_ARGUMENT && strstr(error.message, fragment) != NULL;
    if (!refused) fprintf(stderr, "not \"%s\", but %d: %s\n", fragment, status, error.message);
    CHECK(refused);
}

/* Good description `k` with another value of one field. */
#define REFUSE(k, field, value, fragment) \
    do {                                  \
        sl_packed packed = good(k);       \
        uint64_t size = size_of(&packed); \
        packed.field = (value);           \
        refuse(&packed, size, fragment);  \
    } while (0)

static void refuse_all(void) {
    REFUSE(0, layout, SL_LAYOUT_COUNT, "unknown layout");
    REFUSE(0, layout, -1, "unknown layout");
    REFUSE(0, bits, 0, "they have 1 to 8");
    REFUSE(0, bits, 9, "they have 1 to 8");
    REFUSE(0, table, NULL, "lack a table");
    REFUSE(3, codes, SL_F16, "cannot be numbers");
    REFUSE(3, codes, -1, "cannot be numbers");
    REFUSE(2, word_codes, 11, "11 codes of 3 bits in a word");
    REFUSE(2, word_codes, 0x60000000, "in a word"); /* times 3 it is 2^29 in 32 bits */
    REFUSE(2, word_codes, -1, "in a word");
    REFUSE(5, word_codes, 8, "in a word");
    REFUSE(0, high_first, 1, "begin with the high bits");
    REFUSE(2, high_first, 1, "begin with the high bits");
    REFUSE(7, bits, 2, "in layout 2");
    REFUSE(8, bits, 3, "in layout 3");
    REFUSE(9, forbidden, 3, "can be forbidden");
    REFUSE(8, forbidden, 4, "can be forbidden");
    REFUSE(8, forbidden, 256, "can be forbidden"); /* not code 0 */
    REFUSE(0, interleaved, 1, "only planes");
    REFUSE(8, transpose, 1, "never transposed");
    REFUSE(2, transpose, 1, "never transposed");
    REFUSE(10, codes, SL_F16, "cannot be blocks");
    REFUSE(10, codes, SL_Q8_K, "cannot be blocks"); /* without a kernel */
    REFUSE(10, codes, -1, "cannot be blocks");
    REFUSE(10, table, GIVEN, "do not end with 32 codes of 4 bits");
    REFUSE(10, word_codes, 1, "blocks have no words");
    REFUSE(10, high_first, 1, "blocks have no words");
    REFUSE(10, interleaved, 1, "blocks have no words");
    REFUSE(10, transpose, 1, "blocks have no words");
    REFUSE(10, forbidden, 3, "can be forbidden");
    REFUSE(11, forbidden, 4, "can be forbidden");
    REFUSE(10, columns, 191, "do not fill whole words");
    REFUSE(5, rows, 95, "do not fill whole words");
    REFUSE(7, columns, 71, "do not fill whole words");
    REFUSE(8, rows, 31, "do not fill whole words");
    REFUSE(1, columns, UINT64_MAX, "exceed 64 bits");
    REFUSE(0, row_bytes, 25, "cannot hold 26 bytes");
    REFUSE(0, size, 7, "packed codes have 7 bytes");
    REFUSE(0, row_block, 0, "do not cover");
    REFUSE(0, column_block, 0, "do not cover");
    REFUSE(0, grid_rows, 6, "do not cover");
    REFUSE(0, grid_columns, 9, "do not cover");
    REFUSE(0, grid_step, 69, "grids of 7 x 10 scales, 69 apart");
    REFUSE(0, scales, NULL, "lack scales");
    static const int32_t NEVER[] = {SL_Q8_0, SL_F4, SL_C64, SL_I2_S, -1, SL_DTYPE_LIMIT};
    for (size_t i = 0; i < COUNT(NEVER); i++) REFUSE(13, codes, NEVER[i], "values in a mask cannot be of dtype");
    REFUSE(13, table, GIVEN, "values in a mask have no table");
    REFUSE(13, word_codes, 1, "values in a mask have no table");
    REFUSE(13, high_first, 1, "values in a mask have no table");
    REFUSE(13, interleaved, 1, "values in a mask have no table");
    REFUSE(13, transpose, 1, "values in a mask have no table");
    REFUSE(13, forbidden, 0, "values in a mask have no table");
    REFUSE(13, mask, NULL, "lack the mask");
    REFUSE(13, starts, NULL, "lack the mask");
    REFUSE(13, mask_columns, 0, "lack the mask");
    REFUSE(14, grid_rows, 5, "do not cover");
    REFUSE(15, scales, GIVEN, "twice");
    REFUSE(15, zeros, GIVEN, "twice");
    REFUSE(15, biases, GIVEN, "twice");
    REFUSE(15, stored_scales, NULL, "lack scales");
    REFUSE(15, groups, GIVEN, "cannot have groups of columns");
    static const int32_t NO_ELEMENTS[] = {SL_Q8_0, SL_F4, SL_C64, SL_F64, -1, SL_DTYPE_LIMIT};
    for (size_t i = 0; i < COUNT(NO_ELEMENTS); i++) {
        REFUSE(15, scale_dtype, NO_ELEMENTS[i], "scales cannot be stored as dtype");
        REFUSE(15, bias_dtype, NO_ELEMENTS[i], "biases cannot be stored as dtype");
    }
    REFUSE(0, shared, GIVEN, "needs stored scales");
    REFUSE(15, zero_layout, SL_LAYOUT_PLANES, "zero points in layout");
    REFUSE(15, zero_table, NULL, "zero points of 4 bits lack a table");
    REFUSE(15, zero_bytes, 55, "cannot hold 11 x 14 zero points");
    REFUSE(16, zero_bytes, 35, "cannot hold 3 x 72 zero points");
    REFUSE(18, zero_bytes, 35, "cannot hold 3 x 72 zero points");
    sl_packed wrong = good(0);
    refuse(&wrong, size_of(&wrong) + 4, "values are not");
    refuse(&wrong, size_of(&wrong) / 2, "values are not");
}

/* A group that the grid does not have; the last one that it has. */
static void refuse_groups(void) {
    static const size_t GROUPED[] = {4, 6};
    for (size_t k = 0; k < COUNT(GROUPED); k++) {
        sl_packed packed = good(GROUPED[k]);
        claim claims[CLAIMS];
        sl_error error;
        CHECK(give(&packed, claims));
        claim memory = claimed(size_of(&packed));
        sl_job job = {.op = SL_OP_RESTORE, .from = SL_F32, .to = SL_F32, .file = SL_MEMORY, .packed = &packed};
        job.offset = (uint64_t)(uintptr_t)claims[CODES].memory;
        job.memory = memory.memory;
        job.size = memory.size;
        uint32_t *last = (uint32_t *)claims[GROUPS].memory + claims[GROUPS].size / 4 - 1;
        *last = 2;
        CHECK(run(&job, 0, 2, &error) == SL_OK);
        *last = 3;
        CHECK(run(&job, 0, 2, &error) == SL_E_ARGUMENT && strstr(error.message, "group 3 of index 63") != NULL);
        *last = UINT32_MAX;
        CHECK(run(&job, 0, 2, &error) == SL_E_ARGUMENT);
        *last = 0;
        job.from = SL_BF16;
        CHECK(run(&job, 0, 2, &error) == SL_E_ARGUMENT && strstr(error.message, "stand for f32") != NULL);
        job.from = SL_F32;
        job.offset = UINT64_MAX - packed.size + 1;
        CHECK(run(&job, 0, 2, &error) == SL_E_ARGUMENT && strstr(error.message, "end beyond 64 bits") != NULL);
        release(&memory);
        for (size_t i = 0; i < CLAIMS; i++) release(&claims[i]);
    }
}

/* The code that no writer stores is found wherever it is, and told with its place in the file. */
static void find_forbidden(void) {
    sl_packed packed = good(8);
    claim claims[CLAIMS];
    sl_error error;
    CHECK(give(&packed, claims));
    claim memory = claimed(size_of(&packed));
    uint8_t *codes = claims[CODES].memory;
    sl_job job = {.op = SL_OP_RESTORE, .from = SL_F32, .to = SL_F32, .file = SL_MEMORY, .packed = &packed};
    job.offset = (uint64_t)(uintptr_t)codes;
    job.memory = memory.memory;
    job.size = memory.size;
    for (uint64_t at = 0; at < packed.size; at++) {
        uint8_t before = codes[at];
        codes[at] |= (uint8_t)(3 << at % 4 * 2);
        int32_t status = run(&job, SL_TIER_SCALAR, 2, &error);
        if (at % packed.row_bytes < packed.columns)
            CHECK(status == SL_E_FORMAT && error.position == (int64_t)at);
        else
            CHECK(status == SL_OK); /* between rows */
        codes[at] = before;
    }
    release(&memory);
    for (size_t i = 0; i < CLAIMS; i++) release(&claims[i]);
}

/* Starts and a mask that do not fit each other, or the values: a fault of the file, and nothing else is read. */
static void find_misplaced(void) {
    static const uint64_t BY[] = {1, 2, 7, UINT64_MAX, UINT64_MAX - 6, UINT64_C(1) << 40, UINT64_C(1) << 63};
    for (size_t k = 13; k < 15; k++) {
        sl_packed packed = good(k);
        claim claims[CLAIMS];
        sl_error error;
        CHECK(give(&packed, claims));
        claim memory = claimed(size_of(&packed));
        sl_job job = {.op = SL_OP_RESTORE, .from = SL_F32, .to = SL_F32, .file = SL_MEMORY, .packed = &packed};
        job.offset = (uint64_t)(uintptr_t)claims[CODES].memory;
        job.memory = memory.memory;
        job.size = memory.size;
        uint64_t *starts = claims[STARTS].memory;
        uint8_t *mask = claims[MASK].memory;
        for (uint64_t at = 0; at < claims[STARTS].size / 8; at++)
            for (size_t i = 0; i < COUNT(BY); i++) {
                starts[at] += BY[i];
                for (int32_t tier = 0; tier < SL_TIER_COUNT; tier++)
                    if (sl_tier_available(tier)) CHECK(run(&job, tier, 2, &error) == SL_E_FORMAT);
                starts[at] -= BY[i];
            }
        uint64_t width = quotient(packed.columns, 8);
        for (uint64_t at = 0; at < claims[MASK].size * 8; at++) {
            mask[at / 8] ^= (uint8_t)(1 << at % 8);
            CHECK(run(&job, SL_TIER_SCALAR, 2, &error) == (at % (8 * width) < packed.columns ? SL_E_FORMAT : SL_OK));
            mask[at / 8] ^= (uint8_t)(1 << at % 8);
        }
        packed.size = (starts[claims[STARTS].size / 8 - 1] - 1) * (k == 13 ? 2 : 1); /* one value less */
        CHECK(run(&job, SL_TIER_SCALAR, 2, &error) == SL_E_FORMAT && strstr(error.message, "values of row") != NULL);
        release(&memory);
        for (size_t i = 0; i < CLAIMS; i++) release(&claims[i]);
    }
}

int main(void) {
    thorough = getenv("SAFELOAD_FULL_SWEEP") != NULL;
    restore_to_all();
    restore_to_codes();
    restore_large();
    refuse_all();
    refuse_groups();
    find_forbidden();
    find_misplaced();
    try_fields();
    try_pairs(5000);
    printf("packed codes: %u runs, %u refused\n", runs, refusals);
    return 0;
}
