/* Matrices to quantize for other engines: all methods, and shapes around the widths of vectors, blocks and tiles. Also
 * for ../sanitizers/encoded.c. */
#ifndef ENCODED_H
#define ENCODED_H

#include "inputs.h"
#include "safeload.h"

typedef struct encoded {
    const char *name;
    int32_t method, bits, is_signed, high_first;
    uint64_t row_block, group; /* group 0: whole rows */
} encoded;

static const encoded ENCODED[] = {
    {"w4a16", SL_ENCODE_INT, 4, 0, 0, 1, 128},
    {"w4a16_asym", SL_ENCODE_INT_ZERO, 4, 0, 0, 1, 128},
    {"w8a16", SL_ENCODE_INT, 8, 0, 0, 1, 128},
    {"w8a8", SL_ENCODE_INT, 8, 1, 0, 1, 0},
    {"fp8_dynamic", SL_ENCODE_FP8, 8, 0, 0, 1, 0},
    {"fp8_block", SL_ENCODE_FP8, 8, 0, 0, 16, 128},
    {"nvfp4a16", SL_ENCODE_NVFP4, 4, 0, 0, 1, 16},
    {"mxfp4a16", SL_ENCODE_MXFP4, 4, 0, 0, 1, 32},
    {"mxfp8a16", SL_ENCODE_MXFP8, 8, 0, 0, 1, 32},
    {"deepseek_fp8", SL_ENCODE_FP8_INVERSE, 8, 0, 0, 16, 128},
    {"mlx2", SL_ENCODE_MLX, 2, 0, 0, 1, 64},
    {"mlx3", SL_ENCODE_MLX, 3, 0, 0, 1, 32},
    {"mlx4", SL_ENCODE_MLX, 4, 0, 0, 1, 64},
    {"mlx5", SL_ENCODE_MLX, 5, 0, 0, 1, 128},
    {"mlx6", SL_ENCODE_MLX, 6, 0, 0, 1, 64},
    {"mlx8", SL_ENCODE_MLX, 8, 0, 0, 1, 64},
    {"mlx-mxfp4", SL_ENCODE_MLX_MXFP4, 4, 0, 0, 1, 32},
    {"mlx-nvfp4", SL_ENCODE_MLX_NVFP4, 4, 0, 0, 1, 16},
    {"mlx-mxfp8", SL_ENCODE_MLX_MXFP8, 8, 0, 0, 1, 32},
    {"bnb", SL_ENCODE_TABLE, 4, 0, 1, 1, 64},
    {"groups_of_24", SL_ENCODE_INT, 8, 1, 0, 1, 24},
};

/* Multiples of 8 are for all bits. */
static const uint64_t ENCODED_COLUMNS[] = {1,   2,    7,    8,    15,   16,   17,   24,   31,  32,  33,
                                           40,  63,   64,   65,   100,  104,  127,  128,  129, 192, 200,
                                           513, 1000, 4064, 4095, 4096, 4097, 4104, 4224, 8200};

#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

/* Not in the order of its numbers, and with two zeros. */
static const float ENCODED_TABLE[16] = {0.0f,  0.0625f,  1.0f,  0.75f,  0.25f,  0.5f,  0.125f,  0.375f,
                                        -0.0f, -0.0625f, -1.0f, -0.75f, -0.25f, -0.5f, -0.125f, -0.375f};

/* A job without memory. */
static inline sl_encoding encoding_of(const encoded *how, int32_t from, uint64_t rows, uint64_t columns) {
    sl_encoding job = {.method = how->method, .from = from, .bits = how->bits, .is_signed = how->is_signed};
    job.high_first = how->high_first;
    job.filler = 5;
    job.rows = rows;
    job.columns = columns;
    job.row_block = how->row_block;
    job.group = how->group == 0 ? columns : how->group;
    job.row_bytes = (columns * (uint64_t)how->bits + 7) / 8;
    job.global = 3.25f;
    job.table = how->method == SL_ENCODE_TABLE ? ENCODED_TABLE : NULL;
    return job;
}

static inline uint64_t blocks_of(const sl_encoding *job) {
    return ((job->rows - 1) / job->row_block + 1) * ((job->columns - 1) / job->group + 1);
}

/* Whether rows of this width are whole bytes. */
static inline bool is_encodable(const encoded *how, uint64_t columns) {
    return how->bits == 4 || how->bits == 8 || columns % 8 == 0;
}

static inline void store_le32(uint8_t *out, uint32_t bits) {
    for (int k = 0; k < 4; k++) out[k] = (uint8_t)(bits >> 8 * k);
}

static inline size_t encoded_item(int32_t from) { return from == SL_F32 ? 4 : 2; }

/* What fill_encoded makes. */
enum { ANY_SIZE, USUAL, WITH_INFINITY, ENCODED_KINDS };

/* Weights of all sizes, or of usual ones with many ties. All are finite, except one of WITH_INFINITY. */
static inline void fill_encoded(uint8_t *weights, int32_t from, uint64_t count, int kind, uint64_t seed) {
    size_t item = encoded_item(from);
    uint64_t place = random_u64(&seed) % count;
    uint32_t infinity = from == SL_F32 ? 0x7f800000 : from == SL_BF16 ? 0x7f80 : 0x7c00;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t random = random_u64(&seed);
        uint32_t usual = (uint32_t)(random >> 32 & 0x80000000u) | (122 - (uint32_t)(random % 5)) << 23;
        usual |= (uint32_t)random & (i % 3 == 0 ? 0x600000 : 0x7fffff);
        uint32_t bits = kind == ANY_SIZE ? f32_of_block((size_t)i, random) : usual;
        uint8_t *at = weights + item * i, number[4];
        store_le32(number, bits);
        if (item == 4)
            memcpy(at, number, item);
        else
            EXPECT(sl_convert(SL_TIER_SCALAR, SL_F32, from, number, at, 1) == SL_OK);
        uint32_t stored = item == 4 ? sl_load_le32(at) : (uint32_t)(at[0] | at[1] << 8);
        if ((stored & infinity) == infinity) at[item - 1] &= 0xbf; /* half of the exponent */
        if (kind == WITH_INFINITY && i == place) {
            stored = infinity | (uint32_t)(random & 1); /* or NaN */
            for (size_t k = 0; k < item; k++) at[k] = (uint8_t)(stored >> 8 * k);
        }
    }
}

#endif
