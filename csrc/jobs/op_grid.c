/* The operation SL_OP_GRID: a strided 2-D copy, with a conversion if the dtypes differ.
 *
 * A grid is processed tile by tile. A file's tile is read into scratch; parts of it are gathered, converted and
 * scattered in the first-level cache, so that a file's bytes cross memory only once. Unneeded steps are skipped. */
#include "jobs/op.h"
#include "kernels/copy2d.h"
#include "kernels/stream.h"

static bool is_run(int64_t column_stride, uint64_t element) { return column_stride == (int64_t)element; }

/* Rows of tiles and chunks are a multiple of this number, so that transposed values, which are stored a column of the
 * tile at a time, fill whole cache lines. */
#define TILE_ROWS ((uint64_t)64)
/* Bytes of a tile. Transposing is faster with longer columns. */
#define TILE_BYTES ((uint64_t)1 << 20)
/* Elements converted at a time: both sides stay in the first-level cache. PART_SIDE is the side of such a square. */
#define PART ((uint64_t)4096)
#define PART_SIDE ((uint64_t)64)
#define PART_BYTES (PART * sizeof(uint64_t))
/* Bytes of a transposed result that is stored past the cache: its lines lie rows apart, so plain stores, which read
 * each line first, take twice as long. */
#define STREAM_FROM ((uint64_t)8 << 20)

/* Maximum number of rows in a tile or chunk of `size` bytes. */
static uint64_t rows_in(uint64_t size, uint64_t columns, uint64_t element) {
    uint64_t rows = size / (columns * element);
    return rows - rows % TILE_ROWS;
}

/* A chunk is a rectangle of the grid with at most SL_CHUNK bytes. */
static int32_t plan_grid(const sl_job *job, sl_plan *plan, sl_error *error) {
    const sl_grid *grid = job->grid;
    const sl_dtype_info *from = sl_dtype_get(job->from), *to = sl_dtype_get(job->to);
    if (from == NULL || to == NULL || from->bits < 8 || to->bits < 8)
        return sl_fail(error, SL_E_ARGUMENT, -1, "no strided copies of dtype %d or %d: elements must be whole bytes",
                       job->from, job->to);
    if (job->from != job->to && !sl_conversion_find(plan->tier, job->from, job->to, &plan->conversion))
        return sl_fail(error, SL_E_ARGUMENT, -1, "no conversion from dtype %d to %d", job->from, job->to);
    uint64_t element = (uint64_t)from->block_bytes, row, size;
    if (!sl_mul_u64(grid->columns, element, &row) || !sl_mul_u64(grid->rows, row, &size) || size != job->size)
        return sl_fail(error, SL_E_ARGUMENT, -1, "a grid of %llu x %llu elements is not %llu bytes",
                       (unsigned long long)grid->rows, (unsigned long long)grid->columns,
                       (unsigned long long)job->size);
    if (job->file != SL_MEMORY && (!is_run(grid->source_column, element) || grid->source_row < (int64_t)row))
        return sl_fail(error, SL_E_ARGUMENT, -1, "in a file columns must be contiguous and rows must not overlap");
    if (size == 0) return SL_OK;
    plan->columns = sl_min_u64(grid->columns, SL_CHUNK / (element * TILE_ROWS));
    plan->rows = sl_min_u64(grid->rows, rows_in(SL_CHUNK, plan->columns, element));
    plan->step = plan->rows * plan->columns * element;
    plan->chunks = ((grid->rows - 1) / plan->rows + 1) * ((grid->columns - 1) / plan->columns + 1);
    plan->unit = 1;
    plan->unit_bytes = element;
    plan->scratch = TILE_BYTES + 2 * PART_BYTES;
    plan->streams = is_run(grid->memory_row, (uint64_t)to->block_bytes) &&
                    sl_stream_pays(job->memory, grid->rows * grid->columns * (uint64_t)to->block_bytes, STREAM_FROM);
    return SL_OK;
}

typedef struct tile {
    const sl_job *job;
    const sl_conversion *conversion; /* NULL: bytes are copied unchanged */
    uint64_t row, column, rows, columns;
    uint64_t from_size, to_size; /* bytes per element */
} tile;

/* Sets *source to the tile: in place if the source is memory, or read into `buffer` if it is a file. */
static int32_t fetch(const tile *self, uint8_t *buffer, sl_plane *source, sl_error *error) {
    const sl_job *job = self->job;
    const sl_grid *grid = job->grid;
    int64_t begin = (int64_t)self->row * grid->source_row + (int64_t)self->column * grid->source_column;
    if (job->file == SL_MEMORY) {
        *source = (sl_plane){(uint8_t *)(uintptr_t)sl_job_memory(job) + begin, grid->source_row, grid->source_column,
                             false};
        return SL_OK;
    }
    uint64_t run = self->columns * self->from_size, rows = self->rows, offset = job->offset + (uint64_t)begin;
    *source = (sl_plane){buffer, (int64_t)run, grid->source_column, false};
    if (grid->source_row == (int64_t)run) { /* whole rows, contiguous */
        run *= rows;
        rows = 1;
    }
    for (uint64_t r = 0; r < rows; r++) {
        int32_t status = sl_file_read(job->file, offset + r * (uint64_t)grid->source_row, buffer + r * run, run, error);
        if (status != SL_OK) return status;
    }
    return SL_OK;
}

/* Converts a part of a tile, gathering and scattering it in scratch if needed. */
static void convert_part(const tile *self, uint64_t rows, uint64_t columns, sl_plane source, uint8_t *scratch,
                         sl_plane destination) {
    uint64_t from = self->from_size, to = self->to_size, run = columns * from, count = rows * columns;
    if (!is_run(source.column, from) || (source.row != (int64_t)run && rows > 1)) {
        sl_plane packed = {scratch, (int64_t)run, (int64_t)from, false};
        sl_copy_2d((size_t)from, rows, columns, source, packed);
        source = packed;
    }
    int64_t row = (int64_t)(columns * to);
    if (is_run(destination.column, to) && (destination.row == row || rows == 1)) {
        sl_conversion_run(self->conversion, source.memory, destination.memory, (size_t)count);
        return;
    }
    sl_plane packed = {scratch + PART_BYTES, row, (int64_t)to, false};
    sl_conversion_run(self->conversion, source.memory, packed.memory, (size_t)count);
    sl_copy_2d((size_t)to, rows, columns, packed, destination);
}

/* Converts the tile in parts small enough for the first-level cache, in the order of the destination. */
static void convert(const tile *self, sl_plane source, uint8_t *scratch, sl_plane destination) {
    uint64_t rows = self->rows, columns = self->columns;
    if (is_run(destination.row, self->to_size) && !is_run(destination.column, self->to_size)) {
        sl_plane in = {source.memory, source.column, source.row, false},
                 out = {destination.memory, destination.column, destination.row, destination.streams};
        source = in, destination = out;
        rows = self->columns, columns = self->rows;
    }
    uint64_t across = is_run(source.column, self->from_size) ? PART : PART_SIDE;
    if (across > columns) across = columns;
    uint64_t down = PART / across;
    for (uint64_t r = 0; r < rows; r += down)
        for (uint64_t c = 0; c < columns; c += across) {
            sl_plane in = source, out = destination;
            in.memory += (int64_t)r * in.row + (int64_t)c * in.column;
            out.memory += (int64_t)r * out.row + (int64_t)c * out.column;
            convert_part(self, sl_min_u64(down, rows - r), sl_min_u64(across, columns - c), in, scratch, out);
        }
}

static int32_t run_tile(const tile *self, bool streams, uint8_t *scratch, sl_error *error) {
    const sl_grid *grid = self->job->grid;
    sl_plane source, destination = {(uint8_t *)self->job->memory + (int64_t)self->row * grid->memory_row +
                                        (int64_t)self->column * grid->memory_column,
                                    grid->memory_row, grid->memory_column, streams};
    int32_t status = fetch(self, scratch, &source, error);
    if (status != SL_OK) return status;
    if (self->conversion != NULL)
        convert(self, source, scratch + TILE_BYTES, destination);
    else
        sl_copy_2d((size_t)self->from_size, self->rows, self->columns, source, destination);
    return SL_OK;
}

static int32_t run_grid(const sl_job *job, const sl_plan *plan, uint64_t chunk, uint8_t *scratch, sl_error *error) {
    const sl_grid *grid = job->grid;
    uint64_t across = (grid->columns - 1) / plan->columns + 1;
    uint64_t row = chunk / across * plan->rows, column = chunk % across * plan->columns;
    uint64_t row_end = sl_min_u64(row + plan->rows, grid->rows),
             column_end = sl_min_u64(column + plan->columns, grid->columns);
    tile self = {job, plan->conversion.first != NULL ? &plan->conversion : NULL, row, column, 0, 0, 0, 0};
    self.from_size = (uint64_t)sl_dtype_get(job->from)->block_bytes;
    self.to_size = (uint64_t)sl_dtype_get(job->to)->block_bytes;
    uint64_t columns = sl_min_u64(column_end - column, TILE_BYTES / (TILE_ROWS * self.from_size));
    uint64_t rows = rows_in(TILE_BYTES, columns, self.from_size);
    for (uint64_t r = row; r < row_end; r += rows)
        for (uint64_t c = column; c < column_end; c += columns) {
            self.row = r;
            self.column = c;
            self.rows = sl_min_u64(rows, row_end - r);
            self.columns = sl_min_u64(columns, column_end - c);
            int32_t status = run_tile(&self, plan->streams, scratch, error);
            if (status != SL_OK) return status;
        }
    if (plan->streams) sl_stream_end();
    return SL_OK;
}

const sl_op sl_op_grid = {"grid", SL_NEEDS, SL_TAKES_NONE, SL_TAKES_NONE, SL_TAKES_NONE, plan_grid, run_grid};
