/* The operation SL_OP_MERGE: adds products of matrices to a matrix, tile by tile, and rounds the sums once. */
#include "jobs/op.h"
#include "kernels/scalar.h"
#include "kernels/tier.h"

/* Rows of a piece: all of them use a panel of the right factor while it is in the first-level cache. */
#define PIECE_ROWS ((uint64_t)32)
/* Most bytes of a piece. Longer rows are read in parts. */
#define PIECE_BYTES ((uint64_t)1 << 20)
/* A tile of values in the first-level cache, beside the panels of its columns. Whole panels and blocks of all types. */
#define TILE_ROWS ((uint64_t)8)
#define TILE_COLUMNS ((uint64_t)512)
#define TILE_LINE (TILE_COLUMNS * sizeof(float))
/* Tiles of a thread: the values, and two products to multiply. */
#define TILES ((uint64_t)3)

_Static_assert(TILE_COLUMNS % SL_MERGE_PANEL == 0 && TILE_COLUMNS % 256 == 0, "tiles hold whole panels and blocks");

static int32_t check_updates(const sl_merge *merge, sl_error *error) {
    for (uint64_t i = 0; i < merge->count; i++) {
        const sl_update *update = &merge->updates[i];
        if (update->rank == 0 || update->left == NULL || update->right == NULL)
            return sl_fail(error, SL_E_ARGUMENT, -1, "update %llu has rank %llu or lacks a factor",
                           (unsigned long long)i, (unsigned long long)update->rank);
        if (update->times != 0 && (i + 1 == merge->count || update[1].times != 0))
            return sl_fail(error, SL_E_ARGUMENT, -1, "update %llu has no product to multiply", (unsigned long long)i);
    }
    return SL_OK;
}

static int32_t plan_merge(const sl_job *job, sl_plan *plan, sl_error *error) {
    const sl_merge *merge = job->merge;
    const sl_dtype_info *from = sl_dtype_get(job->from), *to = sl_dtype_get(job->to);
    sl_conversion narrowing;
    if (to == NULL || to->block != 1 || to->kind != SL_KIND_FLOAT ||
        (job->to != SL_F32 && !sl_conversion_find(plan->tier, SL_F32, job->to, &narrowing)))
        return sl_fail(error, SL_E_ARGUMENT, -1, "no merging to dtype %d", job->to);
    int32_t status = sl_plan_floats(job, plan, error);
    if (status == SL_OK) status = check_updates(merge, error);
    if (status != SL_OK) return status;
    uint64_t columns = merge->columns, unit = (uint64_t)from->block, row_bytes;
    if (columns == 0 || columns % unit != 0 || !sl_mul_u64(columns, sizeof(double), &row_bytes))
        return sl_fail(error, SL_E_ARGUMENT, -1, "rows of %llu columns are not whole blocks to merge into",
                       (unsigned long long)columns);
    row_bytes = sl_dtype_bytes(from, columns);
    if (job->size % row_bytes != 0)
        return sl_fail(error, SL_E_ARGUMENT, -1, "%llu bytes are not whole rows of %llu", (unsigned long long)job->size,
                       (unsigned long long)row_bytes);
    status = sl_plan_pieces(job, unit, unit, unit, plan, error);
    if (status != SL_OK) return status;
    if (row_bytes <= PIECE_BYTES) {
        plan->piece = sl_min_u64(sl_max_u64(PIECE_ROWS, SL_STAGING / row_bytes), PIECE_BYTES / row_bytes) * row_bytes;
        sl_plan_bytes(job, SL_CHUNK - SL_CHUNK % plan->piece, 0, plan);
    }
    plan->scratch = (plan->piece + 63) / 64 * 64 + TILES * TILE_ROWS * TILE_LINE;
    return SL_OK;
}

typedef struct work {
    const sl_job *job;
    const sl_plan *plan;
    const sl_dtype_info *from, *to;
    sl_conversion narrowing; /* first == NULL: none */
    sl_merge_fn add;
    uint8_t *tile, *first, *second;
} work;

/* Copies or converts `count` elements. */
static void move(const sl_conversion *conversion, const uint8_t *source, uint8_t *target, uint64_t count) {
    if (conversion->first == NULL)
        memcpy(target, source, (size_t)count * sizeof(float));
    else
        sl_conversion_run(conversion, source, target, (size_t)count);
}

/* Adds an update to rows of panels of the tile, which begin at `row` and `panel` of the matrix. */
static void add_update(const work *self, sl_update update, uint8_t *tile, uint64_t row, uint64_t rows, uint64_t panel,
                       uint64_t panels) {
    update.left += row * update.rank;
    update.right += panel * update.rank * SL_MERGE_PANEL;
    self->add(tile, TILE_LINE, (size_t)rows, (size_t)panels, &update);
}

/* Adds the products of the elements of two updates. */
static void add_times(const work *self, const sl_update *update, uint64_t row, uint64_t rows, uint64_t panel,
                      uint64_t panels) {
    memset(self->first, 0, (size_t)(rows * TILE_LINE));
    memset(self->second, 0, (size_t)(rows * TILE_LINE));
    add_update(self, update[0], self->first, row, rows, panel, panels);
    add_update(self, update[1], self->second, row, rows, panel, panels);
    for (uint64_t r = 0; r < rows; r++) {
        uint8_t *tile = self->tile + r * TILE_LINE;
        const uint8_t *first = self->first + r * TILE_LINE, *second = self->second + r * TILE_LINE;
        for (size_t c = 0; c < (size_t)panels * SL_MERGE_PANEL; c++) {
            float product = float_of(load32(first, c)) * float_of(load32(second, c));
            store_float(tile, c, float_of(load32(tile, c)) + product);
        }
    }
}

/* Merges `rows` rows of columns [column, end) of a tile's width; `source` is row `row` of the matrix at `column`. */
static void merge_tile(const work *self, const uint8_t *source, uint64_t row, uint64_t rows, uint64_t column,
                       uint64_t end) {
    const sl_merge *merge = self->job->merge;
    uint64_t columns = merge->columns, panel = column / SL_MERGE_PANEL, skipped = column % SL_MERGE_PANEL;
    uint64_t panels = (end - 1) / SL_MERGE_PANEL + 1 - panel;
    uint8_t *target = (uint8_t *)self->job->memory + sl_dtype_bytes(self->to, row * columns + column);
    uint8_t *tile = self->tile + skipped * sizeof(float);
    uint64_t source_line = sl_dtype_bytes(self->from, columns), target_line = sl_dtype_bytes(self->to, columns);
    for (uint64_t r = 0; r < rows; r++)
        move(&self->plan->conversion, source + r * source_line, tile + r * TILE_LINE, end - column);
    for (uint64_t i = 0; i < merge->count; i++) {
        if (merge->updates[i].times != 0)
            add_times(self, &merge->updates[i++], row, rows, panel, panels);
        else
            add_update(self, merge->updates[i], self->tile, row, rows, panel, panels);
    }
    for (uint64_t r = 0; r < rows; r++)
        move(&self->narrowing, tile + r * TILE_LINE, target + r * target_line, end - column);
}

/* Merges whole rows, or a part of a single row: columns [column, end). */
static void merge_rows(const work *self, const uint8_t *source, uint64_t row, uint64_t rows, uint64_t column,
                       uint64_t end) {
    uint64_t line = sl_dtype_bytes(self->from, self->job->merge->columns);
    for (uint64_t next; column < end; source += sl_dtype_bytes(self->from, next - column), column = next) {
        next = sl_min_u64(end, (column / TILE_COLUMNS + 1) * TILE_COLUMNS);
        for (uint64_t r = 0; r < rows; r += TILE_ROWS)
            merge_tile(self, source + r * line, row + r, sl_min_u64(TILE_ROWS, rows - r), column, next);
    }
}

static int32_t merge_piece(void *context, const uint8_t *source, uint64_t element, uint64_t count, sl_error *error) {
    const work *self = context;
    uint64_t columns = self->job->merge->columns;
    (void)error;
    for (uint64_t some; count > 0; count -= some, element += some) {
        uint64_t column = element % columns, rows = column == 0 ? count / columns : 0;
        uint64_t end = rows > 0 ? columns : sl_min_u64(columns, column + count);
        if (rows == 0) rows = 1;
        some = (rows - 1) * columns + end - column;
        merge_rows(self, source, element / columns, rows, column, end);
        source += sl_dtype_bytes(self->from, some);
    }
    return SL_OK;
}

static int32_t run_merge(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *scratch, sl_error *error) {
    work self = {.job = job,
                 .plan = plan,
                 .from = sl_dtype_get(job->from),
                 .to = sl_dtype_get(job->to),
                 .add = sl_tier_merge(plan->tier),
                 .tile = scratch + plan->scratch - TILES * TILE_ROWS * TILE_LINE};
    self.first = self.tile + TILE_ROWS * TILE_LINE;
    self.second = self.first + TILE_ROWS * TILE_LINE;
    if (job->to != SL_F32) (void)sl_conversion_find(plan->tier, SL_F32, job->to, &self.narrowing);
    memset(self.tile, 0, TILE_ROWS * TILE_LINE); /* lanes outside of the matrix are computed, too */
    return sl_each_piece(job, plan, chunk, scratch, merge_piece, &self, error);
}

const sl_op sl_op_merge = {"merge", SL_TAKES_NONE, SL_TAKES_NONE, SL_TAKES_NONE, SL_NEEDS, plan_merge, run_merge};
