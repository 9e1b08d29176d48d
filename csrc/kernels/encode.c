/* Quantization to the formats of other engines, block by block. */
#include "kernels/encode.h"

#include "kernels/quant.h"
#include "kernels/scalar.h"
#include "kernels/tier.h"

/* Values of a row that are processed together: a multiple of every group size but those of whole rows. */
#define TILE 4096
/* Blocks of a tile: groups have at least 16 columns. */
#define MOST_BLOCKS (TILE / 16)

/* The largest E4M3 and E2M1, and their product. */
#define E4M3_MOST 448.0f
#define E2M1_MOST 6.0f

/* The smallest scale of 4-bit floats of bitsandbytes. */
#define SMALLEST_ABSMAX 1e-38f

/* How the values of a block become codes. */
typedef struct block {
    float scale, bias; /* divide (or multiply), and subtract first */
    float zero;
} block;

/* The blocks of a tile, in columns. */
typedef struct blocks {
    float scales[MOST_BLOCKS], biases[MOST_BLOCKS], zeros[MOST_BLOCKS];
} blocks;

typedef struct encoder {
    const sl_encoding *job;
    sl_encode_steps steps;
    sl_convert_fn load; /* NULL for f32 */
    float ones[MOST_BLOCKS];
    float bounds[15]; /* of NF4 and FP4 */
    uint8_t map[16];
} encoder;

/* ---- numbers ---- */

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Rounds to the dtype of the weights. */
static float rounded(const encoder *self, float value) {
    if (self->job->from == SL_F32) return value;
    if (self->job->from == SL_F16) return float_of(f16_to_f32(f32_to_f16(bits_of(value))));
    const float one = 1.0f;
    sl_encode_scalar.divide(&value, 1, 1, NULL, &one, SL_BF16, &value);
    return value;
}

/* A float rounded to an integer, ties to even; larger floats are integers. */
static float to_integer(float value) {
    float unit = value < 0 ? -0x1p23f : 0x1p23f;
    return value > -0x1p23f && value < 0x1p23f ? value + unit - unit : value;
}

static float size_of(float value) { return float_of(bits_of(value) & 0x7fffffff); }

static bool is_finite(float value) { return (bits_of(value) & 0x7f800000) != 0x7f800000; }

/* Turns floats in file byte order into numbers. */
static void from_file_order(float *values, size_t count) {
    const uint16_t probe = 1;
    uint8_t low;
    memcpy(&low, &probe, sizeof low);
    for (size_t i = 0; i < count && low == 0; i++) values[i] = float_of(load32(values, i));
}

static uint8_t e4m3_of(float value) {
    uint8_t code;
    value = value > E4M3_MOST ? E4M3_MOST : value;
    sl_encode_scalar.e4m3(&value, 1, &code);
    return code;
}

/* The value of a code without a sign. */
static float of_e4m3(uint8_t code) {
    int exponent = code >> 3, mantissa = code & 7;
    if (exponent == 0) return (float)mantissa * 0x1p-9f;
    return float_of((uint32_t)(exponent + 120) << 23 | (uint32_t)mantissa << 20);
}

/* 2^(exponent - 127). */
static float power(int exponent) { return exponent == 0 ? 0x1p-127f : float_of((uint32_t)exponent << 23); }

static float epsilon(int32_t from) { return from == SL_BF16 ? 0x1p-7f : from == SL_F16 ? 0x1p-10f : 0x1p-23f; }

/* ---- blocks ---- */

/* compressed-tensors' zero point; `scale` may be 0. */
static float zero_point(const encoder *self, float least, float scale) {
    float zero = rounded(self, -8.0f - rounded(self, least / scale));
    if (zero != zero) return 0.0f; /* 0 / 0 */
    zero = zero < -8.0f ? -8.0f : zero > 7.0f ? 7.0f : zero;
    return (float)nearest_int(zero);
}

/* The exponent of MXFP4 in compressed-tensors: a significand from 1.75 on rounds up. */
static int mxfp4_exponent(const encoder *self, float absmax) {
    float power_of_two;
    if (self->job->from == SL_F16) {
        uint32_t half = (uint32_t)f32_to_f16(bits_of(absmax)) + (1u << 8);
        half &= 0x7c00; /* compressed-tensors loses a block that becomes infinity here; 2^16 keeps it */
        power_of_two = half == 0x7c00 ? 0x1p16f : float_of(f16_to_f32((uint16_t)half));
    } else {
        power_of_two = float_of((bits_of(absmax) + (1u << 21)) & 0x7f800000);
    }
    if (power_of_two == 0) return 0;
    int exponent = (int)(bits_of(power_of_two) >> 23) - 2;
    return exponent < 0 ? 0 : exponent;
}

/* The exponent of MLX: the smallest power of two that is not below the value. Below 2^-127 MLX's exponent wraps around,
 * which loses the block; here it is 0. */
static int mlx_exponent(float value) {
    if (value == 0) return 127;
    uint32_t bits = bits_of(value);
    int exponent = (int)(bits >> 23);
    if (exponent == 0) return bits > (1u << 22) ? 1 : 0; /* subnormal: 2^-126 or at most 2^-127 */
    exponent += (bits & 0x7fffff) != 0;
    return exponent > 254 ? 254 : exponent;
}

/* MLX's affine mode: the scale makes the extreme of larger magnitude an exact code. */
static block mlx_block(float least, float most, float codes) {
    bool below = size_of(least) > size_of(most);
    float scale = (most - least) / codes, edge = below ? least : most;
    scale = scale > 1e-7f ? scale : 1e-7f;
    scale = below ? scale : -scale;
    float steps = to_integer(edge / scale);
    if (steps == 0) return (block){.scale = scale};
    return (block){.scale = edge / steps, .bias = edge};
}

/* Decides about a block and stores its scale at `at`. Returns false if the scale is not finite. */
static bool decide(const encoder *self, sl_extremes extreme, bool partial, uint64_t at, block *out) {
    const sl_encoding *job = self->job;
    float absmax = float_of(extreme.absmax), scale = 0, bias = 0;
    uint8_t code = 0;
    block result = {0};
    switch (job->method) {
    case SL_ENCODE_INT: scale = rounded(self, absmax / ((float)((1 << job->bits) - 1) / 2.0f)); break;
    case SL_ENCODE_FP8: scale = rounded(self, absmax / E4M3_MOST); break;
    case SL_ENCODE_INT_ZERO: {
        float least = extreme.least < 0 ? extreme.least : 0, most = extreme.most > 0 ? extreme.most : 0;
        scale = rounded(self, rounded(self, most - least) / (float)((1 << job->bits) - 1));
        result.zero = zero_point(self, least, scale);
        break;
    }
    case SL_ENCODE_FP8_INVERSE:
        result.scale = absmax > 0 ? 1.0f / absmax * E4M3_MOST : 1.0f;
        scale = is_finite(result.scale) ? 1.0f / result.scale : result.scale;
        break;
    case SL_ENCODE_NVFP4:
        scale = job->global * rounded(self, absmax / E2M1_MOST);
        code = e4m3_of(scale);
        code = code == 0 ? 0x20 : code;
        result.scale = of_e4m3(code) / job->global;
        break;
    case SL_ENCODE_MXFP4: {
        int exponent = mxfp4_exponent(self, absmax);
        result.scale = job->from == SL_F16 ? rounded(self, power(exponent)) : power(exponent);
        if (result.scale == 0) {
            result.scale = 1.0f;
            exponent = 127;
        }
        code = (uint8_t)exponent;
        break;
    }
    case SL_ENCODE_MLX:
        result = mlx_block(extreme.least, extreme.most, (float)((1 << job->bits) - 1));
        scale = result.scale;
        bias = result.bias;
        break;
    case SL_ENCODE_MLX_MXFP4:
    case SL_ENCODE_MLX_MXFP8: {
        float most = job->method == SL_ENCODE_MLX_MXFP4 ? E2M1_MOST : E4M3_MOST;
        code = (uint8_t)mlx_exponent(rounded(self, absmax / most));
        result.scale = power(code);
        break;
    }
    case SL_ENCODE_MLX_NVFP4:
        code = e4m3_of(rounded(self, absmax / E2M1_MOST));
        result.scale = of_e4m3(code);
        if (code == 0) result.scale = float_of(SL_F32_INFINITY); /* all codes are 0 */
        break;
    default: /* SL_ENCODE_TABLE */
        scale = partial && absmax < SMALLEST_ABSMAX ? SMALLEST_ABSMAX : absmax;
        result.scale = absmax < SMALLEST_ABSMAX ? SMALLEST_ABSMAX : absmax;
        break;
    }
    bool divides = job->method == SL_ENCODE_INT || job->method == SL_ENCODE_INT_ZERO || job->method == SL_ENCODE_FP8;
    if (divides) result.scale = scale = scale == 0 ? epsilon(job->from) : scale;
    if (!is_finite(scale) || !is_finite(bias)) return false;
    if (job->scales != NULL) job->scales[at] = scale;
    if (job->biases != NULL) job->biases[at] = bias;
    if (job->zeros != NULL) job->zeros[at] = (int8_t)result.zero;
    if (job->scale_codes != NULL) job->scale_codes[at] = code;
    *out = result;
    return true;
}

/* ---- codes ---- */

/* The codes of a tile, a byte for each. */
static void codes_of(const encoder *self, blocks *how, const float *values, size_t count, uint8_t *codes) {
    const sl_encoding *job = self->job;
    const sl_encode_steps *steps = &self->steps;
    size_t group = (size_t)job->group;
    float x[TILE];
    int32_t half = 1 << (job->bits - 1);
    switch (job->method) {
    case SL_ENCODE_INT:
    case SL_ENCODE_INT_ZERO:
        steps->divide(values, count, group, NULL, how->scales, job->from, x);
        if (job->method == SL_ENCODE_INT_ZERO) steps->divide(x, count, group, how->zeros, self->ones, job->from, x);
        steps->round(x, count, (float)-half, (float)(half - 1), job->is_signed ? 0 : half, codes);
        break;
    case SL_ENCODE_FP8:
    case SL_ENCODE_MLX_MXFP8:
        steps->divide(values, count, group, NULL, how->scales, job->method == SL_ENCODE_FP8 ? job->from : SL_F32, x);
        steps->multiply(x, count, group, self->ones, E4M3_MOST, x);
        steps->e4m3(x, count, codes);
        break;
    case SL_ENCODE_FP8_INVERSE:
        steps->multiply(values, count, group, how->scales, E4M3_MOST, x);
        steps->e4m3(x, count, codes);
        break;
    case SL_ENCODE_MLX:
        steps->divide(values, count, group, how->biases, how->scales, SL_F32, x);
        steps->round(x, count, 0.0f, (float)((1 << job->bits) - 1), 0, codes);
        break;
    case SL_ENCODE_NVFP4:
    case SL_ENCODE_MLX_MXFP4:
    case SL_ENCODE_MLX_NVFP4:
        steps->divide(values, count, group, NULL, how->scales, SL_F32, x);
        steps->e2m1(x, count, job->method == SL_ENCODE_NVFP4, codes);
        break;
    case SL_ENCODE_MXFP4:
        steps->divide(values, count, group, NULL, how->scales, job->from, x);
        steps->e2m1(x, count, true, codes);
        break;
    default: { /* whole blocks multiply by the reciprocal */
        size_t whole = count / group * group;
        float factors[MOST_BLOCKS];
        for (size_t k = 0; k * group < whole; k++) factors[k] = 1.0f / how->scales[k];
        steps->multiply(values, whole, group, factors, 1.0f, x);
        steps->divide(values + whole, count - whole, group, NULL, how->scales + whole / group, SL_F32, x + whole);
        steps->bucket(x, count, self->bounds, self->map, codes);
        break;
    }
    }
}

/* Moves 8 codes of a byte each together; the bits above are 0. */
static uint64_t joined(uint64_t codes, uint32_t bits) {
    codes = (codes & 0x00ff00ff00ff00ffu) | (codes & 0xff00ff00ff00ff00u) >> (8 - bits);
    codes = (codes & 0x0000ffff0000ffffu) | (codes & 0xffff0000ffff0000u) >> (16 - 2 * bits);
    return (codes & 0x00000000ffffffffu) | (codes & 0xffffffff00000000u) >> (32 - 4 * bits);
}

/* Joins codes to bytes, the first in the lowest bits (4 bits with high_first: in the highest). */
static void pack_codes(const encoder *self, const uint8_t *codes, size_t count, uint8_t *out) {
    const sl_encoding *job = self->job;
    uint32_t bits = (uint32_t)job->bits;
    if (bits == 8) {
        memcpy(out, codes, count);
        return;
    }
    if (bits == 4) {
        int first = job->high_first ? 4 : 0;
        self->steps.nibbles(codes, count / 2 * 2, job->high_first, out);
        if (count % 2) out[count / 2] = (uint8_t)(codes[count - 1] << first | job->filler << (4 - first));
        return;
    }
    for (size_t i = 0; i < count; i += 8) { /* rows of these are whole groups */
        uint64_t bytes = joined(sl_load_le64(codes + i), bits);
        for (uint32_t k = 0; k < bits; k++) *out++ = (uint8_t)(bytes >> 8 * k);
    }
}

/* ---- tiles ---- */

static const float *load(const encoder *self, uint64_t row, uint64_t column, size_t count, float *room) {
    const sl_encoding *job = self->job;
    uint64_t index = row * job->columns + column;
    if (self->load == NULL)
        memcpy(room, (const uint8_t *)job->weights + 4 * index, 4 * count);
    else
        self->load((const uint8_t *)job->weights + 2 * index, room, count);
    from_file_order(room, count);
    return room;
}

/* Adds the blocks of a tile to their extremes. */
static void measure(const encoder *self, const float *values, size_t count, sl_extremes *found, bool first) {
    size_t group = (size_t)self->job->group;
    for (size_t at = 0, k = 0; at < count; at += group, k++) {
        sl_extremes own = self->steps.range(values + at, count - at < group ? count - at : group);
        if (!first) {
            own.absmax = found[k].absmax > own.absmax ? found[k].absmax : own.absmax;
            own.least = found[k].least < own.least ? found[k].least : own.least;
            own.most = found[k].most > own.most ? found[k].most : own.most;
        }
        found[k] = own;
    }
}

/* The first value in rows and columns that is not finite; the first value of all if there is none. */
static uint64_t culprit(const encoder *self, uint64_t row, uint64_t rows, uint64_t column, uint64_t columns) {
    float room[TILE];
    for (uint64_t r = row; r < row + rows; r++)
        for (uint64_t c = column; c < column + columns; c += TILE) {
            size_t count = (size_t)(column + columns - c < TILE ? column + columns - c : TILE);
            const float *values = load(self, r, c, count, room);
            for (size_t i = 0; i < count; i++)
                if (!is_finite(values[i])) return r * self->job->columns + c + i;
        }
    return row * self->job->columns + column;
}

/* Encodes the columns [begin, end) of the rows [row, row + rows), which are whole blocks. */
static int32_t encode_segment(const encoder *self, uint64_t row, uint64_t rows, uint64_t begin, uint64_t end,
                              uint64_t *position) {
    const sl_encoding *job = self->job;
    uint64_t groups = (job->columns + job->group - 1) / job->group;
    float room[TILE];
    uint8_t codes[TILE];
    sl_extremes found[MOST_BLOCKS];
    blocks how;
    const float *values = NULL;
    for (uint64_t r = row; r < row + rows; r++)
        for (uint64_t c = begin; c < end; c += TILE) {
            size_t count = (size_t)(end - c < TILE ? end - c : TILE);
            values = load(self, r, c, count, room);
            measure(self, values, count, found, r == row && c == begin);
        }
    for (uint64_t c = begin, k = 0; c < end; c += job->group, k++) {
        uint64_t width = end - c < job->group ? end - c : job->group,
                 at = row / job->row_block * groups + c / job->group;
        block own = {0};
        bool usual = found[k].absmax < SL_F32_INFINITY && decide(self, found[k], width < job->group, at, &own);
        how.scales[k] = own.scale;
        how.biases[k] = own.bias;
        how.zeros[k] = -own.zero;
        if (usual) continue;
        *position = culprit(self, row, rows, c, width);
        return SL_E_RANGE;
    }
    bool held = rows == 1 && end - begin <= TILE;
    for (uint64_t r = row; r < row + rows && job->codes != NULL; r++)
        for (uint64_t c = begin; c < end; c += TILE) {
            size_t count = (size_t)(end - c < TILE ? end - c : TILE);
            if (!held) values = load(self, r, c, count, room);
            codes_of(self, &how, values, count, codes);
            pack_codes(self, codes, count, job->codes + r * job->row_bytes + c * (uint64_t)job->bits / 8);
        }
    return SL_OK;
}

static void prepare_buckets(encoder *self) {
    const sl_encoding *job = self->job;
    if (job->table == NULL) return;
    for (uint8_t i = 0; i < 16; i++) { /* a stable order of the codes by their values */
        uint8_t at = i;
        for (; at > 0 && job->table[self->map[at - 1]] > job->table[i]; at--) self->map[at] = self->map[at - 1];
        self->map[at] = i;
    }
    for (int k = 0; k < 15; k++) self->bounds[k] = (job->table[self->map[k]] + job->table[self->map[k + 1]]) / 2.0f;
}

int32_t sl_encode(int32_t tier, const sl_encoding *job, uint64_t *position) {
    if (!sl_tier_available(tier) || job->group == 0 || job->row_block == 0) return SL_E_ARGUMENT;
    if (job->from != SL_F32 && job->from != SL_BF16 && job->from != SL_F16) return SL_E_ARGUMENT;
    if (job->group < 16 && job->group < job->columns) return SL_E_ARGUMENT;
    encoder self = {.job = job,
                    .steps = sl_tier_encode(tier),
                    .load = job->from == SL_F32 ? NULL : sl_tier_convert(tier, job->from, SL_F32)};
    for (int k = 0; k < MOST_BLOCKS; k++) self.ones[k] = 1.0f;
    prepare_buckets(&self);
    uint64_t width = job->group >= TILE ? job->group : TILE / job->group * job->group;
    for (uint64_t row = 0; row < job->rows; row += job->row_block) {
        uint64_t rows = job->rows - row < job->row_block ? job->rows - row : job->row_block;
        for (uint64_t begin = 0; begin < job->columns; begin += width) {
            uint64_t end = job->columns - begin < width ? job->columns : begin + width;
            int32_t status = encode_segment(&self, row, rows, begin, end, position);
            if (status != SL_OK) return status;
        }
    }
    return SL_OK;
}
