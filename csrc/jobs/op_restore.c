/* The operation SL_OP_RESTORE: dequantizes packed codes, or moves them to another layout. */
#include "jobs/op.h"
#include "jobs/packed.h"
#include "kernels/codes.h"
#include "kernels/copy2d.h"
#include "kernels/stream.h"

/* Rows of a tile: a multiple of TILE_ROWS, which is whole words in every column of codes, and at most MOST_ROWS. A
 * column of the tile is stored at once, into its own page, so taller tiles are faster. */
#define TILE_ROWS ((uint64_t)64)
#define MOST_ROWS ((uint64_t)2048)
/* Rows of the longest block of a target. Row counts above this are a multiple of it, except with act-order. */
#define LONGEST_BLOCK ((uint64_t)256)
/* Values of a tile with more rows: 12 MiB take some milliseconds, so that threads finish at about the same time. Codes
 * in memory are divided into tiles of most rows and some of the columns, which takes half the time of low and wide
 * tiles: a column's values are stored into a page of their own. */
#define TILE_VALUES ((uint64_t)3 << 20)
/* Columns dequantized at a time: a multiple of the codes in a word. Of nibbles in words, a whole cache line of each
 * row. */
#define TILE_COLUMNS ((uint64_t)64)
#define NIBBLE_COLUMNS ((uint64_t)128)
/* The destination of a column is prefetched two columns before it is dequantized. Without the prefetch, each column
 * would wait for memory. Stores past the cache need no prefetch. Transposing codes is faster than transposing
 * values. */
#define AHEAD ((uint64_t)2)
/* Columns that the kernel of groups dequantizes at a time: a cache line of scales. Gathering column after column would
 * be slower, except for 4 bits without groups. */
#define FEW ((uint64_t)16)
/* Bytes between the values of consecutive columns. Not a power of two, because the columns would compete for the same
 * cache sets. */
#define FEW_LINE ((LONGEST_BLOCK + 16) * sizeof(float))
/* Bytes read at a time: enough for the stored rows of a tile in most matrices with whole rows, so that a tile takes a
 * single read. */
#define TILE_READ ((uint64_t)1 << 20)

/* Scratch: the codes (or values) of a tile in column order, values in row order (or gathered codes), the values of a
 * column, its scales, zeros and biases, and the bytes that were read. */
#define TURNED (MOST_ROWS * TILE_COLUMNS * sizeof(float))
#define LINE (MOST_ROWS * sizeof(float))
/* Columns of nibbles that fill both the codes and the values of a tile. */
#define TURNED_COLUMNS (4 * TURNED / MOST_ROWS)
#define TILE_SCRATCH (2 * TURNED + 4 * LINE + TILE_READ)

/* Number of stored rows of words or bytes for `rows` rows of codes. */
static uint64_t lines_of(const sl_packed *packed, uint64_t rows) {
    return packed->layout == SL_LAYOUT_COLUMNS ? rows * (uint64_t)packed->bits / 32 : rows;
}

/* Number of tiles beside each other. */
static uint64_t parts_of(const sl_packed *packed, const sl_plan *plan) {
    return (packed->columns - 1) / plan->columns + 1;
}

static int32_t plan_tiles(const sl_job *job, uint64_t unit, sl_plan *plan, sl_error *error) {
    const sl_packed *packed = job->packed;
    if (packed->layout == SL_LAYOUT_PLANES || packed->word_codes > 0)
        return sl_fail(error, SL_E_ARGUMENT, -1, "planes and words of %d codes are never transposed",
                       packed->word_codes);
    if (packed->rows % unit != 0)
        return sl_fail(error, SL_E_ARGUMENT, -1, "rows of %llu values are not a whole number of blocks of %llu",
                       (unsigned long long)packed->rows, (unsigned long long)unit);
    plan->unit = 1;
    plan->unit_bytes = 4;
    uint64_t stored = lines_of(packed, TILE_ROWS) * sl_min_u64(packed->row_bytes, TILE_READ) + 1;
    /* With act-order every tile reads all scales, so tiles are 8 times taller: 4 times were 17 % faster at group size
     * 128, and 40 % at 32; twice as many again are 5 % faster at 128. */
    bool ordered = packed->groups != NULL && sl_packed_by_row(packed);
    bool split = job->file == SL_MEMORY && job->codes == NULL; /* a file would need a read for each row */
    uint64_t values = ordered ? 8 * TILE_VALUES : TILE_VALUES, most = ordered ? MOST_ROWS : MOST_ROWS / 2;
    if (!split) most = sl_min_u64(most, values / (packed->columns + 1));
    if (most < LONGEST_BLOCK) most = LONGEST_BLOCK;
    uint64_t rows = job->file == SL_MEMORY ? most : sl_min_u64(most, TILE_READ / stored * TILE_ROWS);
    rows -= rows % (rows > LONGEST_BLOCK ? LONGEST_BLOCK : TILE_ROWS);
    if (rows < TILE_ROWS) rows = TILE_ROWS;
    if (rows < unit) rows = unit;
    if (ordered && unit <= TILE_ROWS && rows < packed->rows) { /* few tiles: of equal height, for threads to share */
        uint64_t bands = (packed->rows - 1) / rows + 1, even = (packed->rows - 1) / bands + 1;
        rows = sl_min_u64(rows, (even + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS);
    }
    plan->rows = sl_min_u64(rows, packed->rows);
    plan->columns = packed->columns;
    if (split) plan->columns = sl_min_u64(TILE_VALUES / rows / NIBBLE_COLUMNS * NIBBLE_COLUMNS, packed->columns);
    plan->step = plan->rows * plan->columns * 4;
    plan->chunks = job->size > 0 ? packed->matrices * ((packed->rows - 1) / plan->rows + 1) * parts_of(packed, plan)
                                 : 0;
    plan->scratch = TILE_SCRATCH;
    return SL_OK;
}

/* ---- values that become codes ---- */

/* Codes of a row of values. */
static uint64_t width_of(const sl_packed *packed) { return packed->transpose != 0 ? packed->rows : packed->columns; }

static int32_t check_codes(const sl_job *job, sl_error *error) {
    const sl_codes *codes = job->codes;
    uint64_t width = width_of(job->packed), rows = width > 0 ? job->size / sizeof(float) / width : 0, bytes, all;
    if (codes->bits < 1 || codes->bits > 8 || codes->order < SL_ORDER_STREAM || codes->order > SL_ORDER_WORDS ||
        (codes->order != SL_ORDER_STREAM && codes->bits != 4) || job->to != SL_U8)
        return sl_fail(error, SL_E_ARGUMENT, -1, "no codes of %d bits in order %d as dtype %d", codes->bits,
                       codes->order, job->to);
    uint64_t unit = codes->order == SL_ORDER_WORDS ? 8 : 1;
    if (codes->order == SL_ORDER_HALVES || codes->block_bytes > 0) unit = SL_CODES_UNIT;
    if (width % unit != 0)
        return sl_fail(error, SL_E_ARGUMENT, -1, "rows of %llu codes are not whole units of %llu",
                       (unsigned long long)width, (unsigned long long)unit);
    bool fits = sl_codes_bytes(codes, width, &bytes) && sl_mul_u64(rows, codes->row_bytes, &all);
    if (!fits || bytes > codes->row_bytes)
        return sl_fail(error, SL_E_ARGUMENT, -1, "rows of %llu bytes cannot hold %llu codes of %d bits",
                       (unsigned long long)codes->row_bytes, (unsigned long long)width, codes->bits);
    return SL_OK;
}

/* Chunks and pieces begin at whole units of a row, so that no two share a byte; else a single chunk writes all. */
static int32_t plan_codes(const sl_job *job, sl_plan *plan, sl_error *error) {
    uint64_t width = width_of(job->packed), unit = sl_max_u64(SL_CODES_UNIT, sl_packed_unit(job));
    int32_t status = check_codes(job, error);
    if (status != SL_OK) return status;
    if (sl_packed_in_tiles(job->packed)) return plan_tiles(job, 1, plan, error);
    if (width % unit != 0) unit = width * sizeof(float) <= SL_STAGING ? width : 1;
    status = sl_plan_pieces(job, unit, unit, unit, plan, error);
    if (status == SL_OK && unit == 1) sl_plan_bytes(job, job->size, 0, plan);
    return status;
}

static int32_t plan_restore(const sl_job *job, sl_plan *plan, sl_error *error) {
    const sl_dtype_info *to = sl_dtype_get(job->to);
    if (job->codes != NULL) return plan_codes(job, plan, error);
    if (to == NULL || (job->to != SL_F32 && !sl_conversion_find(plan->tier, SL_F32, job->to, &plan->conversion)))
        return sl_fail(error, SL_E_ARGUMENT, -1, "no conversion from f32 to dtype %d", job->to);
    uint64_t unit = (uint64_t)to->block;
    plan->streams = to->bits > 0 &&
                    sl_stream_pays(job->memory, sl_dtype_bytes(to, job->size / sizeof(float)), SL_STREAM_FROM);
    if (sl_packed_in_tiles(job->packed)) return plan_tiles(job, unit, plan, error);
    if (unit < sl_packed_unit(job)) unit = sl_packed_unit(job); /* both are powers of two */
    return sl_plan_pieces(job, unit, unit, unit, plan, error);
}

/* ---- values in the order of their codes ---- */

typedef struct work {
    const sl_job *job;
    const sl_plan *plan;
} work;

/* Packs values, which can belong to several rows. */
static void store_codes(const work *self, const uint8_t *source, uint64_t element, uint64_t count) {
    const sl_codes *codes = self->job->codes;
    uint64_t width = width_of(self->job->packed);
    uint8_t bytes[SL_VALUES];
    for (uint64_t some; count > 0; count -= some, element += some, source += some * sizeof(float)) {
        uint64_t first = element % width;
        some = sl_min_u64(sl_min_u64(width - first, count), SL_VALUES);
        self->plan->restore.narrow(source, (size_t)some, bytes);
        sl_codes_put(codes, bytes, first, some, (uint8_t *)self->job->memory + element / width * codes->row_bytes);
    }
}

static int32_t store(void *context, const uint8_t *source, uint64_t element, uint64_t count, sl_error *error) {
    const work *self = context;
    const sl_conversion *conversion = &self->plan->conversion;
    if (self->job->codes != NULL) {
        store_codes(self, source, element, count);
        return SL_OK;
    }
    const sl_dtype_info *to = sl_dtype_get(self->job->to);
    uint8_t *target = (uint8_t *)self->job->memory + sl_dtype_bytes(to, element);
    if (self->plan->streams)
        sl_conversion_stream(conversion, source, target, (size_t)count);
    else if (conversion->first == NULL)
        memcpy(target, source, (size_t)count * sizeof(float));
    else
        sl_conversion_run(conversion, source, target, (size_t)count);
    if (to->bits > 0) return SL_OK;
    return sl_check_blocks(conversion, self->job->to, source, target, count / (uint64_t)to->block, element, error);
}

static int32_t run_in_order(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *scratch, sl_error *error) {
    if (plan->conversion.first != NULL || job->codes != NULL) {
        work self = {job, plan};
        return sl_each_piece(job, plan, chunk, scratch, store, &self, error);
    }
    uint64_t begin = sl_chunk_begin(job, plan, chunk), end = sl_chunk_begin(job, plan, chunk + 1);
    bool streams = plan->streams && job->file == SL_MEMORY; /* from a file each piece would be a read of its own */
    uint64_t most = streams ? SL_VALUES * sizeof(float) : end - begin;
    int32_t status = SL_OK;
    for (uint64_t some; begin < end && status == SL_OK; begin += some) {
        some = sl_min_u64(end - begin, most);
        uint8_t *memory = (uint8_t *)job->memory + begin;
        status = sl_packed_restore(job, plan, begin / 4, some / 4, streams ? scratch : memory, scratch + plan->packed,
                                   error);
        if (streams && status == SL_OK) sl_stream_copy(memory, scratch, (size_t)some);
    }
    return status;
}

/* ---- tiles ---- */

/* Rows [row, row + rows) of a matrix. The values are stored column by column, and dequantized in the same order:
 * transposing codes is cheaper than transposing values. */
typedef struct band {
    const sl_job *job;
    const sl_plan *plan;
    uint64_t matrix, row, rows;
    uint64_t lines, line_bits;     /* stored rows, and the bits of a column in each */
    const uint8_t *bytes;          /* of the first stored row, from column `begin` on */
    uint64_t pitch, begin;         /* bytes between stored rows */
    uint64_t scaled_as;            /* the grid's column in `scaling`, or UINT64_MAX */
    const float *tiled[SL_GRIDS];  /* the grids of some columns, column by column, or NULL */
    uint64_t tiled_from, tiled_to; /* the grid's columns in `tiled`: none if both are the same */
    uint64_t tiled_rows;
    sl_scaling scaling; /* of the rows of a column */
    uint8_t *turned, *values, *line, *staging;
    float *gathered;
    const uint32_t *groups; /* of each row, relative to `first_group` */
    uint64_t first_group, group_count;
} band;

/* Whether codes are nibbles of 32-bit words, and whether these columns fill whole words. */
static bool in_nibbles(const sl_packed *packed, uint64_t columns) {
    return packed->bits == 4 && packed->layout != SL_LAYOUT_COLUMNS && columns % 8 == 0;
}

/* The nibble of a word that holds the code of its column k. */
static uint64_t nibble_of(const sl_packed *packed, uint64_t k) {
    uint64_t nibble = packed->layout == SL_LAYOUT_WORDS ? k / 2 + k % 2 * 4 : k;
    return packed->high_first != 0 ? nibble ^ 1 : nibble;
}

/* Transposes rows [first, first + rows) and columns [from, to) of a grid to `tiled`. `room` holds as many elements. */
static const float *tile_grid(const band *self, int k, uint64_t first, uint64_t rows, float *tiled, float *room) {
    const sl_packed *packed = self->job->packed;
    uint64_t columns = self->tiled_to - self->tiled_from;
    const float *grid = NULL;
    int64_t step = (int64_t)(packed->grid_columns * sizeof(float));
    for (uint64_t r = 0; r < rows; r++) {
        sl_packed_place place = {self->matrix, first + r, self->tiled_from};
        const float *row = sl_packed_grid(packed, self->plan, k, place, columns, room + r * columns);
        if (r == 0) grid = row;
        if (r == 0 && row != room) break; /* in place */
    }
    if (grid == NULL) return NULL;
    if (grid == room) step = (int64_t)(columns * sizeof(float));
    sl_copy_2d(sizeof(float), rows, columns, (sl_plane){(uint8_t *)(uintptr_t)grid, step, sizeof(float), false},
               (sl_plane){(uint8_t *)tiled, sizeof(float), (int64_t)(rows * sizeof(float)), false});
    return tiled;
}

/* Transposes the scales of a tile in blocks: gathered column by column, lines of a grid with rows of a power of two
 * would evict each other before the next column uses them. */
static void tile_scales(band *self, uint64_t column, uint64_t columns) {
    const sl_packed *packed = self->job->packed;
    if (!sl_packed_scaled(packed) || packed->groups != NULL) return;
    uint64_t first = self->row / packed->row_block, last = (self->row + self->rows - 1) / packed->row_block;
    uint64_t from = column / packed->column_block, to = (column + columns - 1) / packed->column_block + 1;
    if (packed->layout == SL_LAYOUT_ROWS && !in_nibbles(packed, columns)) { /* turn() keeps values there */
        self->tiled_from = self->tiled_to = 0;
        return;
    }
    if (from >= self->tiled_from && to <= self->tiled_to) return;
    to = sl_min_u64(to > from + FEW ? to : from + FEW,
                    packed->grid_columns); /* wide enough to transpose in registers */
    uint64_t rows = last - first + 1, size = rows * (to - from);
    self->tiled_from = self->tiled_to = 0;
    if (rows > MOST_ROWS || (SL_GRIDS + 1) * size * sizeof(float) > TURNED) return;
    self->tiled_from = from;
    self->tiled_to = to;
    self->tiled_rows = rows;
    float *tiled = (float *)(void *)self->values, *room = tiled + SL_GRIDS * size;
    for (int k = 0; k < SL_GRIDS; k++) self->tiled[k] = tile_grid(self, k, first, rows, tiled + (size_t)k * size, room);
}

/* Gathers a column of a grid for the rows of a band. */
static const float *gather(const band *self, int k, uint64_t column) {
    const sl_packed *packed = self->job->packed;
    float *out = self->gathered + (size_t)k * MOST_ROWS, room;
    if (column >= self->tiled_from && column < self->tiled_to)
        return self->tiled[k] == NULL ? NULL : self->tiled[k] + (column - self->tiled_from) * self->tiled_rows;
    bool grouped = packed->groups != NULL && sl_packed_by_row(packed);
    uint64_t first = grouped ? 0 : self->row / packed->row_block;
    uint64_t count = grouped ? self->rows : (self->row + self->rows - 1) / packed->row_block - first + 1;
    sl_packed_place place = {self->matrix, 0, column};
    const float *grid = sl_packed_grid(packed, self->plan, k, place, 1, &room);
    if (grid == NULL) return NULL;
    for (uint64_t r = 0; r < count; r++) {
        place.row = grouped ? packed->groups[self->row + r] : first + r;
        out[r] = grid == &room ? *sl_packed_grid(packed, self->plan, k, place, 1, &room)
                               : grid[place.row * packed->grid_columns];
    }
    return out;
}

/* The scales of a column, or NULL. */
static const sl_scaling *scaling_of(band *self, uint64_t column) {
    const sl_packed *packed = self->job->packed;
    bool by_row = sl_packed_by_row(packed), each = by_row && packed->groups != NULL;
    if (!sl_packed_scaled(packed)) return NULL;
    uint64_t at = packed->groups != NULL && !by_row ? packed->groups[column] : column / packed->column_block;
    if (at != self->scaled_as) {
        uint64_t block = each ? 1 : packed->row_block, first = each ? 0 : self->row % block;
        self->scaling = (sl_scaling){(size_t)block, (size_t)first, gather(self, SL_GRID_SCALES, at),
                                     gather(self, SL_GRID_ZEROS, at), gather(self, SL_GRID_BIASES, at)};
        self->scaled_as = at;
    }
    return &self->scaling;
}

/* Transposes a tile: the words of each column, words with the nibbles of eight columns, or, in other layouts, values.
 */
static void turn(const band *self, uint64_t column, uint64_t columns) {
    const sl_packed *packed = self->job->packed;
    uint64_t skipped = column - self->begin;
    sl_plane from = {(uint8_t *)(uintptr_t)self->bytes + skipped * self->line_bits / 8, (int64_t)self->pitch, 4, false};
    uint64_t lines = self->lines;
    if (in_nibbles(packed, columns))
        columns /= 8;
    else if (packed->layout == SL_LAYOUT_ROWS) {
        from = (sl_plane){self->values, (int64_t)columns * 4, 4, false};
        for (uint64_t r = 0; r < lines; r++)
            sl_packed_look_up(packed, self->plan, self->bytes + r * self->pitch, skipped, columns, NULL,
                              self->values + r * columns * 4);
    }
    sl_copy_2d(4, lines, columns, from, (sl_plane){self->turned, 4, (int64_t)lines * 4, false});
}

/* Dequantizes column k of the transposed tile of `columns`, which begins at `column` of the matrix. */
static void restore_column(band *self, uint64_t column, uint64_t columns, uint64_t k) {
    const sl_packed *packed = self->job->packed;
    const sl_restore *kernels = &self->plan->restore;
    const sl_scaling *scaling = scaling_of(self, column + k);
    const uint8_t *codes = self->turned + k * self->lines * 4;
    uint8_t *values = self->line;
    size_t rows = (size_t)self->rows;
    if (in_nibbles(packed, columns)) {
        int shift = 4 * (int)nibble_of(packed, k % 8);
        kernels->words(self->turned + k / 8 * rows * 4, shift, rows, packed->table, scaling, values);
    } else if (packed->layout != SL_LAYOUT_ROWS && packed->bits == 4)
        kernels->nibbles(codes, 0, false, rows, packed->table, scaling, values);
    else {
        if (packed->layout == SL_LAYOUT_ROWS)
            memcpy(values, codes, rows * 4);
        else
            sl_restore_stream(codes, 0, packed->bits, rows, packed->table, values);
        if (scaling != NULL) kernels->scale(values, rows, scaling);
    }
    if (packed->factors == NULL) return;
    bool by_row = sl_packed_by_row(packed);
    const sl_scaling factors = {by_row ? 1 : MOST_ROWS, 0, packed->factors + (by_row ? self->row : column + k), NULL,
                                NULL};
    kernels->scale(values, rows, &factors);
}

/* Prefetches the destination of a column, starting at `value`. The columns are too far apart for the processor's own
 * prefetcher, so each store would wait for memory. */
static void prefetch(const band *self, uint64_t value, uint64_t count) {
    const sl_job *job = self->job;
    const sl_dtype_info *to = sl_dtype_get(job->to);
    uint64_t begin = sl_dtype_bytes(to, value), size = sl_dtype_bytes(to, count), width = job->packed->rows;
    if (job->codes != NULL) {
        begin = value / width * job->codes->row_bytes + sl_codes_begin(job->codes, value % width);
        size = sl_codes_begin(job->codes, count);
    }
    uint8_t *memory = (uint8_t *)job->memory + begin;
    for (uint64_t at = 0; at < size; at += 64) SL_PREFETCH_WRITE(memory + at);
}

/* Dequantizes columns [column, end), which begin at a whole word. Values are finished while they are in the first-level
 * cache, because reading them again from memory would have to wait for the stores. */
static int32_t restore_columns(band *self, uint64_t column, uint64_t end, sl_error *error) {
    const sl_packed *packed = self->job->packed;
    work one = {self->job, self->plan};
    bool nibbles = in_nibbles(packed, 8);
    for (uint64_t some; column < end; column += some) {
        some = sl_min_u64(end - column, nibbles ? NIBBLE_COLUMNS : TILE_COLUMNS);
        if (some > 8) some -= some % 8; /* the last word may be partial */
        turn(self, column, some);
        tile_scales(self, column, some);
        self->scaled_as = UINT64_MAX;
        for (uint64_t k = 0; k < some; k++) {
            uint64_t value = (self->matrix * packed->columns + column + k) * packed->rows + self->row;
            if (!self->plan->streams && column + k + AHEAD < packed->columns)
                prefetch(self, value + AHEAD * packed->rows, self->rows);
            restore_column(self, column, some, k);
            int32_t status = store(&one, self->line, value, self->rows, error);
            if (status != SL_OK) return status;
        }
    }
    return SL_OK;
}

/* ---- tiles of column codes with consecutive numbers ---- */

/* Whether the kernel of groups is faster for these codes. */
static bool in_groups(const sl_packed *packed) {
    if (packed->layout != SL_LAYOUT_COLUMNS || !sl_packed_scaled(packed) || packed->column_block != 1) return false;
    if (packed->groups == NULL && packed->bits == 4) return false;
    for (int code = 0; code < 1 << packed->bits; code++) {
        float number = packed->table[0] + (float)code;
        if (memcmp(&number, packed->table + code, sizeof number) != 0) return false;
    }
    return true;
}

/* Sets the groups of a band's rows, either from the job or by block. */
static void take_groups(band *self) {
    const sl_packed *packed = self->job->packed;
    if (packed->groups != NULL) {
        self->groups = packed->groups + self->row;
        self->group_count = packed->grid_rows;
        return;
    }
    uint32_t *own = (uint32_t *)(void *)self->gathered;
    self->first_group = self->row / packed->row_block;
    for (uint64_t r = 0; r < self->rows; r++)
        own[r] = (uint32_t)((self->row + r) / packed->row_block - self->first_group);
    self->groups = own;
    self->group_count = (uint64_t)own[self->rows - 1] + 1;
}

/* Copies `columns` 4-byte elements of each of `rows` rows, which are `step` bytes apart, to rows TILE_COLUMNS elements
 * apart. If the step is a power of two, the source rows compete for the same cache sets. */
static uint8_t *collect(const void *from, uint64_t step, uint64_t rows, uint64_t columns, uint8_t *to) {
    const uint64_t line = TILE_COLUMNS * 4;
    const uint8_t *in = from;
    if (columns == TILE_COLUMNS) /* a constant, which compiles to a few moves */
        for (uint64_t row = 0; row < rows; row++) memcpy(to + row * line, in + row * step, line);
    else
        for (uint64_t row = 0; row < rows; row++) memcpy(to + row * line, in + row * step, (size_t)columns * 4);
    return to;
}

/* Whether the scales of a tile are gathered: unless most of them belong to other rows, or there are too many. Stored
 * scales must be. */
static bool gathers(const band *self) {
    const uint64_t line = TILE_COLUMNS * 4, room = 2 * TURNED - FEW * FEW_LINE - self->lines * line;
    if (self->group_count > room / (SL_GRIDS * line)) return false;
    return sl_packed_stores(self->job->packed) || self->group_count <= self->rows;
}

/* Gathers the elements of a grid for `columns` columns in rows TILE_COLUMNS elements apart. */
static const float *gather_groups(const band *self, int k, uint64_t column, uint64_t columns, uint8_t *to) {
    const sl_packed *packed = self->job->packed;
    sl_packed_place place = {self->matrix, self->first_group, column};
    float *out = (float *)(void *)to;
    const float *grid = sl_packed_grid(packed, self->plan, k, place, columns, out);
    if (grid == NULL) return NULL;
    if (grid != out) return (float *)(void *)collect(grid, packed->grid_columns * 4, self->group_count, columns, to);
    for (uint64_t group = 1; group < self->group_count; group++) {
        place.row++;
        sl_packed_grid(packed, self->plan, k, place, columns, out + group * TILE_COLUMNS);
    }
    return out;
}

/* Describes the codes of `columns` columns, at most TILE_COLUMNS, and their scales. */
static sl_grouped grouped_of(const band *self, uint64_t column, uint64_t columns) {
    const sl_packed *packed = self->job->packed;
    const uint64_t line = TILE_COLUMNS * 4;
    const float *grids[SL_GRIDS];
    uint8_t *to = self->turned + FEW * FEW_LINE;
    sl_grouped all = {.pitch = line, .bits = packed->bits, .first = packed->table[0], .groups = self->groups};
    all.words = collect(self->bytes + (column - self->begin) * 4, self->pitch, self->lines, columns, to);
    to += self->lines * line;
    bool gathered = gathers(self);
    all.step = gathered ? TILE_COLUMNS : (size_t)packed->grid_columns;
    for (int k = 0; k < SL_GRIDS; k++, to += gathered ? self->group_count * line : 0)
        grids[k] = gathered ? gather_groups(self, k, column, columns, to)
                            : sl_packed_grid(packed, self->plan, k,
                                             (sl_packed_place){self->matrix, self->first_group, column}, columns, NULL);
    all.scales = grids[SL_GRID_SCALES];
    all.zeros = grids[SL_GRID_ZEROS];
    all.biases = grids[SL_GRID_BIASES];
    return all;
}

/* Dequantizes at most FEW columns, starting with `column` of the matrix. */
static int32_t restore_few(const band *self, const sl_grouped *codes, uint64_t column, uint64_t columns,
                           sl_error *error) {
    const sl_packed *packed = self->job->packed;
    const sl_restore *kernels = &self->plan->restore;
    work one = {self->job, self->plan};
    for (uint64_t row = 0, rows; row < self->rows; row += rows) {
        rows = sl_min_u64(self->rows - row, LONGEST_BLOCK);
        uint64_t value = (self->matrix * packed->columns + column) * packed->rows + self->row + row;
        kernels->grouped(codes, (size_t)row, (size_t)(row + rows), (size_t)columns, self->turned, FEW_LINE);
        for (uint64_t k = 0; k < columns; k++, value += packed->rows) {
            uint8_t *line = self->turned + k * FEW_LINE;
            if (!self->plan->streams && column + k + AHEAD < packed->columns)
                prefetch(self, value + AHEAD * packed->rows, rows);
            if (packed->factors != NULL) {
                const sl_scaling factors = {1, 0, packed->factors + self->row + row, NULL, NULL};
                kernels->scale(line, (size_t)rows, &factors);
            }
            int32_t status = store(&one, line, value, rows, error);
            if (status != SL_OK) return status;
        }
    }
    return SL_OK;
}

/* Dequantizes columns [column, end), FEW columns at a time, in runs of rows whose values stay in the first-level cache.
 */
static int32_t restore_groups(band *self, uint64_t column, uint64_t end, sl_error *error) {
    for (uint64_t some; column < end; column += some) {
        some = sl_min_u64(end - column, TILE_COLUMNS);
        const sl_grouped all = grouped_of(self, column, some);
        for (uint64_t at = 0; at < some; at += FEW) {
            const sl_grouped few = sl_grouped_at(&all, (size_t)at);
            int32_t status = restore_few(self, &few, column + at, sl_min_u64(some - at, FEW), error);
            if (status != SL_OK) return status;
        }
    }
    return SL_OK;
}

/* ---- tiles of codes that stay as they are, or change their sign ---- */

/* Whether codes of columns become rows of codes of as many bits. If so, sets *flip to the bits in which each differs.
 */
static bool keeps_codes(const sl_packed *packed, const sl_codes *codes, uint32_t *flip) {
    if (codes == NULL || codes->bits != packed->bits || codes->block_bytes > 0 || codes->order == SL_ORDER_HALVES ||
        packed->table == NULL || packed->factors != NULL || sl_packed_scaled(packed))
        return false;
    for (uint32_t code = 0, new; code < 1u << packed->bits; code++) {
        const float sum = packed->table[code] + SL_TO_INTEGER;
        memcpy(&new, &sum, sizeof new);
        new = (new ^ code) & ((1u << packed->bits) - 1);
        if (code == 0) *flip = new;
        if (new != *flip) return false;
    }
    if (packed->layout == SL_LAYOUT_COLUMNS) return *flip == 0 && codes->order == SL_ORDER_STREAM;
    return in_nibbles(packed, packed->columns) && packed->rows % 8 == 0;
}

/* Moves columns [column, end), at least SL_CODES_LANES words of them. */
static void turn_codes(const band *self, uint32_t flip, uint64_t column, uint64_t end) {
    const sl_packed *packed = self->job->packed;
    const sl_codes *codes = self->job->codes;
    uint64_t step = codes->row_bytes, some = sl_min_u64(end - column, TURNED_COLUMNS), words = some / 8;
    uint8_t *memory = (uint8_t *)self->job->memory + self->matrix * packed->columns * step +
                      self->row * (uint64_t)packed->bits / 8;
    const uint8_t *bytes = self->bytes - self->begin * self->line_bits / 8;
    if (packed->layout == SL_LAYOUT_COLUMNS) {
        sl_plane from = {(uint8_t *)(uintptr_t)bytes + column * 4, (int64_t)self->pitch, 4, false};
        sl_copy_2d(4, self->lines, end - column, from, (sl_plane){memory + column * step, 4, (int64_t)step, false});
        return;
    }
    for (uint64_t at = column; at < end; at += some) {
        at = sl_min_u64(at, end - some); /* some columns again */
        for (uint64_t r = 0; r < self->rows; r += 8)
            sl_codes_turn(codes->order, flip * 0x11111111u, bytes + r * self->pitch + at / 2, self->pitch, words,
                          self->turned + r * words * 4);
        for (uint64_t k = 0; k < 8; k++) {
            sl_plane from = {self->turned + nibble_of(packed, k) * words * 4, (int64_t)words * 32, 4, false};
            sl_plane to = {memory + (at + k) * step, 4, (int64_t)(8 * step), false};
            sl_copy_2d(4, self->rows / 8, words, from, to);
        }
    }
}

/* ---- bands ---- */

/* Reads columns [column, end) of the stored rows from byte `begin` on. */
static int32_t read_columns(band *self, uint64_t begin, uint64_t column, uint64_t end, sl_error *error) {
    const sl_job *job = self->job;
    uint64_t skipped = column * self->line_bits / 8;
    self->begin = column;
    self->bytes = self->staging;
    self->pitch = (end * self->line_bits + 7) / 8 - skipped;
    for (uint64_t line = 0; line < self->lines; line++) {
        uint64_t offset = job->offset + begin + line * job->packed->row_bytes + skipped;
        int32_t status = sl_file_read(job->file, offset, self->staging + line * self->pitch, self->pitch, error);
        if (status != SL_OK) return status;
    }
    return SL_OK;
}

static int32_t run_tiles(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *scratch, sl_error *error) {
    const sl_packed *packed = job->packed;
    uint64_t bands = (packed->rows - 1) / plan->rows + 1, parts = parts_of(packed, plan);
    uint64_t first = chunk % parts * plan->columns, last = sl_min_u64(first + plan->columns, packed->columns);
    chunk /= parts;
    band self = {.job = job, .plan = plan, .matrix = chunk / bands, .row = chunk % bands * plan->rows};
    self.rows = sl_min_u64(plan->rows, packed->rows - self.row);
    self.lines = lines_of(packed, self.rows);
    self.line_bits = packed->layout == SL_LAYOUT_COLUMNS ? 32 : (uint64_t)packed->bits;
    self.pitch = packed->row_bytes;
    self.scaled_as = UINT64_MAX;
    self.turned = scratch;
    self.values = self.turned + TURNED;
    self.line = self.values + TURNED;
    self.gathered = (float *)(void *)(self.line + LINE);
    self.staging = self.line + 4 * LINE;
    uint64_t begin = (self.matrix * lines_of(packed, packed->rows) + lines_of(packed, self.row)) * packed->row_bytes;
    uint64_t size = sl_min_u64(self.lines * packed->row_bytes, packed->size - begin), most = packed->columns;
    /* Columns of a much wider matrix are read without the rest of the rows. */
    bool narrow = self.line_bits * packed->columns / 8 < packed->row_bytes / 4;
    bool grouped = in_groups(packed), at_once = job->file == SL_MEMORY || (size <= TILE_READ && !narrow);
    if (grouped) take_groups(&self);
    if (grouped && sl_packed_stores(packed)) grouped = gathers(&self);
    uint32_t flip = 0;
    bool kept = keeps_codes(packed, job->codes, &flip);
    if (!at_once) most = TILE_READ * 8 / (self.lines * self.line_bits) / TILE_COLUMNS * TILE_COLUMNS;
    for (uint64_t column = first; column < last; column += most) {
        uint64_t end = sl_min_u64(column + most, last);
        int32_t status = at_once ? sl_fetch(job, begin, size, self.staging, &self.bytes, error)
                                 : read_columns(&self, begin, column, end, error);
        if (status == SL_OK && kept && (end - column >= 8 * SL_CODES_LANES || packed->layout == SL_LAYOUT_COLUMNS)) {
            turn_codes(&self, flip, column, end);
            continue;
        }
        if (status == SL_OK) status = (grouped ? restore_groups : restore_columns)(&self, column, end, error);
        if (status != SL_OK) return status;
    }
    return SL_OK;
}

static int32_t run_restore(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *scratch, sl_error *error) {
    int32_t status = (sl_packed_in_tiles(job->packed) ? run_tiles : run_in_order)(job, plan, chunk, scratch, error);
    if (plan->streams) sl_stream_end();
    return status;
}

const sl_op sl_op_restore = {"restore",     SL_TAKES_NONE, SL_TAKES_NONE, SL_NEEDS,
                             SL_TAKES_NONE, plan_restore,  run_restore};
