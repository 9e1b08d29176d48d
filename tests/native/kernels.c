/* Every kernel on every tier that this machine has against scalar C, bit for bit, and a digest of what scalar C gives,
 * which is the same on every machine (kernels.expected).
 *
 * What IEEE 754 leaves open is which NaN comes of infinity times zero: x86 gives a negative one, others a positive one.
 * It happens where a block holds an infinite scale. Digests of restored blocks therefore take every NaN for the same.
 */
#include <math.h>

#include "encoded.h"
#include "kernels/copy2d.h"
#include "kernels/quant.h"
#include "kernels/stream.h"
#include "platform/platform.h"

/* All 16-bit codes and as many random values, whole blocks of 256. */
#define COUNT ((size_t)131072)
/* Lengths that vector kernels cut into bodies and rests. */
#define LONGEST ((size_t)130)
#define SHIFTS ((size_t)8)
/* Around what kernels may write. */
#define MARGIN ((size_t)64)
#define UNTOUCHED 0xa5

static const char *label(int32_t dtype) { return dtype == SL_Q4_0_ABSMAX ? "Q4_0-absmax" : sl_dtype_get(dtype)->code; }

static bool is_block(int32_t dtype) { return sl_dtype_get(dtype)->bits == 0; }

/* Whether a quantizer tries many scales for each block. */
static bool is_searched(int32_t dtype) {
    return (dtype >= SL_Q2_K && dtype <= SL_Q6_K) || dtype == SL_IQ4_NL || dtype == SL_IQ4_XS;
}

static size_t bytes_of(int32_t dtype, size_t count) { return (size_t)sl_dtype_bytes(sl_dtype_get(dtype), count); }

static void report(const char *kernel, const char *from, const char *to, uint64_t value) {
    printf("%s %s %s %016" PRIx64 "\n", kernel, from, to, value);
}

static bool untouched(const uint8_t *memory, size_t size) {
    for (size_t i = 0; i < size; i++)
        if (memory[i] != UNTOUCHED) return false;
    return true;
}

/* ---- conversions, among them quantizers and restoring of blocks ---- */

/* One NaN for all. */
static void canonical(int32_t dtype, uint8_t *memory, size_t count) {
    uint32_t infinity = dtype == SL_F32 ? 0x7f800000 : dtype == SL_F16 ? 0x7c00 : 0x7f80;
    size_t size = bytes_of(dtype, 1);
    for (size_t i = 0; i < count; i++, memory += size) {
        uint32_t bits = size == 4 ? sl_load_le32(memory) : (uint32_t)(memory[0] | memory[1] << 8);
        if ((bits & (size == 4 ? 0x7fffffff : 0x7fff)) <= infinity) continue;
        memset(memory, 0xff, size - 1);
        memory[size - 1] = 0x7f;
    }
}

/* Lengths and alignments of both sides, and nothing written outside. */
static void check_lengths(int32_t tier, int32_t from, int32_t to, const uint8_t *source, const uint8_t *wanted) {
    size_t unit = (size_t)sl_dtype_get(from)->block, target_unit = (size_t)sl_dtype_get(to)->block;
    if (target_unit > unit) unit = target_unit;
    size_t longest = LONGEST < 2 * unit ? 2 * unit : LONGEST;
    uint8_t *in = allocate(bytes_of(from, longest) + SHIFTS), *out = allocate(bytes_of(to, longest) + 2 * MARGIN);
    for (size_t shift = 0; shift < SHIFTS; shift++)
        for (size_t count = 0; count <= longest; count += unit) {
            size_t first = (shift * 4099 + count * 31) * unit % (COUNT - longest), size = bytes_of(to, count);
            first -= first % unit;
            uint8_t *at = out + MARGIN - shift;
            memset(out, UNTOUCHED, size + 2 * MARGIN);
            memcpy(in + shift, source + bytes_of(from, first), bytes_of(from, count));
            EXPECT(sl_convert(tier, from, to, in + shift, at, count) == SL_OK);
            if (memcmp(at, wanted + bytes_of(to, first), size) != 0 || !untouched(out, MARGIN - shift) ||
                !untouched(at + size, MARGIN + shift))
                FAIL("%s: %s to %s: %zu elements at alignment %zu", sl_tier_name(tier), label(from), label(to), count,
                     shift);
        }
    free(in);
    free(out);
}

/* Other conversions are two of these, through f32. */
static bool is_direct(int32_t from, int32_t to) {
    bool small = sl_dtype_get(from)->kind == SL_KIND_FLOAT && !is_block(from) && sl_dtype_get(from)->bits <= 8;
    return (small && (to == SL_F16 || to == SL_BF16)) || from == SL_F32 || to == SL_F32 || from == SL_F64 ||
           to == SL_F64;
}

static void check_conversion(int32_t from, int32_t to) {
    uint8_t *source = allocate(bytes_of(from, COUNT)), *wanted = allocate(bytes_of(to, COUNT));
    uint8_t *got = allocate(bytes_of(to, COUNT));
    fill(source, from, COUNT, is_block(to));
    EXPECT(sl_convert(SL_TIER_SCALAR, from, to, source, wanted, COUNT) == SL_OK);
    for (int32_t tier = 0; tier < SL_TIER_COUNT; tier++) {
        if (!sl_tier_available(tier)) continue;
        memset(got, UNTOUCHED, bytes_of(to, COUNT));
        EXPECT(sl_convert(tier, from, to, source, got, COUNT) == SL_OK);
        if (memcmp(got, wanted, bytes_of(to, COUNT)) != 0)
            FAIL("%s: %s to %s", sl_tier_name(tier), label(from), label(to));
        if (is_direct(from, to)) check_lengths(tier, from, to, source, wanted);
    }
    if (is_block(to)) {
        size_t blocks = COUNT / (size_t)sl_dtype_get(to)->block;
        report("blocks_finite", label(from), label(to), sl_blocks_finite(to, wanted, blocks));
    }
    if (is_block(from)) canonical(to, wanted, COUNT);
    report("convert", label(from), label(to), digest(DIGEST_START, wanted, bytes_of(to, COUNT)));
    free(source);
    free(wanted);
    free(got);
}

static void check_conversions(void) {
    for (int32_t from = 0; from < SL_DTYPE_LIMIT; from++)
        for (int32_t to = 0; to < SL_DTYPE_LIMIT; to++) {
            if (!sl_convertible(from, to)) continue;
            if (is_block(from) && to != SL_F32 && to != SL_F16 && to != SL_BF16)
                continue;                                    /* others are made of these */
            if (is_searched(to) && from != SL_F32) continue; /* the same, and slow where there are no vectors */
            check_conversion(from, to);
        }
}

/* ---- blocks with importance ---- */

/* Rows of finite values, some of them not whole groups of eight blocks, and zeros among values and importance. */
static void check_weighted(int32_t to) {
    enum { ROWS = 6, MOST = 1536 };
    static const size_t COLUMNS[] = {32, 96, 256, 512, 800, MOST};
    static float values[MOST * ROWS], importance[MOST];
    static uint8_t source[MOST * ROWS * 4], wanted[MOST * ROWS * 2], got[MOST * ROWS * 2];
    uint64_t state = DIGEST_START, seed = 38;
    for (size_t i = 0; i < MOST; i++) importance[i] = i % 11 == 0 ? 0.0f : (float)(random_u64(&seed) >> 40) * 0x1p-12f;
    for (size_t i = 0; i < MOST * ROWS; i++) {
        float value = (float)((int64_t)(random_u64(&seed) >> 40) - (1 << 23)) * 0x1p-23f;
        float square = value * value; /* s390x computes a longer product in double */
        values[i] = i % 7 == 0 || i / 32 % 9 == 0 ? 0.0f : square * value;
        if (i / 32 % 13 == 0) values[i] *= 0x1p-50f;
    }
    for (size_t i = 0; i < MOST * ROWS; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        for (size_t k = 0; k < 4; k++) source[4 * i + k] = (uint8_t)(bits >> 8 * k);
    }
    for (size_t k = 0; k < sizeof COLUMNS / sizeof COLUMNS[0]; k++) {
        if (COLUMNS[k] % (size_t)sl_dtype_get(to)->block != 0) {
            EXPECT(sl_quantize_weighted(SL_TIER_SCALAR, to, source, importance, wanted, 1, COLUMNS[k]) ==
                   SL_E_ARGUMENT);
            continue;
        }
        size_t size = bytes_of(to, COLUMNS[k] * ROWS);
        EXPECT(sl_quantize_weighted(SL_TIER_SCALAR, to, source, importance, wanted, ROWS, COLUMNS[k]) == SL_OK);
        for (int32_t tier = 0; tier < SL_TIER_COUNT; tier++) {
            if (!sl_tier_available(tier)) continue;
            memset(got, UNTOUCHED, sizeof got);
            EXPECT(sl_quantize_weighted(tier, to, source, importance, got, ROWS, COLUMNS[k]) == SL_OK);
            if (memcmp(got, wanted, size) != 0 || !untouched(got + size, sizeof got - size))
                FAIL("%s: %zu columns to %s with importance", sl_tier_name(tier), COLUMNS[k], label(to));
        }
        state = digest(state, wanted, size);
    }
    report("weighted", "F32", label(to), state);
}

static void check_all_weighted(void) {
    static const int32_t TYPES[] = {SL_Q4_0, SL_Q4_1, SL_Q5_0, SL_Q5_1,   SL_Q2_K,  SL_Q3_K,
                                    SL_Q4_K, SL_Q5_K, SL_Q6_K, SL_IQ4_NL, SL_IQ4_XS};
    for (size_t k = 0; k < sizeof TYPES / sizeof TYPES[0]; k++) check_weighted(TYPES[k]);
    EXPECT(sl_quantize_weighted(SL_TIER_SCALAR, SL_Q8_0, NULL, NULL, NULL, 0, 32) == SL_E_ARGUMENT);
}

/* ---- int8 ---- */

static void check_absmax(int32_t from, const uint8_t *source) {
    uint64_t state = DIGEST_START;
    size_t element = bytes_of(from, 1);
    for (size_t count = 0; count <= LONGEST; count++)
        for (size_t i = 0; i < 40; i++) {
            const uint8_t *at = source + (i * 977 + count) * element + i % SHIFTS;
            uint32_t wanted = 0, got = 1;
            EXPECT(sl_absmax(SL_TIER_SCALAR, from, at, count, &wanted) == SL_OK);
            for (int32_t tier = 0; tier < SL_TIER_COUNT; tier++) {
                if (!sl_tier_available(tier)) continue;
                EXPECT(sl_absmax(tier, from, at, count, &got) == SL_OK);
                if (got != wanted) FAIL("%s: absmax of %zu %s", sl_tier_name(tier), count, label(from));
            }
            uint8_t bits[4] = {(uint8_t)wanted, (uint8_t)(wanted >> 8), (uint8_t)(wanted >> 16),
                               (uint8_t)(wanted >> 24)};
            state = digest(state, bits, sizeof bits);
        }
    report("absmax", label(from), "-", state);
}

static void check_absmax_each(const uint8_t *source) {
    uint64_t state = DIGEST_START;
    uint32_t wanted[LONGEST], got[LONGEST];
    for (size_t count = 0; count <= LONGEST; count++)
        for (size_t shift = 0; shift < SHIFTS; shift++) {
            memset(wanted, 0, sizeof wanted);
            for (size_t row = 0; row < 3; row++)
                sl_absmax_each(SL_TIER_SCALAR, source + 400 * row + shift, wanted, count);
            for (int32_t tier = 0; tier < SL_TIER_COUNT; tier++) {
                if (!sl_tier_available(tier)) continue;
                memset(got, 0, sizeof got);
                for (size_t row = 0; row < 3; row++) sl_absmax_each(tier, source + 400 * row + shift, got, count);
                if (memcmp(got, wanted, sizeof got) != 0) FAIL("%s: absmax of each of %zu", sl_tier_name(tier), count);
            }
            for (size_t i = 0; i < count; i++) {
                uint64_t bits = wanted[i];
                uint8_t bytes[8];
                sl_store_le64(bytes, bits);
                state = digest(state, bytes, sizeof bytes);
            }
        }
    report("absmax_each", "F32", "-", state);
}

static void check_int8(const uint8_t *source, const float *factors, int32_t each) {
    uint64_t codes_state = DIGEST_START;
    int8_t wanted[LONGEST], got[LONGEST];
    for (size_t count = 0; count <= LONGEST; count++)
        for (size_t k = 0; k < 24; k++) {
            const uint8_t *at = source + 4 * (k * 3001 + count) + k % SHIFTS;
            const float *by = factors + k;
            EXPECT(sl_to_int8(SL_TIER_SCALAR, at, wanted, count, by, each) == SL_OK);
            for (int32_t tier = 0; tier < SL_TIER_COUNT; tier++) {
                if (!sl_tier_available(tier)) continue;
                memset(got, UNTOUCHED, sizeof got);
                EXPECT(sl_to_int8(tier, at, got, count, by, each) == SL_OK);
                if (memcmp(got, wanted, count) != 0 || !untouched((uint8_t *)got + count, LONGEST - count))
                    FAIL("%s: %zu to int8, each %d", sl_tier_name(tier), count, each);
            }
            codes_state = digest(codes_state, wanted, count);
        }
    report("int8", "F32", each ? "I8-each" : "I8", codes_state);
}

static void check_quantization(void) {
    uint8_t *source = allocate(bytes_of(SL_F32, COUNT));
    fill(source, SL_F16, COUNT, false);
    check_absmax(SL_F16, source);
    fill(source, SL_BF16, COUNT, false);
    check_absmax(SL_BF16, source);
    fill(source, SL_F32, COUNT, false);
    check_absmax(SL_F32, source);
    check_absmax_each(source);
    float factors[LONGEST + 24];
    for (size_t i = 0; i < LONGEST + 24; i++)
        factors[i] = (float)(i % 37 + 1) * (i % 3 == 0 ? 0.25f : i % 3 == 1 ? 13.0f : 0x1p-9f);
    check_int8(source, factors, 0);
    check_int8(source, factors, 1);
    free(source);
}

/* ---- statistics ---- */

static void run_job(int32_t tier, const sl_job *job) {
    sl_cursor cursor = {0};
    sl_error error;
    EXPECT(sl_jobs_run(job, 1, tier, 1, 0, &cursor, &error) == SL_OK && cursor.finished);
}

/* What a job of statistics writes for up to SL_STATS_SEGMENT elements. */
typedef struct summary {
    uint64_t bins[SL_HISTOGRAM_BINS];
    sl_stats stats;
} summary;

static uint64_t digest_of_summary(uint64_t state, const summary *all) {
    const sl_stats *s = &all->stats;
    const double reals[] = {s->min, s->max, s->mean, s->rest, s->squares};
    const uint64_t counts[] = {
        s->finite, s->nan, s->infinite, s->zeros, s->first_nan, s->first_infinite, (uint64_t)s->exponent};
    const size_t sizes[] = {SL_HISTOGRAM_BINS, sizeof counts / sizeof counts[0], sizeof reals / sizeof reals[0]};
    const void *const fields[] = {all->bins, counts, reals};
    for (size_t part = 0; part < 3; part++)
        for (size_t i = 0; i < sizes[part]; i++) {
            uint64_t bits;
            uint8_t bytes[8];
            memcpy(&bits, (const uint8_t *)fields[part] + 8 * i, sizeof bits);
            sl_store_le64(bytes, bits);
            state = digest(state, bytes, sizeof bytes);
        }
    return state;
}

static void summarize(int32_t tier, int32_t from, uint8_t *source, size_t count, summary *all) {
    sl_job job = {.op = SL_OP_HISTOGRAM, .from = from, .to = from, .file = SL_MEMORY, .memory = all};
    job.offset = (uint64_t)(uintptr_t)source;
    job.size = bytes_of(from, count);
    memset(all, 0, sizeof *all);
    run_job(tier, &job);
}

static void check_statistics(int32_t from) {
    static const size_t COUNTS[] = {1, 2, 15, 16, 17, 33, 130, 4095, 4096, 4097, 9000, COUNT};
    uint64_t state = DIGEST_START;
    size_t unit = (size_t)sl_dtype_get(from)->block;
    uint8_t *source = allocate(bytes_of(from, COUNT) + SHIFTS);
    summary wanted, got;
    for (int blocks = 0; blocks < 2; blocks++) /* anything, and what weights are like */
        for (size_t k = 0; k < sizeof COUNTS / sizeof COUNTS[0]; k++) {
            size_t count = (COUNTS[k] + unit - 1) / unit * unit, shift = k % SHIFTS;
            fill(source + shift, from, COUNT, blocks != 0);
            summarize(SL_TIER_SCALAR, from, source + shift, count, &wanted);
            for (int32_t tier = 0; tier < SL_TIER_COUNT; tier++) {
                if (!sl_tier_available(tier)) continue;
                summarize(tier, from, source + shift, count, &got);
                if (memcmp(&got, &wanted, sizeof got) != 0)
                    FAIL("%s: statistics of %zu %s", sl_tier_name(tier), count, label(from));
            }
            state = digest_of_summary(state, &wanted);
        }
    report("stats", label(from), "-", state);
    free(source);
}

static void check_all_statistics(void) {
    check_statistics(SL_F32);
    for (int32_t from = 0; from < SL_DTYPE_LIMIT; from++)
        if (from != SL_F32 && sl_convertible(from, SL_F32)) check_statistics(from);
}

/* ---- differences ---- */

static uint64_t digest_of_difference(uint64_t state, const sl_difference *all) {
    _Static_assert(sizeof *all % 8 == 0, "fields of 64 bits");
    for (size_t i = 0; i < sizeof *all / 8; i++) {
        uint64_t bits;
        uint8_t bytes[8];
        memcpy(&bits, (const uint8_t *)all + 8 * i, sizeof bits);
        sl_store_le64(bytes, bits);
        state = digest(state, bytes, sizeof bytes);
    }
    return state;
}

static void check_differences(void) {
    static const size_t COUNTS[] = {0, 1, 7, 8, 9, 1023, 1024, 1025, 5000};
    static double a[5000], b[5000];
    static float x[5000], y[5000];
    uint64_t state = DIGEST_START;
    for (size_t i = 0; i < 5000; i++) {
        x[i] = (float)((int)(i * 7919 % 2003) - 1001) * 0x1p-9f;
        y[i] = i % 3 == 0 ? x[i] : x[i] * 1.25f;
        a[i] = (double)x[i] / 3;
        b[i] = (double)y[i] / 3;
    }
    for (int special = 0; special < 2; special++) {
        for (size_t k = 0; k < 2 * sizeof COUNTS / sizeof COUNTS[0]; k++) {
            int32_t dtype = k % 2 == 0 ? SL_F32 : SL_F64;
            const void *one = k % 2 == 0 ? (const void *)x : a, *other = k % 2 == 0 ? (const void *)y : b;
            uint64_t count = COUNTS[k / 2];
            sl_difference wanted, got;
            EXPECT(sl_differ(SL_TIER_SCALAR, dtype, one, other, &count, 1, &wanted) == SL_OK);
            for (int32_t tier = 0; tier < SL_TIER_COUNT; tier++) {
                if (!sl_tier_available(tier)) continue;
                EXPECT(sl_differ(tier, dtype, one, other, &count, 1, &got) == SL_OK);
                if (memcmp(&got, &wanted, sizeof got) != 0)
                    FAIL("%s: differences of %zu %s", sl_tier_name(tier), (size_t)count, label(dtype));
            }
            state = digest_of_difference(state, &wanted);
        }
        x[8] = (float)INFINITY;
        y[1000] = (float)NAN;
        a[0] = b[0] = (double)NAN;
    }
    report("differences", "F32", "F64", state);
}

/* ---- packed codes ---- */

/* A layout with 2^bits numbers or of blocks, and scales in blocks of all kinds of lengths. */
typedef struct restored {
    const char *name;
    int32_t layout, bits, high_first, transpose;
    uint64_t row_step, column_step; /* rows and columns are multiples of these */
    int32_t blocks;                 /* the type of blocks, or of values in a mask */
} restored;

/* Longer than a tile on both sides, and than what a kernel takes at a time. */
#define MOST_ROWS ((size_t)352)
#define MOST_COLUMNS ((size_t)2100)

static float random_float(uint64_t *state) {
    return (float)((int64_t)(random_u64(state) >> 40) - (1 << 23)) * 0x1p-20f;
}

static sl_packed packed_of(const restored *how, uint64_t rows, uint64_t columns) {
    sl_packed packed = {.layout = how->layout, .bits = how->bits, .high_first = how->high_first, .forbidden = -1};
    uint64_t bits = (uint64_t)how->bits, bytes = (columns * bits + 7) / 8, stored = rows;
    if (how->layout == SL_LAYOUT_COLUMNS) {
        stored = rows * bits / 32;
        bytes = columns * 4;
    } else if (how->layout == SL_LAYOUT_PLANES) {
        stored = rows * bits / 8;
        bytes = columns;
    } else if (how->layout == SL_LAYOUT_BLOCKS) {
        bytes = sl_dtype_bytes(sl_dtype_get(how->blocks), columns);
        packed.codes = how->blocks;
    } else if (how->layout == SL_LAYOUT_MASKED)
        packed.codes = how->blocks;
    packed.transpose = how->transpose;
    packed.matrices = 1;
    packed.rows = rows;
    packed.columns = columns;
    packed.row_bytes = bytes;
    packed.size = stored * bytes;
    return packed;
}

/* Random places, more of them in every third row, and where the values of each row begin. */
static void place(sl_packed *packed, uint64_t *seed) {
    static uint8_t mask[MOST_ROWS * (MOST_COLUMNS / 8 + 1)];
    static uint64_t starts[MOST_ROWS + 1];
    uint64_t at = 0, width = (packed->columns + 7) / 8;
    for (uint64_t row = 0; row < packed->rows; row++) {
        starts[row] = at;
        for (uint64_t i = 0; i < width; i++)
            mask[row * width + i] = (uint8_t)(random_u64(seed) >> 56 | (row % 3 == 1 ? random_u64(seed) >> 56 : 0));
        for (uint64_t i = 0; i < packed->columns; i++) at += (uint64_t)mask[row * width + i / 8] >> i % 8 & 1;
    }
    starts[packed->rows] = at;
    packed->mask = mask;
    packed->starts = starts;
    packed->mask_columns = packed->columns;
}

/* The values on every tier with `what` of the scales: 0 none, 1 scales in blocks, 2 also zeros, 3 all in groups, and
 * factors, 4 the same of numbers that follow each other. */
static uint64_t check_restored(uint64_t state, const restored *how, uint64_t rows, uint64_t columns, unsigned what) {
    static float table[256], grids[3][MOST_ROWS * MOST_COLUMNS], factors[MOST_COLUMNS];
    static uint32_t groups[MOST_COLUMNS];
    uint64_t seed = rows * 4099 + columns * 4 + what, shift = seed % SHIFTS;
    sl_packed packed = packed_of(how, rows, columns);
    size_t size = (size_t)(rows * columns * 4);
    uint8_t *codes = allocate(packed.size + SHIFTS), *wanted = allocate(size), *got = allocate(size + 2 * MARGIN);
    for (uint64_t i = 0; i < packed.size; i++) codes[shift + i] = (uint8_t)(random_u64(&seed) >> 56);
    for (size_t i = 0; i < 256; i++) table[i] = what == 4 ? (float)i - 8 : random_float(&seed);
    bool by_row = how->layout == SL_LAYOUT_COLUMNS || (how->layout == SL_LAYOUT_WORDS && how->transpose != 0);
    packed.table = how->layout >= SL_LAYOUT_BLOCKS ? NULL : table;
    if (how->layout == SL_LAYOUT_MASKED) place(&packed, &seed);
    packed.row_block = by_row ? 32 : 1 + seed % 3;
    packed.column_block = by_row ? 1 : 1 + seed % 70;
    packed.grid_rows = (rows - 1) / packed.row_block + 1;
    packed.grid_columns = (columns - 1) / packed.column_block + 1;
    for (size_t i = 0; i < packed.grid_rows * packed.grid_columns; i++)
        for (size_t k = 0; k < 3; k++) grids[k][i] = random_float(&seed);
    for (size_t i = 0; i < MOST_COLUMNS; i++) {
        factors[i] = random_float(&seed);
        groups[i] = (uint32_t)(random_u64(&seed) % (by_row ? packed.grid_rows : packed.grid_columns));
    }
    packed.scales = what >= 1 ? grids[0] : NULL;
    packed.zeros = what >= 2 ? grids[1] : NULL;
    packed.biases = what >= 3 ? grids[2] : NULL;
    packed.groups = what >= 3 ? groups : NULL;
    packed.factors = what >= 3 ? factors : NULL;
    sl_job job = {.op = SL_OP_RESTORE, .from = SL_F32, .to = SL_F32, .file = SL_MEMORY, .size = size};
    job.offset = (uint64_t)(uintptr_t)(codes + shift);
    job.packed = &packed;
    for (int32_t tier = 0; tier < SL_TIER_COUNT; tier++) {
        if (!sl_tier_available(tier)) continue;
        memset(got, UNTOUCHED, size + 2 * MARGIN);
        job.memory = got + MARGIN - shift;
        run_job(tier, &job);
        if (tier == SL_TIER_SCALAR) memcpy(wanted, job.memory, size);
        if (memcmp(job.memory, wanted, size) != 0 || !untouched(got, MARGIN - shift) ||
            !untouched(got + MARGIN - shift + size, MARGIN + shift))
            FAIL("%s: %s, %" PRIu64 " x %" PRIu64 ", scales %u", sl_tier_name(tier), how->name, rows, columns, what);
    }
    state = digest(state, wanted, size);
    free(codes);
    free(wanted);
    free(got);
    return state;
}

/* Grids as they are stored, and the same in f32. */
static struct stored_grids {
    float f32[3][MOST_ROWS * MOST_COLUMNS], zero_table[16], shared;
    uint8_t numbers[2 * MOST_ROWS * MOST_COLUMNS + SHIFTS], zeros[MOST_ROWS * (MOST_COLUMNS + 8) + SHIFTS];
} stored;

static void fill_stored(const sl_packed *packed, int32_t dtype, uint64_t shift, uint64_t *seed) {
    static const uint64_t PERMUTED[] = {0, 4, 1, 5, 2, 6, 3, 7};
    uint64_t elements = packed->grid_rows * packed->grid_columns, words = (packed->grid_columns + 7) / 8;
    uint64_t zeros = shift + 4 * (packed->grid_rows * words + packed->grid_columns);
    for (size_t i = 0; i < 16; i++) stored.zero_table[i] = random_float(seed);
    for (size_t i = 0; i < shift + 2 * elements; i++) stored.numbers[i] = (uint8_t)(random_u64(seed) >> 56) & 0x3b;
    for (size_t i = 0; i < zeros; i++) stored.zeros[i] = (uint8_t)(random_u64(seed) >> 56);
    EXPECT(sl_convert(0, dtype, SL_F32, stored.numbers + shift, stored.f32[0], (size_t)elements) == SL_OK);
    EXPECT(sl_convert(0, SL_BF16, SL_F32, stored.numbers + shift, stored.f32[2], (size_t)elements) == SL_OK);
    for (uint64_t i = 0; i < elements; i++) {
        uint64_t row = i / packed->grid_columns, column = i % packed->grid_columns, word = row * words + column / 8;
        uint64_t nibble = packed->zero_layout == SL_LAYOUT_WORDS ? PERMUTED[column % 8] : column % 8;
        if (packed->zero_layout == SL_LAYOUT_COLUMNS) {
            word = row / 8 * packed->grid_columns + column;
            nibble = row % 8;
        }
        stored.f32[1][i] = stored.zero_table[sl_load_le32(stored.zeros + shift + 4 * word) >> 4 * nibble & 15];
        for (size_t k = 0; k < 3; k += 2) { /* conversions store in file byte order */
            uint32_t bits = sl_load_le32((const uint8_t *)&stored.f32[k][i]);
            memcpy(&stored.f32[k][i], &bits, sizeof bits);
        }
        if (dtype == SL_BF16) stored.f32[0][i] /= stored.shared;
        if (dtype != SL_BF16 && dtype != SL_F16) stored.f32[0][i] *= stored.shared;
    }
}

/* Grids as they are stored give the values of the same grids in f32, on every tier. */
static void check_stored(const restored *how, int32_t zero_layout, uint64_t rows, uint64_t columns, bool grouped) {
    static float table[256];
    static uint32_t groups[MOST_ROWS];
    static const int32_t DTYPES[] = {SL_F16, SL_BF16, SL_F8_E4M3, SL_F8_E5M2, SL_F8_E8M0};
    uint64_t seed = rows * 4099 + columns * 4 + (uint64_t)zero_layout, shift = seed % SHIFTS;
    bool by_row = how->layout == SL_LAYOUT_COLUMNS || (how->layout == SL_LAYOUT_WORDS && how->transpose != 0);
    int32_t dtype = DTYPES[(rows + columns) % 5];
    sl_packed packed = packed_of(how, rows, columns);
    size_t size = (size_t)(rows * columns * 4);
    uint8_t *codes = allocate(packed.size), *wanted = allocate(size), *got = allocate(size);
    for (uint64_t i = 0; i < packed.size; i++) codes[i] = (uint8_t)(random_u64(&seed) >> 56);
    for (size_t i = 0; i < 256; i++) table[i] = (float)i - 8;
    packed.table = table;
    packed.row_block = by_row ? 32 : 1 + seed % 3;
    packed.column_block = by_row ? 1 : 1 + seed % 33;
    packed.grid_rows = (rows - 1) / packed.row_block + 1;
    packed.grid_columns = (columns - 1) / packed.column_block + 1;
    packed.zero_layout = zero_layout;
    packed.zero_bytes = zero_layout == SL_LAYOUT_COLUMNS ? packed.grid_columns * 4 : (packed.grid_columns + 7) / 8 * 4;
    for (size_t i = 0; i < rows; i++) groups[i] = (uint32_t)(random_u64(&seed) % packed.grid_rows);
    if (grouped) packed.groups = groups;
    stored.shared = 0.37f;
    fill_stored(&packed, dtype, shift, &seed);
    packed.scales = stored.f32[0];
    packed.zeros = stored.f32[1];
    packed.biases = stored.f32[2];
    sl_job job = {.op = SL_OP_RESTORE, .from = SL_F32, .to = SL_F32, .file = SL_MEMORY, .size = size};
    job.offset = (uint64_t)(uintptr_t)codes;
    job.packed = &packed;
    job.memory = wanted;
    run_job(SL_TIER_SCALAR, &job);
    packed.scales = packed.zeros = packed.biases = NULL;
    packed.stored_scales = packed.stored_biases = stored.numbers + shift;
    packed.stored_zeros = stored.zeros + shift;
    packed.zero_table = stored.zero_table;
    packed.scale_dtype = dtype;
    packed.bias_dtype = SL_BF16;
    packed.shared = dtype == SL_F16 ? NULL : &stored.shared;
    packed.shared_divides = dtype == SL_BF16;
    job.memory = got;
    for (int32_t tier = 0; tier < SL_TIER_COUNT; tier++) {
        if (!sl_tier_available(tier)) continue;
        memset(got, UNTOUCHED, size);
        run_job(tier, &job);
        if (memcmp(got, wanted, size) != 0)
            FAIL("%s: %s, %" PRIu64 " x %" PRIu64 ", stored scales", sl_tier_name(tier), how->name, rows, columns);
    }
    free(codes);
    free(wanted);
    free(got);
}

static void check_all_stored(void) {
    static const restored LAYOUTS[] = {
        {"rows", SL_LAYOUT_ROWS, 4, 0, 0, 1, 1, 0},         {"stream", SL_LAYOUT_ROWS, 3, 0, 0, 1, 1, 0},
        {"transposed", SL_LAYOUT_ROWS, 4, 0, 1, 1, 1, 0},   {"transposed_3", SL_LAYOUT_ROWS, 3, 0, 1, 1, 1, 0},
        {"columns_4", SL_LAYOUT_COLUMNS, 4, 0, 1, 8, 1, 0}, {"columns_3", SL_LAYOUT_COLUMNS, 3, 0, 1, 32, 1, 0},
        {"words", SL_LAYOUT_WORDS, 4, 0, 1, 1, 8, 0},       {"planes_2", SL_LAYOUT_PLANES, 2, 0, 0, 4, 1, 0},
    };
    static const int32_t ZEROS[] = {SL_LAYOUT_ROWS, SL_LAYOUT_COLUMNS, SL_LAYOUT_WORDS};
    for (size_t k = 0; k < sizeof LAYOUTS / sizeof *LAYOUTS; k++) {
        const restored *how = &LAYOUTS[k];
        bool by_row = how->layout == SL_LAYOUT_COLUMNS || (how->layout == SL_LAYOUT_WORDS && how->transpose != 0);
        for (size_t i = 0; i < 3; i++)
            for (uint64_t rows = how->row_step; rows <= MOST_ROWS; rows = 3 * rows + how->row_step)
                for (uint64_t columns = how->column_step; columns <= 700; columns = 2 * columns + how->column_step)
                    for (int grouped = 0; grouped <= by_row; grouped++)
                        check_stored(how, ZEROS[i], rows, columns, grouped != 0);
    }
}

static void check_all_restored(void) {
    static const restored LAYOUTS[] = {
        {"rows", SL_LAYOUT_ROWS, 4, 0, 0, 1, 1, 0},
        {"high_first", SL_LAYOUT_ROWS, 4, 1, 0, 1, 1, 0},
        {"stream", SL_LAYOUT_ROWS, 3, 0, 0, 1, 1, 0},
        {"bytes", SL_LAYOUT_ROWS, 8, 0, 0, 1, 1, 0},
        {"transposed", SL_LAYOUT_ROWS, 4, 0, 1, 1, 1, 0},
        {"transposed_bytes", SL_LAYOUT_ROWS, 8, 0, 1, 1, 1, 0},
        {"columns_4", SL_LAYOUT_COLUMNS, 4, 0, 1, 8, 1, 0},
        {"columns_3", SL_LAYOUT_COLUMNS, 3, 0, 1, 32, 1, 0},
        {"columns_2", SL_LAYOUT_COLUMNS, 2, 0, 1, 16, 1, 0},
        {"columns_8", SL_LAYOUT_COLUMNS, 8, 0, 1, 4, 1, 0},
        {"words", SL_LAYOUT_WORDS, 4, 0, 1, 1, 8, 0},
        {"words_in_order", SL_LAYOUT_WORDS, 4, 0, 0, 1, 8, 0},
        {"planes_2", SL_LAYOUT_PLANES, 2, 0, 0, 4, 1, 0},
        {"planes_4", SL_LAYOUT_PLANES, 4, 1, 0, 2, 1, 0},
        {"blocks", SL_LAYOUT_BLOCKS, 4, 0, 0, 1, 64, SL_NVFP4},
        {"ternary", SL_LAYOUT_BLOCKS, 2, 0, 0, 1, 128, SL_I2_S},
        {"masked", SL_LAYOUT_MASKED, 8, 0, 0, 1, 1, SL_I8},
    };
    for (size_t k = 0; k < sizeof LAYOUTS / sizeof *LAYOUTS; k++) {
        const restored *how = &LAYOUTS[k];
        uint64_t state = DIGEST_START;
        for (unsigned what = 0; what < (how->layout == SL_LAYOUT_COLUMNS ? 5 : 4); what++) {
            for (uint64_t columns = 1; columns <= LONGEST; columns++)
                if (columns % how->column_step == 0)
                    state = check_restored(state, how, how->row_step * (1 + columns % 3), columns, what);
            for (uint64_t rows = how->row_step; rows <= MOST_ROWS; rows += rows < LONGEST ? how->row_step : 32)
                state = check_restored(state, how, rows, how->column_step * (1 + rows % 5), what);
            state = check_restored(state, how, MOST_ROWS - MOST_ROWS % how->row_step,
                                   how->column_step > 72 ? how->column_step : 72 - 72 % how->column_step, what);
            state = check_restored(state, how, how->row_step, MOST_COLUMNS - MOST_COLUMNS % how->column_step, what);
        }
        report("restore", how->name, "F32", state);
    }
}

/* ---- codes of other engines ---- */

/* What a tier makes of a matrix, with margins around each part. */
typedef struct parts {
    uint8_t *codes, *scale_codes, *zeros, *scales, *biases;
    int32_t status;
    uint64_t position;
} parts;

static uint8_t *margins(size_t size) {
    uint8_t *memory = allocate(size + 2 * MARGIN);
    memset(memory, UNTOUCHED, size + 2 * MARGIN);
    return memory;
}

static parts encode_on(int32_t tier, sl_encoding job, size_t codes, size_t blocks) {
    parts all = {margins(codes), margins(blocks), margins(blocks), margins(4 * blocks), margins(4 * blocks), 0, 0};
    job.codes = all.codes + MARGIN;
    job.scale_codes = all.scale_codes + MARGIN;
    job.zeros = (int8_t *)(all.zeros + MARGIN);
    job.scales = (float *)(void *)(all.scales + MARGIN);
    job.biases = (float *)(void *)(all.biases + MARGIN);
    all.status = sl_encode(tier, &job, &all.position);
    return all;
}

static void release(parts *all) {
    free(all->codes);
    free(all->scale_codes);
    free(all->zeros);
    free(all->scales);
    free(all->biases);
}

static uint64_t digest_of_floats(uint64_t state, const uint8_t *memory, size_t count) {
    uint8_t bytes[4];
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, memory + MARGIN + 4 * i, sizeof bits);
        store_le32(bytes, bits);
        state = digest(state, bytes, sizeof bytes);
    }
    return state;
}

static uint64_t check_encoded(uint64_t state, const encoded *how, int32_t from, uint64_t columns, int kind) {
    uint64_t rows = how->row_block > 1 ? 37 : 3, shift = columns % SHIFTS;
    size_t size = (size_t)(rows * columns) * encoded_item(from);
    uint8_t *weights = allocate(size + SHIFTS);
    fill_encoded(weights + shift, from, rows * columns, kind, columns);
    sl_encoding job = encoding_of(how, from, rows, columns);
    job.weights = weights + shift;
    size_t codes = (size_t)(rows * job.row_bytes), blocks = (size_t)blocks_of(&job);
    parts wanted = encode_on(SL_TIER_SCALAR, job, codes, blocks);
    EXPECT(wanted.status == SL_OK || (wanted.status == SL_E_RANGE && kind != USUAL));
    EXPECT(kind != WITH_INFINITY || wanted.status == SL_E_RANGE);
    EXPECT(untouched(wanted.codes, MARGIN) && untouched(wanted.codes + MARGIN + codes, MARGIN));
    for (int32_t tier = 0; tier < SL_TIER_COUNT; tier++) {
        if (!sl_tier_available(tier)) continue;
        parts got = encode_on(tier, job, codes, blocks);
        if (got.status != wanted.status || got.position != wanted.position ||
            memcmp(got.codes, wanted.codes, codes + 2 * MARGIN) != 0 ||
            memcmp(got.scale_codes, wanted.scale_codes, blocks + 2 * MARGIN) != 0 ||
            memcmp(got.zeros, wanted.zeros, blocks + 2 * MARGIN) != 0 ||
            memcmp(got.scales, wanted.scales, 4 * blocks + 2 * MARGIN) != 0 ||
            memcmp(got.biases, wanted.biases, 4 * blocks + 2 * MARGIN) != 0)
            FAIL("%s: %s of %s, %" PRIu64 " columns, kind %d", sl_tier_name(tier), how->name, label(from), columns,
                 kind);
        release(&got);
    }
    state = (state ^ (uint64_t)wanted.status ^ wanted.position) * UINT64_C(0x100000001b3);
    state = digest(state, wanted.codes + MARGIN, codes);
    state = digest(state, wanted.scale_codes + MARGIN, blocks);
    state = digest(state, wanted.zeros + MARGIN, blocks);
    state = digest_of_floats(state, wanted.scales, blocks);
    state = digest_of_floats(state, wanted.biases, blocks);
    release(&wanted);
    free(weights);
    return state;
}

static void check_all_encoded(void) {
    static const int32_t DTYPES[] = {SL_F32, SL_BF16, SL_F16};
    for (size_t k = 0; k < COUNT_OF(ENCODED); k++)
        for (size_t d = 0; d < COUNT_OF(DTYPES); d++) {
            uint64_t state = DIGEST_START;
            for (size_t i = 0; i < COUNT_OF(ENCODED_COLUMNS); i++)
                for (int kind = 0; kind < ENCODED_KINDS && is_encodable(&ENCODED[k], ENCODED_COLUMNS[i]); kind++)
                    state = check_encoded(state, &ENCODED[k], DTYPES[d], ENCODED_COLUMNS[i], kind);
            report("encode", label(DTYPES[d]), ENCODED[k].name, state);
        }
}

/* ---- strided and transposed copies ---- */

/* A plane of rows * columns within `size` bytes of memory: in C or Fortran order, with gaps, forwards or backwards. */
static sl_plane plane_in(uint8_t *memory, size_t element, size_t rows, size_t columns, unsigned how) {
    size_t gap = how & 4 ? 3 * element : 0;
    int64_t step = (int64_t)element;
    sl_plane plane = {memory, (int64_t)(columns * element + gap), step, false};
    if (how & 1) plane = (sl_plane){memory, step, (int64_t)(rows * element + gap), false};
    if (how & 2) {
        plane.memory += (int64_t)(rows - 1) * plane.row + (int64_t)(columns - 1) * plane.column;
        plane.row = -plane.row;
        plane.column = -plane.column;
    }
    return plane;
}

static uint64_t check_copy(uint64_t state, size_t element, size_t rows, size_t columns, const uint8_t *source) {
    size_t size = (rows + 3) * (columns + 3) * element;
    uint8_t *in = allocate(size + SHIFTS), *wanted = allocate(size + SHIFTS), *got = allocate(size + SHIFTS);
    for (unsigned how = 0; how < 64; how++) {
        size_t shift = how % SHIFTS;
        memcpy(in, source, size + SHIFTS);
        memset(wanted, UNTOUCHED, size + SHIFTS);
        sl_plane from = plane_in(in + shift, element, rows, columns, how & 7);
        sl_plane to = plane_in(wanted + shift, element, rows, columns, how >> 3);
        for (size_t r = 0; r < rows; r++)
            for (size_t c = 0; c < columns; c++)
                memcpy(to.memory + (int64_t)r * to.row + (int64_t)c * to.column,
                       from.memory + (int64_t)r * from.row + (int64_t)c * from.column, element);
        to.memory += got - wanted;
        for (int streams = 0; streams < 2; streams++) {
            memset(got, UNTOUCHED, size + SHIFTS);
            to.streams = streams != 0;
            sl_copy_2d(element, rows, columns, from, to);
            sl_stream_end();
            if (memcmp(got, wanted, size + SHIFTS) != 0)
                FAIL("copy of %zu x %zu x %zu bytes, layouts %u", rows, columns, element, how);
        }
        state = digest(state, got, size);
    }
    free(in);
    free(wanted);
    free(got);
    return state;
}

static void check_copies(void) {
    static const size_t SIDES[] = {1, 2, 3, 7, 8, 15, 16, 17, 24, 33, 64, 131};
    const size_t sides = sizeof SIDES / sizeof SIDES[0];
    uint8_t *source = allocate(144 * 144 * 8);
    fill(source, SL_F64, 144 * 144, false);
    for (size_t element = 1; element <= 8; element *= 2) {
        uint64_t state = DIGEST_START;
        for (size_t r = 0; r < sides; r++)
            for (size_t c = 0; c < sides; c++) state = check_copy(state, element, SIDES[r], SIDES[c], source);
        char bytes[2] = {(char)('0' + element), 0};
        report("copy2d", bytes, "-", state);
    }
    free(source);
}

/* ---- stores past the cache ---- */

/* Lengths around cache lines at every alignment. */
static void check_streams(void) {
    static uint8_t source[400], target[sizeof source + 2 * MARGIN];
    uint64_t seed = 43;
    for (size_t i = 0; i < sizeof source; i++) source[i] = (uint8_t)(random_u64(&seed) >> 56);
    for (size_t shift = 0; shift < MARGIN; shift++)
        for (size_t size = 0; size + shift <= sizeof source; size += 1 + size / 9) {
            uint8_t *at = target + MARGIN - shift;
            memset(target, UNTOUCHED, sizeof target);
            sl_stream_copy(at, source + shift, size);
            sl_stream_end();
            EXPECT(memcmp(at, source + shift, size) == 0 && untouched(target, MARGIN - shift) &&
                   untouched(at + size, MARGIN + shift));
        }
}

/* Only memory that has been written to is present. */
static void check_presence(void) {
    const uint64_t size = (uint64_t)32 << 20;
    uint8_t *memory = sl_memory_alloc(size);
    EXPECT(memory != NULL);
    if (memory == NULL) return;
    EXPECT(!sl_platform_present(memory, size) && !sl_stream_pays(memory, size, 1));
    memset(memory, 1, (size_t)size / 2);
    EXPECT(!sl_platform_present(memory, size));
    memset(memory, 1, (size_t)size);
#if defined(__linux__)
    EXPECT(sl_platform_present(memory, size) && sl_platform_present(memory + 1, size - 1));
#endif
    EXPECT(!sl_platform_present(memory, 0) && !sl_stream_pays(memory, 1 << 20, SL_STREAM_FROM));
    sl_memory_free(memory, size);
}

/* ---- merges ---- */

enum { MERGE_ROWS = 19, MERGE_COLUMNS = 1100, MERGE_RANK = 17 };

static float near_one(uint64_t *seed) { return (float)((int64_t)(random_u64(seed) >> 40) - (1 << 23)) * 0x1p-23f; }

/* Matrices of columns that fill panels and tiles, and others, with two products. */
static void check_merge(int32_t from, int32_t to, const float *left, const float *right) {
    static const size_t COLUMNS[] = {1, 31, 32, 33, 96, 512, 544, MERGE_COLUMNS};
    enum { MOST = MERGE_ROWS * MERGE_COLUMNS };
    static uint8_t values[MOST * 4], source[MOST * 4], wanted[MOST * 8], got[MOST * 8];
    uint64_t state = DIGEST_START, seed = 42;
    for (size_t i = 0; i < MOST; i++) {
        float value = near_one(&seed);
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        for (size_t k = 0; k < 4; k++) values[4 * i + k] = (uint8_t)(bits >> 8 * k);
    }
    for (size_t k = 0; k < sizeof COLUMNS / sizeof COLUMNS[0]; k++) {
        size_t columns = COLUMNS[k], count = MERGE_ROWS * columns;
        if (columns % (size_t)sl_dtype_get(from)->block != 0) continue;
        const sl_update updates[] = {
            {MERGE_RANK, left, right, 0.75f, 0}, {1, left + 1, right + 32, 0x1.8p-9f, 1}, {1, left, right, 0.5f, 0}};
        const sl_merge merge = {columns, 3, updates};
        if (from == SL_F32)
            memcpy(source, values, 4 * count);
        else
            EXPECT(sl_convert(SL_TIER_SCALAR, SL_F32, from, values, source, count) == SL_OK);
        sl_job job = {.op = SL_OP_MERGE, .from = from, .to = to, .file = SL_MEMORY, .merge = &merge};
        job.offset = (uint64_t)(uintptr_t)source;
        job.size = bytes_of(from, count);
        job.memory = wanted;
        run_job(SL_TIER_SCALAR, &job);
        for (int32_t tier = 0; tier < SL_TIER_COUNT; tier++) {
            if (!sl_tier_available(tier)) continue;
            memset(got, UNTOUCHED, sizeof got);
            job.memory = got;
            run_job(tier, &job);
            if (memcmp(got, wanted, bytes_of(to, count)) != 0)
                FAIL("%s: merge of %s to %s, %zu columns", sl_tier_name(tier), label(from), label(to), columns);
            EXPECT(untouched(got + bytes_of(to, count), sizeof got - bytes_of(to, count)));
        }
        state = digest(state, wanted, bytes_of(to, count));
    }
    report("merge", label(from), label(to), state);
}

static void check_merges(void) {
    static const int32_t FROM[] = {SL_F32, SL_BF16, SL_F8_E4M3, SL_Q8_0}, TO[] = {SL_F32, SL_F16, SL_BF16, SL_F64};
    static float left[MERGE_ROWS * MERGE_RANK + 1], right[(MERGE_COLUMNS / SL_MERGE_PANEL + 2) * MERGE_RANK * 32];
    uint64_t seed = 41;
    for (size_t i = 0; i < sizeof left / sizeof *left; i++) left[i] = near_one(&seed);
    for (size_t i = 0; i < sizeof right / sizeof *right; i++) right[i] = near_one(&seed);
    for (size_t i = 0; i < sizeof FROM / sizeof *FROM; i++)
        for (size_t k = 0; k < sizeof TO / sizeof *TO; k++) check_merge(FROM[i], TO[k], left, right);
}

int main(void) {
    for (int32_t tier = 0; tier < SL_TIER_COUNT; tier++)
        if (sl_tier_available(tier)) fprintf(stderr, "tier %s\n", sl_tier_name(tier));
    check_conversions();
    check_quantization();
    check_all_weighted();
    check_all_statistics();
    check_differences();
    check_all_restored();
    check_all_stored();
    check_all_encoded();
    check_copies();
    check_streams();
    check_presence();
    check_merges();
    return failures == 0 ? 0 : 1;
}
