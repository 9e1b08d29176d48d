/* Matrices quantized for other engines, each part in memory of exactly its size: nothing is read or written beyond. All
 * methods, widths around vectors, blocks and tiles, weights of all sizes or with an infinity, with and without codes,
 * on every tier. What sl_encode cannot do is refused before anything is written. */
#include "../native/encoded.h"

static unsigned runs, refusals;

static void *exactly(uint64_t size) {
    void *memory = malloc(size);
    if (memory == NULL) exit(2);
    memset(memory, 0xa5, size);
    return memory;
}

static int32_t encode(int32_t tier, sl_encoding job, uint64_t *position) {
    uint64_t blocks = blocks_of(&job);
    job.scales = exactly(4 * blocks);
    job.biases = exactly(4 * blocks);
    job.zeros = exactly(blocks);
    job.scale_codes = exactly(blocks);
    int32_t status = sl_encode(tier, &job, position);
    free(job.scales);
    free(job.biases);
    free(job.zeros);
    free(job.scale_codes);
    runs++;
    return status;
}

static void try_shape(const encoded *how, int32_t from, uint64_t rows, uint64_t columns, int kind) {
    uint64_t size = rows * columns * encoded_item(from), position = 0;
    sl_encoding job = encoding_of(how, from, rows, columns);
    uint8_t *weights = exactly(size), *codes = exactly(rows * job.row_bytes);
    fill_encoded(weights, from, rows * columns, kind, columns);
    job.weights = weights;
    for (int32_t tier = 0; tier < SL_TIER_COUNT; tier++) {
        if (!sl_tier_available(tier)) continue;
        for (int only_scales = 0; only_scales < 2; only_scales++) {
            job.codes = only_scales ? NULL : codes;
            int32_t status = encode(tier, job, &position);
            EXPECT(status == SL_OK || (status == SL_E_RANGE && position < rows * columns));
            EXPECT(kind != WITH_INFINITY || status == SL_E_RANGE);
            EXPECT(kind != USUAL || status == SL_OK);
        }
    }
    free(weights);
    free(codes);
}

static void try_all(void) {
    static const int32_t DTYPES[] = {SL_F32, SL_BF16, SL_F16};
    for (size_t k = 0; k < COUNT_OF(ENCODED); k++)
        for (size_t i = 0; i < COUNT_OF(ENCODED_COLUMNS); i++) {
            uint64_t columns = ENCODED_COLUMNS[i], rows = ENCODED[k].row_block > 1 ? 17 : 2;
            if (!is_encodable(&ENCODED[k], columns)) continue;
            for (int kind = 0; kind < ENCODED_KINDS; kind++) try_shape(&ENCODED[k], DTYPES[i % 3], rows, columns, kind);
            try_shape(&ENCODED[k], DTYPES[(i + 1) % 3], 1, columns, USUAL);
        }
}

static void refuse(sl_encoding job) {
    uint64_t position;
    EXPECT(sl_encode(SL_TIER_SCALAR, &job, &position) == SL_E_ARGUMENT);
    refusals++;
}

static void refuse_all(void) {
    sl_encoding good = encoding_of(&ENCODED[0], SL_F32, 2, 128), job = good; /* without memory */
    job.from = SL_F64;
    refuse(job);
    job = good;
    job.row_block = 0;
    refuse(job);
    static const uint64_t GROUPS[] = {0, 8, 17, 100};
    for (size_t k = 0; k < COUNT_OF(GROUPS); k++) {
        job = good;
        job.group = GROUPS[k];
        refuse(job);
    }
    static const int32_t BITS[] = {-1, 0, 1, 7, 9, 64};
    for (size_t k = 0; k < COUNT_OF(BITS); k++) {
        job = good;
        job.bits = BITS[k];
        refuse(job);
    }
    job = good;
    job.bits = 3;
    job.columns = 127;
    refuse(job);
}

int main(void) {
    try_all();
    refuse_all();
    printf("codes of other engines: %u runs, %u refused\n", runs, refusals);
    return failures == 0 ? 0 : 1;
}
