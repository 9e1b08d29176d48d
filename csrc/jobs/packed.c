/* Packed codes as the source of a job. */
#include "jobs/packed.h"

#include "jobs/masked.h"
#include "kernels/quant.h"
#include "kernels/scalar.h"
#include "kernels/tier.h"

/* Scratch: stored bytes, then the scales, zeros and biases of a range of codes, and the values of a mask. */
#define SCRATCH (SL_STAGING + 4 * SL_VALUES * sizeof(float))

/* ---- checks ---- */

#define REFUSE(...) return sl_fail(error, SL_E_ARGUMENT, -1, __VA_ARGS__)

bool sl_packed_by_row(const sl_packed *packed) {
    return packed->layout == SL_LAYOUT_COLUMNS || (packed->layout == SL_LAYOUT_WORDS && packed->transpose != 0);
}

bool sl_packed_in_tiles(const sl_packed *packed) { return packed->transpose != 0; }

bool sl_packed_scaled(const sl_packed *packed) { return packed->scales != NULL || packed->stored_scales != NULL; }

bool sl_packed_stores(const sl_packed *packed) {
    return packed->stored_scales != NULL || packed->stored_zeros != NULL || packed->stored_biases != NULL;
}

/* Number of planes in a row of bytes. */
static uint64_t planes_of(const sl_packed *packed) { return 8 / (uint64_t)packed->bits; }

/* Number of rows of bytes in a matrix of planes. */
static uint64_t byte_rows(const sl_packed *packed) { return packed->rows / planes_of(packed); }

/* The bit of a byte at which the codes of a row begin. */
static int plane_shift(const sl_packed *packed, uint64_t row) {
    int plane = (int)(packed->interleaved != 0 ? row % planes_of(packed) : row / byte_rows(packed));
    return packed->high_first != 0 ? 8 - packed->bits * (plane + 1) : packed->bits * plane;
}

/* The block type of BLOCKS. */
static const sl_dtype_info *blocks_of(const sl_packed *packed) { return sl_dtype_get(packed->codes); }

/* Sets the size of the codes in a stored row, and the number of stored rows. Returns false if they do not fit in 64
 * bits or do not divide. */
static bool stored_rows(const sl_packed *packed, uint64_t *bytes, uint64_t *rows) {
    uint64_t bits = (uint64_t)packed->bits, per_word = (uint64_t)packed->word_codes, columns = packed->columns;
    *rows = packed->rows;
    switch (packed->layout) {
    case SL_LAYOUT_ROWS:
        if (per_word > 0) return sl_mul_u64(columns / per_word + (columns % per_word != 0), 4, bytes);
        if (!sl_mul_u64(columns, bits, bytes)) return false;
        *bytes = *bytes / 8 + (*bytes % 8 != 0);
        return true;
    case SL_LAYOUT_COLUMNS:
        if (!sl_mul_u64(packed->rows, bits, rows) || *rows % 32 != 0) return false;
        *rows /= 32;
        return sl_mul_u64(columns, 4, bytes);
    case SL_LAYOUT_WORDS: *bytes = columns / 2; return columns % 8 == 0;
    case SL_LAYOUT_BLOCKS:
        return columns % (uint64_t)blocks_of(packed)->block == 0 &&
               sl_mul_u64(columns / (uint64_t)blocks_of(packed)->block, (uint64_t)blocks_of(packed)->block_bytes,
                          bytes);
    case SL_LAYOUT_MASKED: *bytes = *rows = 0; return true; /* values are counted when they are read */
    default:
        *bytes = columns;
        *rows = packed->rows / planes_of(packed);
        return packed->rows % planes_of(packed) == 0;
    }
}

static int32_t check_blocks(const sl_packed *packed, sl_error *error) {
    const sl_dtype_info *blocks = blocks_of(packed);
    if (blocks == NULL || blocks->kind != SL_KIND_BLOCKS ||
        sl_tier_convert(SL_TIER_SCALAR, packed->codes, SL_F32) == NULL)
        REFUSE("codes cannot be blocks of dtype %d", packed->codes);
    if (packed->word_codes != 0 || packed->high_first != 0 || packed->interleaved != 0 || packed->transpose != 0)
        REFUSE("blocks have no words, no planes, and are never transposed");
    if (packed->table != NULL && (blocks->block != SL_QK || (packed->bits != 4 && packed->bits != 8) ||
                                  packed->bits * 4 > blocks->block_bytes || packed->forbidden >= 0))
        REFUSE("blocks of dtype %d do not end with 32 codes of %d bits", packed->codes, packed->bits);
    if (packed->forbidden >= 0 && (packed->codes != SL_I2_S || packed->forbidden > 3))
        REFUSE("only codes of 2 bits can be forbidden");
    return SL_OK;
}

static int32_t check_layout(const sl_packed *packed, sl_error *error) {
    int32_t layout = packed->layout, bits = packed->bits;
    if (layout < 0 || layout >= SL_LAYOUT_COUNT) REFUSE("unknown layout %d of packed codes", layout);
    if (packed->divide != 0 && (layout != SL_LAYOUT_ROWS || packed->table != NULL || packed->transpose != 0 ||
                                packed->groups != NULL || packed->zeros != NULL || packed->biases != NULL))
        REFUSE("only rows of 8-bit codes in blocks, without zero points and biases, are divided by scales");
    if (layout == SL_LAYOUT_MASKED) return sl_masked_check(packed, error);
    if (bits < 1 || bits > 8) REFUSE("codes of %d bits: they have 1 to 8", bits);
    if (layout == SL_LAYOUT_BLOCKS) return check_blocks(packed, error);
    if (packed->table == NULL && (bits != 8 || layout != SL_LAYOUT_ROWS || packed->word_codes != 0))
        REFUSE("codes of %d bits in layout %d lack a table", bits, layout);
    if (packed->table == NULL) {
        const sl_dtype_info *codes = sl_dtype_get(packed->codes);
        if (codes == NULL || codes->bits != 8 || sl_tier_convert(SL_TIER_SCALAR, packed->codes, SL_F32) == NULL)
            REFUSE("codes cannot be numbers of dtype %d", packed->codes);
    }
    if (packed->word_codes < 0 || packed->word_codes > 32 / bits ||
        (packed->word_codes > 0 && layout != SL_LAYOUT_ROWS))
        REFUSE("%d codes of %d bits in a word", packed->word_codes, bits);
    bool nibbles = layout == SL_LAYOUT_ROWS && bits == 4 && packed->word_codes == 0;
    if (packed->high_first != 0 && layout != SL_LAYOUT_PLANES && !nibbles)
        REFUSE("only streams of 4 bits and planes begin with the high bits");
    if ((layout == SL_LAYOUT_WORDS && bits != 4) || (layout == SL_LAYOUT_PLANES && bits != 2 && bits != 4))
        REFUSE("codes of %d bits in layout %d", bits, layout);
    if (packed->forbidden >= 0 && (layout != SL_LAYOUT_PLANES || bits != 2 || packed->forbidden > 3))
        REFUSE("only codes of 2 bits in planes can be forbidden");
    if (packed->interleaved != 0 && layout != SL_LAYOUT_PLANES) REFUSE("only planes are interleaved");
    return SL_OK;
}

static int32_t check_size(const sl_packed *packed, const sl_job *job, sl_error *error) {
    uint64_t bytes = 0, rows = 0, matrix, stored, values, end;
    if (!stored_rows(packed, &bytes, &rows) || !sl_mul_u64(rows, packed->row_bytes, &matrix) ||
        !sl_mul_u64(matrix, packed->matrices, &stored))
        REFUSE("%llu x %llu codes of %d bits do not fill whole words, or exceed 64 bits",
               (unsigned long long)packed->rows, (unsigned long long)packed->columns, packed->bits);
    if (packed->row_bytes < bytes)
        REFUSE("a row of %llu bytes cannot hold %llu bytes of codes", (unsigned long long)packed->row_bytes,
               (unsigned long long)bytes);
    /* The last row may end with its codes, if these are columns of a wider matrix. */
    uint64_t least = stored > 0 ? stored - (packed->row_bytes - bytes) : 0;
    if (packed->layout != SL_LAYOUT_MASKED && (packed->size > stored || packed->size < least))
        REFUSE("packed codes have %llu bytes, but their rows need %llu", (unsigned long long)packed->size,
               (unsigned long long)stored);
    if (!sl_mul_u64(packed->rows, packed->columns, &values) || !sl_mul_u64(values, packed->matrices, &values) ||
        !sl_mul_u64(values, 4, &values) || values != job->size)
        REFUSE("%llu x %llu x %llu values are not %llu bytes of f32", (unsigned long long)packed->matrices,
               (unsigned long long)packed->rows, (unsigned long long)packed->columns, (unsigned long long)job->size);
    if (!sl_add_u64(job->offset, packed->size, &end))
        REFUSE("%llu bytes at %llu end beyond 64 bits", (unsigned long long)packed->size,
               (unsigned long long)job->offset);
    return SL_OK;
}

/* Whether `elements` blocks of `block` rows or columns cover `count` rows or columns. */
static bool covers(uint64_t count, uint64_t block, uint64_t elements) {
    return block > 0 && (count == 0 || (count - 1) / block < elements);
}

/* Whether numbers of a dtype can be the elements of a grid. */
static bool can_store(int32_t dtype) {
    const sl_dtype_info *info = sl_dtype_get(dtype);
    return info != NULL && (info->bits == 8 || info->bits == 16 || info->bits == 32) &&
           sl_tier_convert(SL_TIER_SCALAR, dtype, SL_F32) != NULL;
}

/* Number of stored rows of a matrix's zeros. */
static uint64_t zero_rows(const sl_packed *packed) {
    uint64_t rows = packed->grid_rows;
    return packed->zero_layout == SL_LAYOUT_COLUMNS ? rows / 8 + (rows % 8 != 0) : rows;
}

/* Checks the grids that are converted when they are used. */
static int32_t check_stored(const sl_packed *packed, sl_error *error) {
    uint64_t columns = packed->grid_columns, least = 0, all;
    int32_t layout = packed->zero_layout;
    if ((packed->scales != NULL && packed->stored_scales != NULL) ||
        (packed->zeros != NULL && packed->stored_zeros != NULL) ||
        (packed->biases != NULL && packed->stored_biases != NULL))
        REFUSE("packed codes have scales, zero points or biases twice");
    if (packed->groups != NULL && !sl_packed_by_row(packed) && sl_packed_stores(packed))
        REFUSE("stored scales cannot have groups of columns");
    if (packed->stored_scales != NULL && !can_store(packed->scale_dtype))
        REFUSE("scales cannot be stored as dtype %d", packed->scale_dtype);
    if (packed->stored_biases != NULL && !can_store(packed->bias_dtype))
        REFUSE("biases cannot be stored as dtype %d", packed->bias_dtype);
    if (packed->shared != NULL &&
        (packed->stored_scales == NULL || !sl_mul_u64(packed->matrices, packed->shared_step, &all) ||
         all > SIZE_MAX / sizeof(float)))
        REFUSE("a shared scale needs stored scales, and steps that fit in 64 bits");
    if (packed->stored_zeros == NULL) return SL_OK;
    if (layout != SL_LAYOUT_ROWS && layout != SL_LAYOUT_COLUMNS && layout != SL_LAYOUT_WORDS)
        REFUSE("zero points in layout %d", layout);
    if (packed->zero_table == NULL) REFUSE("zero points of 4 bits lack a table");
    if (layout == SL_LAYOUT_ROWS) least = columns / 2 + columns % 2;
    if (layout == SL_LAYOUT_WORDS) least = (columns / 8 + (columns % 8 != 0)) * 4;
    if (layout == SL_LAYOUT_COLUMNS && !sl_mul_u64(columns, 4, &least)) least = UINT64_MAX;
    if (packed->zero_bytes < least || !sl_mul_u64(zero_rows(packed), packed->zero_bytes, &all) ||
        !sl_mul_u64(all, packed->matrices, &all) || all > SIZE_MAX)
        REFUSE("rows of %llu bytes cannot hold %llu x %llu zero points, or exceed 64 bits",
               (unsigned long long)packed->zero_bytes, (unsigned long long)packed->grid_rows,
               (unsigned long long)columns);
    return SL_OK;
}

static int32_t check_grid(const sl_packed *packed, sl_error *error) {
    bool grouped = packed->groups != NULL, by_row = sl_packed_by_row(packed);
    uint64_t elements, all;
    if (!sl_packed_scaled(packed)) {
        if (packed->zeros != NULL || packed->biases != NULL || grouped || sl_packed_stores(packed))
            REFUSE("packed codes lack scales");
        return SL_OK;
    }
    int32_t status = check_stored(packed, error);
    if (status != SL_OK) return status;
    if (!sl_mul_u64(packed->grid_rows, packed->grid_columns, &elements) ||
        (packed->grid_step != 0 && packed->grid_step < elements) ||
        !sl_mul_u64(packed->grid_step, packed->matrices, &all) || !sl_add_u64(all, elements, &all) ||
        all > SIZE_MAX / sizeof(float))
        REFUSE("grids of %llu x %llu scales, %llu apart", (unsigned long long)packed->grid_rows,
               (unsigned long long)packed->grid_columns, (unsigned long long)packed->grid_step);
    if (!((grouped && by_row) || covers(packed->rows, packed->row_block, packed->grid_rows)) ||
        !((grouped && !by_row) || covers(packed->columns, packed->column_block, packed->grid_columns)))
        REFUSE("%llu x %llu scales do not cover %llu x %llu codes in blocks of %llu x %llu",
               (unsigned long long)packed->grid_rows, (unsigned long long)packed->grid_columns,
               (unsigned long long)packed->rows, (unsigned long long)packed->columns,
               (unsigned long long)packed->row_block, (unsigned long long)packed->column_block);
    uint64_t count = by_row ? packed->rows : packed->columns, limit = by_row ? packed->grid_rows : packed->grid_columns;
    for (uint64_t i = 0; grouped && i < count; i++)
        if (packed->groups[i] >= limit)
            REFUSE("group %llu of index %llu: there are %llu", (unsigned long long)packed->groups[i],
                   (unsigned long long)i, (unsigned long long)limit);
    return SL_OK;
}

int32_t sl_packed_check(const sl_job *job, bool tiles, sl_error *error) {
    const sl_packed *packed = job->packed;
    if (job->from != SL_F32) REFUSE("packed codes stand for f32, not for dtype %d", job->from);
    int32_t status = check_layout(packed, error);
    if (status == SL_OK) status = check_size(packed, job, error);
    if (status == SL_OK && job->size > 0) status = check_grid(packed, error); /* an empty job reads no scales */
    if (status == SL_OK && job->size > 0 && packed->layout == SL_LAYOUT_MASKED)
        status = sl_masked_check_mask(packed, error);
    if (status == SL_OK && !tiles && sl_packed_in_tiles(packed))
        REFUSE("this operation needs codes in the order of their values");
    return status;
}

uint64_t sl_packed_unit(const sl_job *job) {
    bool blocks = job->packed != NULL && job->packed->layout == SL_LAYOUT_BLOCKS;
    return blocks ? (uint64_t)blocks_of(job->packed)->block : 1;
}

void sl_packed_plan(const sl_job *job, sl_plan *plan) {
    plan->packed = plan->scratch;
    plan->scratch += SCRATCH;
    plan->restore = sl_tier_restore(plan->tier);
    if (job->packed->table == NULL) plan->numbers = sl_tier_convert(plan->tier, job->packed->codes, SL_F32);
    plan->grids[SL_GRID_SCALES] = sl_tier_convert(plan->tier, job->packed->scale_dtype, SL_F32);
    plan->grids[SL_GRID_BIASES] = sl_tier_convert(plan->tier, job->packed->bias_dtype, SL_F32);
}

/* ---- values ---- */

/* Number of codes in a word, or 0 if a row does not consist of words. */
static uint64_t codes_in_word(const sl_packed *packed) {
    return packed->layout == SL_LAYOUT_WORDS ? 8 : (uint64_t)packed->word_codes;
}

/* The byte of a row at which a column begins; the previous column ends there. */
static uint64_t column_begin(const sl_packed *packed, uint64_t column) {
    uint64_t per_word = codes_in_word(packed);
    if (packed->layout == SL_LAYOUT_PLANES) return column;
    if (packed->layout == SL_LAYOUT_BLOCKS) return sl_dtype_bytes(blocks_of(packed), column);
    if (per_word > 0) return column / per_word * 4;
    return column / 8 * (uint64_t)packed->bits + column % 8 * (uint64_t)packed->bits / 8;
}

static uint64_t column_end(const sl_packed *packed, uint64_t column) {
    if (packed->layout == SL_LAYOUT_PLANES || packed->layout == SL_LAYOUT_BLOCKS) return column_begin(packed, column);
    if (codes_in_word(packed) > 0) return column_begin(packed, column - 1) + 4;
    return column / 8 * (uint64_t)packed->bits + (column % 8 * (uint64_t)packed->bits + 7) / 8;
}

/* Reorders words of 8 codes from the interleaved order of AWQ's kernels into a stream. */
static void put_in_order(const uint8_t *words, size_t count, uint8_t *stream) {
    for (size_t i = 0; i < 4 * count; i += 4) {
        const uint8_t *even = words + i, *odd = words + i + 2;
        for (size_t k = 0; k < 2; k++) {
            stream[i + 2 * k] = (uint8_t)((even[k] & 15) | odd[k] << 4);
            stream[i + 2 * k + 1] = (uint8_t)(even[k] >> 4 | (odd[k] & 0xF0));
        }
    }
}

/* Looks up the codes at the end of each of some blocks. */
static void look_up_blocks(const sl_packed *packed, const sl_plan *plan, const uint8_t *block, size_t count,
                           uint8_t *values) {
    const size_t size = (size_t)blocks_of(packed)->block_bytes, half = 16 * sizeof(float);
    for (size_t i = 0; i < count; i += SL_QK, block += size, values += 2 * half) {
        const uint8_t *codes = block + size - (size_t)packed->bits * 4;
        if (packed->bits == 8) {
            sl_restore_stream(codes, 0, 8, SL_QK, packed->table, values);
            continue;
        }
        plan->restore.plane(codes, 0, 4, 16, packed->table, NULL, values);
        plan->restore.plane(codes, 4, 4, 16, packed->table, NULL, values + half);
    }
}

void sl_packed_look_up(const sl_packed *packed, const sl_plan *plan, const uint8_t *bytes, uint64_t column,
                       uint64_t count, const sl_scaling *scaling, void *values) {
    size_t some = (size_t)count;
    int bits = packed->bits;
    if (packed->layout == SL_LAYOUT_WORDS) {
        uint8_t stream[SL_VALUES / 2 + 8]; /* the first and the last word may be partial */
        uint64_t first = column % 8;
        put_in_order(bytes + column / 8 * 4, (size_t)((first + count + 7) / 8), stream);
        plan->restore.nibbles(stream + first / 2, first % 2, false, some, packed->table, scaling, values);
        return;
    }
    if (packed->layout == SL_LAYOUT_BLOCKS && packed->table != NULL) {
        look_up_blocks(packed, plan, bytes + column_begin(packed, column), some, values);
        if (scaling != NULL) plan->restore.scale(values, some, scaling);
        return;
    }
    if (bits == 4 && packed->table != NULL && packed->word_codes == 0) {
        plan->restore.nibbles(bytes + column / 2, column % 2, packed->high_first != 0, some, packed->table, scaling,
                              values);
        return;
    }
    if (packed->table == NULL)
        plan->numbers(bytes + column_begin(packed, column), values, some);
    else if (packed->word_codes > 0) {
        uint64_t per_word = (uint64_t)packed->word_codes;
        sl_restore_words(bytes + column / per_word * 4, (size_t)(column % per_word), bits, (size_t)per_word, some,
                         packed->table, values);
    } else {
        uint64_t bit = column % 8 * (uint64_t)bits;
        sl_restore_stream(bytes + column / 8 * (uint64_t)bits, (size_t)bit, bits, some, packed->table, values);
    }
    if (scaling != NULL) plan->restore.scale(values, some, scaling);
}

/* ---- grids ---- */

/* Converts stored scales or biases. */
static void convert_grid(const sl_packed *packed, const sl_plan *plan, int grid, sl_packed_place place, uint64_t count,
                         float *out) {
    bool scales = grid == SL_GRID_SCALES;
    const uint8_t *stored = scales ? packed->stored_scales : packed->stored_biases;
    uint64_t at = place.matrix * packed->grid_step + place.row * packed->grid_columns + place.column;
    const sl_dtype_info *dtype = sl_dtype_get(scales ? packed->scale_dtype : packed->bias_dtype);
    plan->grids[grid](stored + sl_dtype_bytes(dtype, at), out, (size_t)count);
    if (!scales || packed->shared == NULL) return;
    const sl_scaling shared = {(size_t)count, 0, packed->shared + place.matrix * packed->shared_step, NULL, NULL};
    if (packed->shared_divides != 0)
        sl_restore_divide(out, (size_t)count, &shared);
    else
        plan->restore.scale(out, (size_t)count, &shared);
}

/* Looks up stored zeros. */
static void look_up_zeros(const sl_packed *packed, const sl_plan *plan, sl_packed_place place, uint64_t count,
                          float *out) {
    uint64_t row = packed->zero_layout == SL_LAYOUT_COLUMNS ? place.row / 8 : place.row;
    if (packed->grid_step != 0) row += place.matrix * zero_rows(packed);
    const uint8_t *bytes = (const uint8_t *)packed->stored_zeros + row * packed->zero_bytes;
    const sl_packed codes = {.layout = packed->zero_layout, .bits = 4, .table = packed->zero_table};
    if (packed->zero_layout == SL_LAYOUT_COLUMNS)
        plan->restore.words(bytes + place.column * 4, 4 * (int)(place.row % 8), (size_t)count, packed->zero_table, NULL,
                            out);
    else
        sl_packed_look_up(&codes, plan, bytes, place.column, count, NULL, out);
}

const float *sl_packed_grid(const sl_packed *packed, const sl_plan *plan, int grid, sl_packed_place place,
                            uint64_t count, float *out) {
    const float *const grids[SL_GRIDS] = {packed->scales, packed->zeros, packed->biases};
    const void *const stored[SL_GRIDS] = {packed->stored_scales, packed->stored_zeros, packed->stored_biases};
    if (grids[grid] != NULL)
        return grids[grid] + place.matrix * packed->grid_step + place.row * packed->grid_columns + place.column;
    if (stored[grid] == NULL) return NULL;
    if (grid == SL_GRID_ZEROS)
        look_up_zeros(packed, plan, place, count, out);
    else
        convert_grid(packed, plan, grid, place, count, out);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    for (uint64_t i = 0; i < count; i++)
        out[i] = float_of(load32(out, (size_t)i)); /* kernels store in file byte order */
#endif
    return out;
}

/* A range of codes in a row, with values in the order of the codes. */
typedef struct codes {
    uint64_t matrix, row, column, count;
    const uint8_t *bytes; /* start of the stored row */
} codes;

/* Gathers the elements of `grid` for codes that are grouped by column. */
static const float *gather(const float *grid, const uint32_t *groups, uint64_t count, float *out) {
    for (uint64_t i = 0; grid != NULL && i < count; i++) out[i] = grid[groups[i]];
    return grid == NULL ? NULL : out;
}

static const float *advanced(const float *grid, uint64_t by) { return grid == NULL ? NULL : grid + by; }

static sl_scaling scaling_of(const sl_packed *packed, const sl_plan *plan, const codes *range, float *gathered) {
    bool by_row = packed->groups != NULL && sl_packed_by_row(packed);
    uint64_t column = range->column, count = range->count;
    uint64_t row = by_row ? packed->groups[range->row] : range->row / packed->row_block;
    if (packed->groups != NULL && !by_row) {
        uint64_t at = range->matrix * packed->grid_step + row * packed->grid_columns;
        const uint32_t *groups = packed->groups + column;
        return (sl_scaling){1, 0, gather(packed->scales + at, groups, count, gathered),
                            gather(advanced(packed->zeros, at), groups, count, gathered + SL_VALUES),
                            gather(advanced(packed->biases, at), groups, count, gathered + 2 * SL_VALUES)};
    }
    uint64_t block = packed->column_block, first = column % block, elements = (first + count - 1) / block + 1;
    sl_packed_place place = {range->matrix, row, column / block};
    const float *grids[SL_GRIDS];
    for (int k = 0; k < SL_GRIDS; k++)
        grids[k] = sl_packed_grid(packed, plan, k, place, elements, gathered + (size_t)k * SL_VALUES);
    return (sl_scaling){(size_t)block, (size_t)first, grids[SL_GRID_SCALES], grids[SL_GRID_ZEROS],
                        grids[SL_GRID_BIASES]};
}

/* Multiplies values by the factors of their columns, or of their row, if any. */
static void multiply(const sl_packed *packed, const sl_plan *plan, const codes *range, void *values) {
    if (packed->factors == NULL) return;
    bool by_row = sl_packed_by_row(packed);
    const sl_scaling factors = {by_row ? (size_t)range->count : 1, 0,
                                packed->factors + (by_row ? range->row : range->column), NULL, NULL};
    plan->restore.scale(values, (size_t)range->count, &factors);
}

/* Dequantizes a range of at most SL_VALUES codes. */
static void restore_range(const sl_packed *packed, const sl_plan *plan, const codes *range, void *values,
                          uint8_t *scratch) {
    sl_scaling own;
    const sl_scaling *scaling = NULL;
    if (sl_packed_scaled(packed)) {
        own = scaling_of(packed, plan, range, (float *)(void *)(scratch + SL_STAGING));
        scaling = &own;
    }
    if (packed->layout == SL_LAYOUT_PLANES)
        plan->restore.plane(range->bytes + range->column, plane_shift(packed, range->row), packed->bits,
                            (size_t)range->count, packed->table, scaling, values);
    else if (packed->divide != 0 && scaling != NULL) {
        sl_packed_look_up(packed, plan, range->bytes, range->column, range->count, NULL, values);
        sl_restore_divide(values, (size_t)range->count, scaling);
    } else
        sl_packed_look_up(packed, plan, range->bytes, range->column, range->count, scaling, values);
    multiply(packed, plan, range, values);
}

/* The stored byte at which a row begins. */
static uint64_t row_offset(const sl_packed *packed, uint64_t matrix, uint64_t row) {
    if (packed->layout != SL_LAYOUT_PLANES) return (matrix * packed->rows + row) * packed->row_bytes;
    uint64_t rows = byte_rows(packed), own = packed->interleaved != 0 ? row / planes_of(packed) : row % rows;
    return (matrix * rows + own) * packed->row_bytes;
}

/* The values of a single fetch: whole rows of a matrix (of a plane), or a part of a row. */
typedef struct span {
    uint64_t matrix, row, column, rows, count; /* `column` is the start in the first row */
    uint64_t begin, end;                       /* stored bytes */
} span;

static span span_of(const sl_packed *packed, uint64_t element, uint64_t count) {
    uint64_t columns = packed->columns, in_matrix = element % (packed->rows * columns);
    uint64_t plane = packed->layout == SL_LAYOUT_PLANES ? byte_rows(packed) : packed->rows;
    if (packed->interleaved != 0) plane = 1; /* the next row shares the bytes */
    span self = {.matrix = element / (packed->rows * columns),
                 .row = in_matrix / columns,
                 .column = in_matrix % columns,
                 .rows = 1};
    uint64_t rest = columns - self.column; /* in the first row */
    /* Up to 8 codes may share bytes with neighbouring codes. */
    uint64_t most = (SL_STAGING - 16) * 8 / (codes_in_word(packed) > 0 ? 32 : (uint64_t)packed->bits);
    if (packed->layout == SL_LAYOUT_BLOCKS) /* each block has less than 512 bytes */
        most = SL_STAGING / 512 * (uint64_t)blocks_of(packed)->block;
    if (self.column > 0 || count < columns || packed->row_bytes > SL_STAGING / 2)
        self.count = sl_min_u64(sl_min_u64(rest, count), most);
    else {
        self.rows = sl_min_u64(sl_min_u64(count / columns, plane - self.row % plane), SL_STAGING / packed->row_bytes);
        self.count = self.rows * columns;
    }
    uint64_t last = self.row + self.rows - 1, stop = self.rows > 1 ? columns : self.column + self.count;
    self.begin = row_offset(packed, self.matrix, self.row) + column_begin(packed, self.column);
    self.end = row_offset(packed, self.matrix, last) + column_end(packed, stop);
    return self;
}

static int32_t refuse_code(const sl_job *job, const codes *range, uint64_t column, uint64_t byte, sl_error *error) {
    byte += row_offset(job->packed, range->matrix, range->row);
    return sl_fail(error, SL_E_FORMAT, (int64_t)((job->file == SL_MEMORY ? 0 : job->offset) + byte),
                   "row %llu, column %llu has code %d, which no value is stored as", (unsigned long long)range->row,
                   (unsigned long long)column, job->packed->forbidden);
}

/* Checks the codes of I2_S blocks. */
static int32_t check_ternary_blocks(const sl_job *job, const codes *range, sl_error *error) {
    uint64_t begin = column_begin(job->packed, range->column), size = column_begin(job->packed, range->count);
    for (uint64_t quarter = 0; quarter < 4; quarter++) {
        uint64_t at = sl_restore_find_pair(range->bytes + begin, 6 - 2 * (int)quarter, (size_t)size,
                                           (uint8_t)job->packed->forbidden);
        if (at == size) continue;
        uint64_t column = range->column + at / 32 * 128 + quarter * 32 + at % 32;
        return refuse_code(job, range, column, begin + at, error);
    }
    return SL_OK;
}

static int32_t check_codes(const sl_job *job, const codes *range, sl_error *error) {
    const sl_packed *packed = job->packed;
    if (packed->layout == SL_LAYOUT_BLOCKS) return check_ternary_blocks(job, range, error);
    size_t found = sl_restore_find_pair(range->bytes + range->column, plane_shift(packed, range->row),
                                        (size_t)range->count, (uint8_t)packed->forbidden);
    if (found == range->count) return SL_OK;
    return refuse_code(job, range, range->column + found, range->column + found, error);
}

/* Expands values at masked positions. */
static int32_t restore_masked(const sl_job *job, const sl_plan *plan, uint64_t element, uint64_t count, uint8_t *out,
                              uint8_t *scratch, sl_error *error) {
    const sl_packed *packed = job->packed;
    float *gathered = (float *)(void *)(scratch + SL_STAGING);
    int32_t status = SL_OK;
    while (count > 0 && status == SL_OK) {
        uint64_t some = count;
        sl_masked values;
        status = sl_masked_fetch(job, element, &some, scratch, &values, error);
        count -= some;
        for (uint64_t size; some > 0 && status == SL_OK; some -= size, element += size, out += 4 * size) {
            size = sl_masked_run(packed, element, some);
            status = sl_masked_expand(job, plan, &values, element, size, gathered + 3 * SL_VALUES, out, error);
            if (status != SL_OK) break;
            codes range = {.row = element / packed->columns, .column = element % packed->columns, .count = size};
            range.matrix = range.row / packed->rows;
            range.row %= packed->rows;
            if (sl_packed_scaled(packed)) {
                const sl_scaling own = scaling_of(packed, plan, &range, gathered);
                plan->restore.scale(out, (size_t)size, &own);
            }
            multiply(packed, plan, &range, out);
        }
    }
    return status;
}

/* Dequantizes codes in columns row by row. A code of 3, 5, 6 or 7 bits can end in the next word. */
static int32_t restore_down(const sl_job *job, const sl_plan *plan, uint64_t element, uint64_t count, uint8_t *out,
                            uint8_t *scratch, sl_error *error) {
    const sl_packed *packed = job->packed;
    uint64_t bits = (uint64_t)packed->bits, lines = packed->rows * bits / 32;
    uint8_t *stream = scratch + 8 * SL_VALUES; /* a byte per code, behind two rows of words */
    for (uint64_t some; count > 0; count -= some, element += some, out += 4 * some) {
        codes range = {.row = element / packed->columns, .column = element % packed->columns};
        range.matrix = range.row / packed->rows;
        range.row %= packed->rows;
        range.count = some = sl_min_u64(sl_min_u64(packed->columns - range.column, count), SL_VALUES);
        uint64_t shift = range.row * bits % 32;
        uint64_t begin = (range.matrix * lines + range.row * bits / 32) * packed->row_bytes + 4 * range.column;
        const uint8_t *low, *high = NULL;
        int32_t status = sl_fetch(job, begin, 4 * some, scratch, &low, error);
        if (status == SL_OK && shift + bits > 32)
            status = sl_fetch(job, begin + packed->row_bytes, 4 * some, scratch + 4 * SL_VALUES, &high, error);
        if (status != SL_OK) return status;
        for (size_t i = 0; i < some; i++) {
            uint32_t code = load32(low, i) >> shift;
            if (high != NULL) code |= load32(high, i) << (32 - shift);
            stream[i] = (uint8_t)(code & ((1u << bits) - 1));
        }
        sl_restore_stream(stream, 0, 8, (size_t)some, packed->table, out);
        if (sl_packed_scaled(packed)) {
            const sl_scaling own = scaling_of(packed, plan, &range, (float *)(void *)(scratch + SL_STAGING));
            plan->restore.scale(out, (size_t)some, &own);
        }
        multiply(packed, plan, &range, out);
    }
    return SL_OK;
}

int32_t sl_packed_restore(const sl_job *job, const sl_plan *plan, uint64_t element, uint64_t count, void *values,
                          uint8_t *scratch, sl_error *error) {
    const sl_packed *packed = job->packed;
    uint8_t *out = values;
    if (packed->layout == SL_LAYOUT_MASKED) return restore_masked(job, plan, element, count, out, scratch, error);
    if (packed->layout == SL_LAYOUT_COLUMNS) return restore_down(job, plan, element, count, out, scratch, error);
    while (count > 0) {
        span one = span_of(packed, element, count);
        const uint8_t *bytes;
        int32_t status = sl_fetch(job, one.begin, one.end - one.begin, scratch, &bytes, error);
        if (status != SL_OK) return status;
        codes range = {.matrix = one.matrix, .row = one.row, .column = one.column};
        for (uint64_t left = one.count; left > 0; left -= range.count, out += 4 * range.count) {
            range.count = sl_min_u64(sl_min_u64(packed->columns - range.column, left), SL_VALUES);
            /* An integer, because a row can begin before the fetched bytes and has no address there. */
            uint64_t skipped = row_offset(packed, one.matrix, range.row) - one.begin;
            range.bytes = (const uint8_t *)((uintptr_t)bytes + skipped);
            if (packed->forbidden >= 0) status = check_codes(job, &range, error);
            if (status != SL_OK) return status;
            restore_range(packed, plan, &range, out, scratch);
            range.column += range.count;
            if (range.column == packed->columns) {
                range.column = 0;
                range.row++;
            }
        }
        element += one.count;
        count -= one.count;
    }
    return SL_OK;
}
