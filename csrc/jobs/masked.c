/* Values at positions given by a mask. */
#include "jobs/masked.h"

#include "kernels/tier.h"

#define REFUSE(...) return sl_fail(error, SL_E_ARGUMENT, -1, __VA_ARGS__)

/* ---- checks ---- */

int32_t sl_masked_check(const sl_packed *packed, sl_error *error) {
    const sl_dtype_info *codes = sl_dtype_get(packed->codes);
    bool whole = codes != NULL && codes->bits >= 8 && codes->bits % 8 == 0 && codes->block == 1;
    if (!whole || (packed->codes != SL_F32 && sl_tier_convert(SL_TIER_SCALAR, packed->codes, SL_F32) == NULL))
        REFUSE("values in a mask cannot be of dtype %d", packed->codes);
    if (packed->table != NULL || packed->word_codes != 0 || packed->high_first != 0 || packed->interleaved != 0 ||
        packed->transpose != 0 || packed->forbidden >= 0)
        REFUSE("values in a mask have no table, no words, no planes, no forbidden code, and are never transposed");
    return SL_OK;
}

static uint64_t blocks_of(const sl_packed *packed) { return (packed->columns - 1) / packed->mask_columns + 1; }

int32_t sl_masked_check_mask(const sl_packed *packed, sl_error *error) {
    uint64_t rows, starts, bytes;
    if (packed->mask == NULL || packed->starts == NULL || packed->mask_columns == 0)
        REFUSE("values lack the mask with their places");
    if (!sl_mul_u64(packed->matrices, packed->rows, &rows) || !sl_mul_u64(rows, blocks_of(packed), &starts) ||
        !sl_add_u64(starts, 1, &starts) || !sl_mul_u64(starts, sizeof(uint64_t), &bytes))
        REFUSE("%llu x %llu rows of a mask, each in parts of %llu columns", (unsigned long long)packed->matrices,
               (unsigned long long)packed->rows, (unsigned long long)packed->mask_columns);
    return SL_OK;
}

/* ---- positions ---- */

/* A part of a row with a common element of packed->starts. */
typedef struct part {
    uint64_t row, begin, end; /* row among all rows; columns */
    uint64_t at;              /* index in packed->starts */
} part;

static part part_of(const sl_packed *packed, uint64_t element) {
    part self = {.row = element / packed->columns};
    uint64_t own = element % packed->columns / packed->mask_columns;
    self.begin = own * packed->mask_columns;
    self.end = self.begin + sl_min_u64(packed->mask_columns, packed->columns - self.begin);
    self.at = self.row * blocks_of(packed) + own;
    return self;
}

static const uint8_t *mask_of(const sl_packed *packed, uint64_t row) {
    return packed->mask + row * (packed->columns / 8 + (packed->columns % 8 != 0));
}

static uint64_t value_bytes(const sl_packed *packed) { return (uint64_t)sl_dtype_get(packed->codes)->block_bytes; }

static int32_t refuse_part(const sl_job *job, const part *one, sl_error *error) {
    const sl_packed *packed = job->packed;
    uint64_t begin = packed->starts[one->at], end = packed->starts[one->at + 1];
    uint64_t count = sl_restore_count_bits(mask_of(packed, one->row), one->begin, one->end - one->begin);
    uint64_t row = packed->first_row + one->row % packed->rows;
    if (begin > end || end > packed->size / value_bytes(packed))
        return sl_fail(error, SL_E_FORMAT, -1, "the values of row %llu are number %llu to %llu of %llu",
                       (unsigned long long)row, (unsigned long long)begin, (unsigned long long)end,
                       (unsigned long long)(packed->size / value_bytes(packed)));
    return sl_fail(error, SL_E_FORMAT, -1, "row %llu has places for %llu values in its mask, but %llu are stored",
                   (unsigned long long)row, (unsigned long long)count, (unsigned long long)(end - begin));
}

/* Reports the first part in a range of values if the mask and the number of stored values disagree. */
static int32_t refuse_among(const sl_job *job, uint64_t element, uint64_t count, sl_error *error) {
    const sl_packed *packed = job->packed;
    part one = part_of(packed, element);
    for (uint64_t at = element; at < element + count; at += one.end - at % packed->columns) {
        one = part_of(packed, at);
        uint64_t held = sl_restore_count_bits(mask_of(packed, one.row), one.begin, one.end - one.begin);
        if (packed->starts[one.at] + held != packed->starts[one.at + 1]) break;
    }
    return refuse_part(job, &one, error);
}

/* Sets *index to the number of stored values before the job's value `element`, which may be one past the last. */
static int32_t find_value(const sl_job *job, uint64_t element, uint64_t *index, sl_error *error) {
    const sl_packed *packed = job->packed;
    uint64_t column = element % packed->columns;
    if (element == packed->matrices * packed->rows * packed->columns) { /* the end of the last part */
        part last = part_of(packed, element - 1);
        *index = packed->starts[last.at + 1];
        return *index <= packed->size / value_bytes(packed) ? SL_OK : refuse_part(job, &last, error);
    }
    part own = part_of(packed, element);
    uint64_t begin = packed->starts[own.at], end = packed->starts[own.at + 1];
    uint64_t before = sl_restore_count_bits(mask_of(packed, own.row), own.begin, column - own.begin);
    if (begin > end || end > packed->size / value_bytes(packed) || before > end - begin)
        return refuse_part(job, &own, error);
    *index = begin + before;
    return SL_OK;
}

int32_t sl_masked_fetch(const sl_job *job, uint64_t element, uint64_t *count, uint8_t *staging, sl_masked *self,
                        sl_error *error) {
    uint64_t bytes = value_bytes(job->packed);
    *count = sl_min_u64(*count, SL_STAGING / bytes);
    int32_t status = find_value(job, element, &self->first, error);
    if (status == SL_OK) status = find_value(job, element + *count, &self->end, error);
    if (status != SL_OK) return status;
    if (self->first > self->end || self->end - self->first > *count) return refuse_among(job, element, *count, error);
    self->next = self->first;
    self->bytes = staging;
    if (self->first == self->end) return SL_OK;
    return sl_fetch(job, self->first * bytes, (self->end - self->first) * bytes, staging, &self->bytes, error);
}

uint64_t sl_masked_run(const sl_packed *packed, uint64_t element, uint64_t count) {
    part own = part_of(packed, element);
    return sl_min_u64(sl_min_u64(count, own.end - element % packed->columns), SL_VALUES);
}

int32_t sl_masked_expand(const sl_job *job, const sl_plan *plan, sl_masked *self, uint64_t element, uint64_t count,
                         void *room, void *values, sl_error *error) {
    const sl_packed *packed = job->packed;
    part own = part_of(packed, element);
    uint64_t column = element % packed->columns, held;
    const uint8_t *mask = mask_of(packed, own.row);
    held = sl_restore_count_bits(mask, column, count);
    bool begins = column == own.begin, ends = column + count == own.end;
    if (held > self->end - self->next || (begins && self->next != packed->starts[own.at]) ||
        (ends && self->next + held != packed->starts[own.at + 1]))
        return refuse_part(job, &own, error);
    const uint8_t *stored = self->bytes + (self->next - self->first) * value_bytes(packed);
    if (plan->numbers != NULL) {
        plan->numbers(stored, room, (size_t)held);
        stored = room;
    }
    plan->restore.expand(mask, (size_t)column, (size_t)count, stored, (size_t)held, values);
    self->next += held;
    return SL_OK;
}
