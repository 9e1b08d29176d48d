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

/* Of the values of each block; see encode.h. */
typedef struct extremes {
    float absmax[MOST_BLOCKS + SL_ENCODE_LANES], least[MOST_BLOCKS], most[MOST_BLOCKS];
} extremes;

/* What the blocks of a tile have: `scales`, `biases` and `zeros` as the codes need them, the others as stored. */
typedef struct blocks {
    float scales[MOST_BLOCKS], biases[MOST_BLOCKS], zeros[MOST_BLOCKS];
    float stored[MOST_BLOCKS + SL_ENCODE_LANES];
    uint8_t codes[MOST_BLOCKS + SL_ENCODE_LANES];
} blocks;

/* Codes by rank; see encode.h. */
typedef struct ranking {
    float bounds[15];
    uint8_t map[16];
} ranking;

typedef struct encoder {
    const sl_encoding *job;
    sl_encode_steps steps;
    sl_convert_fn load; /* NULL for f32 */
    bool ranged;        /* scales depend on the least and the largest value, not only on magnitudes */
    ranking ranking;    /* of formats with 16 numbers */
    float e4m3[128];    /* the numbers of E4M3 by code, as the scales of blocks */
} encoder;

/* E2M1 from -6 to 6. compressed-tensors: ties to the even code, and negative numbers keep their sign (code 8). MLX:
 * ties to the smaller magnitude, and a number that becomes 0 has no sign. A bound followed by "below" is the float
 * below it: a tie goes up. */
static const ranking E2M1_EVEN = {
    .bounds = {-0x1.400002p2f /* -5, below */, -3.5f, -0x1.400002p1f /* -2.5, below */, -1.75f,
               -0x1.400002p0f /* -1.25, below */, -0.75f, -0x1.000002p-2f /* -0.25, below */, -0x1p-149f /* 0, below */,
               0.25f, 0x1.7ffffep-1f /* 0.75, below */, 1.25f, 0x1.bffffep0f /* 1.75, below */, 2.5f,
               0x1.bffffep1f /* 3.5, below */, 5.0f},
    .map = {15, 14, 13, 12, 11, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7},
};
static const ranking E2M1_SMALLER = {
    .bounds = {-0x1.400002p2f, -0x1.c00002p1f, -0x1.400002p1f, -0x1.c00002p0f, -0x1.400002p0f, -0x1.800002p-1f,
               -0x1.000002p-2f, 0.0f, 0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f},
    .map = {15, 14, 13, 12, 11, 10, 9, 0, 0, 1, 2, 3, 4, 5, 6, 7},
};

/* ---- numbers ---- */

/* C may keep more digits within an expression, and GCC does for s390x: each step has a variable of its own. */

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Rounds to the dtype of the weights. */
static float rounded(const encoder *self, float value) {
    sl_encode_scalar.quotients(&value, 1, 1.0f, self->job->from, &value);
    return value;
}

/* With the sign of another number. */
static float signed_as(float value, float other) {
    return float_of((bits_of(value) & 0x7fffffff) | (bits_of(other) & 0x80000000u));
}

/* A float rounded to an integer, ties to even; larger floats are integers. */
static float to_integer(float value) {
    float unit = signed_as(0x1p23f, value), sum = value + unit;
    return value > -0x1p23f && value < 0x1p23f ? sum - unit : value;
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

/* The exponent of MXFP4 and MXFP8 in compressed-tensors: a significand from 1.75 on rounds up. */
static int mx_exponent(const encoder *self, float absmax) {
    float power_of_two;
    if (self->job->from == SL_F16) {
        uint32_t half = (uint32_t)f32_to_f16(bits_of(absmax)) + (1u << 8);
        half &= 0x7c00; /* compressed-tensors loses a block that becomes infinity here; 2^16 keeps it */
        power_of_two = half == 0x7c00 ? 0x1p16f : float_of(f16_to_f32((uint16_t)half));
    } else {
        power_of_two = float_of((bits_of(absmax) + (1u << 21)) & 0x7f800000);
    }
    if (power_of_two == 0) return 0;
    int largest = self->job->method == SL_ENCODE_MXFP8 ? 8 : 2; /* exponent of a number */
    int exponent = (int)(bits_of(power_of_two) >> 23) - largest;
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
static void decide_mlx(float least, float most, float codes, float *out_scale, float *out_bias) {
    /* Without branches on signs, which nobody can predict. */
    uint32_t below = size_of(least) > size_of(most) ? UINT32_MAX : 0;
    float edge = float_of((bits_of(least) & below) | (bits_of(most) & ~below));
    float width = most - least, scale = width / codes;
    scale = scale > 1e-7f ? scale : 1e-7f;
    scale = float_of(bits_of(scale) | (~below & 0x80000000u));
    float steps = to_integer(edge / scale);
    *out_scale = steps == 0 ? scale : edge / steps;
    *out_bias = steps == 0 ? 0.0f : edge;
}

/* compressed-tensors' integers and its FP8: scales that are stored in the dtype of the weights, none of them 0. */
static void decide_rounded(const encoder *self, const extremes *of, size_t count, blocks *out) {
    const sl_encoding *job = self->job;
    float codes = (float)((1 << job->bits) - 1);
    if (job->method == SL_ENCODE_INT_ZERO) {
        for (size_t k = 0; k < count; k++) {
            float least = of->least[k] < 0 ? of->least[k] : 0, most = of->most[k] > 0 ? of->most[k] : 0;
            out->stored[k] = rounded(self, rounded(self, most - least) / codes);
            out->zeros[k] = zero_point(self, least, out->stored[k]);
        }
    } else {
        float divisor = job->method == SL_ENCODE_FP8 ? E4M3_MOST : codes / 2.0f;
        self->steps.quotients(of->absmax, count, divisor, job->from, out->stored);
    }
    for (size_t k = 0; k < count; k++)
        out->scales[k] = out->stored[k] = out->stored[k] == 0 ? epsilon(job->from) : out->stored[k];
}

/* NVFP4 of both libraries: scales are codes of E4M3. compressed-tensors has none of 0. */
static void decide_nvfp4(const encoder *self, const extremes *of, size_t count, blocks *out) {
    const float factor = self->job->method == SL_ENCODE_NVFP4 ? self->job->global : 1.0f;
    const sl_encode_blocks all = {.group = count, .from = SL_F32, .multiplies = true, .scales = &factor};
    self->steps.quotients(of->absmax, count, E2M1_MOST, self->job->from, out->stored);
    self->steps.e4m3(out->stored, count, &all, out->codes);
    for (size_t k = 0; k < count; k++) {
        if (self->job->method == SL_ENCODE_NVFP4 && out->codes[k] == 0) out->codes[k] = 0x20;
        out->scales[k] = self->e4m3[out->codes[k]];
    }
}

static void decide_exponents(const encoder *self, const extremes *of, size_t count, blocks *out) {
    const sl_encoding *job = self->job;
    bool rounds = job->method == SL_ENCODE_MXFP4 || job->method == SL_ENCODE_MXFP8;
    if (!rounds)
        self->steps.quotients(of->absmax, count, job->method == SL_ENCODE_MLX_MXFP8 ? E4M3_MOST : E2M1_MOST, job->from,
                              out->stored);
    for (size_t k = 0; k < count; k++) {
        int exponent = rounds ? mx_exponent(self, of->absmax[k]) : mlx_exponent(out->stored[k]);
        /* The smallest f16 is 2^-24. compressed-tensors has 1 for scales that would be 0. */
        if (rounds && job->from == SL_F16 && exponent < 103) exponent = 127;
        out->codes[k] = (uint8_t)exponent;
        out->scales[k] = power(exponent);
    }
}

/* Decides about the blocks of a segment; `partial` if the last is smaller. */
static void decide(const encoder *self, const extremes *of, size_t count, bool partial, blocks *out) {
    const sl_encoding *job = self->job;
    memset(out->stored, 0, count * sizeof *out->stored);
    memset(out->biases, 0, count * sizeof *out->biases);
    memset(out->zeros, 0, count * sizeof *out->zeros);
    memset(out->codes, 0, count);
    switch (job->method) {
    case SL_ENCODE_INT:
    case SL_ENCODE_INT_ZERO:
    case SL_ENCODE_FP8: decide_rounded(self, of, count, out); break;
    case SL_ENCODE_NVFP4:
    case SL_ENCODE_MLX_NVFP4: decide_nvfp4(self, of, count, out); break;
    case SL_ENCODE_MXFP4:
    case SL_ENCODE_MXFP8:
    case SL_ENCODE_MLX_MXFP4:
    case SL_ENCODE_MLX_MXFP8: decide_exponents(self, of, count, out); break;
    case SL_ENCODE_FP8_INVERSE:
        for (size_t k = 0; k < count; k++) {
            float inverse = 1.0f / of->absmax[k];
            out->scales[k] = of->absmax[k] > 0 ? inverse * E4M3_MOST : 1.0f;
            out->stored[k] = is_finite(out->scales[k]) ? 1.0f / out->scales[k] : out->scales[k];
        }
        break;
    case SL_ENCODE_MLX:
        for (size_t k = 0; k < count; k++) {
            decide_mlx(of->least[k], of->most[k], (float)((1 << job->bits) - 1), &out->scales[k], &out->biases[k]);
            out->stored[k] = out->scales[k];
        }
        break;
    default: /* SL_ENCODE_TABLE: whole blocks multiply by the reciprocal */
        for (size_t k = 0; k < count; k++) {
            bool last = partial && k + 1 == count;
            float scale = of->absmax[k] < SMALLEST_ABSMAX ? SMALLEST_ABSMAX : of->absmax[k];
            out->stored[k] = last ? scale : of->absmax[k];
            out->scales[k] = last ? scale : 1.0f / scale;
        }
        break;
    }
}

/* Stores the scales of blocks from `at` on; returns how many are before the first that is not finite. */
static size_t store(const encoder *self, const blocks *all, size_t count, uint64_t at) {
    const sl_encoding *job = self->job;
    for (size_t k = 0; k < count; k++) {
        if (!is_finite(all->stored[k]) || !is_finite(all->biases[k])) return k;
        if (job->scales != NULL) job->scales[at + k] = all->stored[k];
        if (job->biases != NULL) job->biases[at + k] = all->biases[k];
        if (job->zeros != NULL) job->zeros[at + k] = (int8_t)all->zeros[k];
        if (job->scale_codes != NULL) job->scale_codes[at + k] = all->codes[k];
    }
    return count;
}

/* ---- codes ---- */

/* The codes of a tile, a byte for each. */
static void codes_of(const encoder *self, const blocks *how, const float *values, size_t count, uint8_t *codes) {
    const sl_encoding *job = self->job;
    const sl_encode_steps *steps = &self->steps;
    sl_encode_blocks all = {.group = (size_t)job->group, .from = job->from, .scales = how->scales};
    int32_t half = 1 << (job->bits - 1);
    switch (job->method) {
    case SL_ENCODE_INT:
    case SL_ENCODE_INT_ZERO:
        if (job->method == SL_ENCODE_INT_ZERO) all.zeros = how->zeros;
        steps->integers(values, count, &all, (float)-half, (float)(half - 1), job->is_signed ? 0 : half, codes);
        break;
    case SL_ENCODE_MLX:
        all.from = SL_F32;
        all.biases = how->biases;
        steps->integers(values, count, &all, 0.0f, (float)((1 << job->bits) - 1), 0, codes);
        break;
    case SL_ENCODE_MXFP8:
    case SL_ENCODE_FP8: steps->e4m3(values, count, &all, codes); break;
    case SL_ENCODE_MLX_MXFP8:
        all.from = SL_F32;
        steps->e4m3(values, count, &all, codes);
        break;
    case SL_ENCODE_FP8_INVERSE:
        all.multiplies = true;
        steps->e4m3(values, count, &all, codes);
        break;
    case SL_ENCODE_TABLE: {
        size_t whole = count / all.group * all.group;
        all.from = SL_F32;
        all.multiplies = true;
        steps->ranks(values, whole, &all, self->ranking.bounds, self->ranking.map, codes);
        all.multiplies = false;
        all.scales = how->scales + whole / all.group;
        steps->ranks(values + whole, count - whole, &all, self->ranking.bounds, self->ranking.map, codes + whole);
        break;
    }
    default: /* E2M1 */
        if (job->method != SL_ENCODE_MXFP4) all.from = SL_F32;
        steps->ranks(values, count, &all, self->ranking.bounds, self->ranking.map, codes);
        break;
    }
}

/* Encodes the values of a tile to the bytes of its codes. */
static void write_codes(const encoder *self, const blocks *how, const float *values, size_t count, uint8_t *out) {
    const sl_encoding *job = self->job;
    uint8_t codes[TILE + SL_ENCODE_LANES];
    bool fits = count % SL_ENCODE_LANES == 0 && (job->group % SL_ENCODE_LANES == 0 || job->group >= count);
    if (job->bits == 8 && fits) { /* steps write nothing past the last code */
        codes_of(self, how, values, count, out);
        return;
    }
    codes_of(self, how, values, count, codes);
    if (job->bits == 8) {
        memcpy(out, codes, count);
        return;
    }
    size_t unit = job->bits == 4 ? 2 : 8, whole = count / unit * unit; /* rows of other bits are whole groups */
    self->steps.pack(codes, whole, (uint32_t)job->bits, job->high_first, out);
    if (whole == count) return;
    int first = job->high_first ? 4 : 0;
    out[count / 2] = (uint8_t)(codes[count - 1] << first | job->filler << (4 - first));
}

/* ---- tiles ---- */

/* Values of a row as numbers; `room` has SL_ENCODE_LANES more than `count`, which become 0. */
static void load(const encoder *self, uint64_t row, uint64_t column, size_t count, float *room) {
    const sl_encoding *job = self->job;
    uint64_t index = row * job->columns + column;
    if (self->load == NULL)
        memcpy(room, (const uint8_t *)job->weights + 4 * index, 4 * count);
    else
        self->load((const uint8_t *)job->weights + 2 * index, room, count);
    from_file_order(room, count);
    memset(room + count, 0, SL_ENCODE_LANES * sizeof *room);
}

/* The first value in rows and columns that is not finite; the first value of all if there is none. */
static uint64_t culprit(const encoder *self, uint64_t row, uint64_t rows, uint64_t column, uint64_t columns) {
    float room[TILE + SL_ENCODE_LANES];
    for (uint64_t r = row; r < row + rows; r++)
        for (uint64_t c = column; c < column + columns; c += TILE) {
            size_t count = (size_t)(column + columns - c < TILE ? column + columns - c : TILE);
            load(self, r, c, count, room);
            for (size_t i = 0; i < count; i++)
                if (!is_finite(room[i])) return r * self->job->columns + c + i;
        }
    return row * self->job->columns + column;
}

/* Encodes the columns [begin, end) of the rows [row, row + rows), which are whole blocks. */
static int32_t encode_segment(const encoder *self, uint64_t row, uint64_t rows, uint64_t begin, uint64_t end,
                              uint64_t *position) {
    const sl_encoding *job = self->job;
    /* A group can exceed the columns by far, so nothing is added to it. */
    const uint64_t group = job->group, per_row = (job->columns - 1) / group + 1;
    const size_t count = (size_t)((end - begin - 1) / group + 1);
    float values[TILE + SL_ENCODE_LANES];
    extremes of;
    blocks how;
    for (size_t k = 0; k < count; k++) {
        of.absmax[k] = 0;
        of.least[k] = float_of(SL_F32_INFINITY);
        of.most[k] = -of.least[k];
    }
    for (uint64_t r = row; r < row + rows; r++)
        for (uint64_t c = begin; c < end; c += TILE) {
            size_t size = (size_t)(end - c < TILE ? end - c : TILE);
            load(self, r, c, size, values);
            self->steps.extremes(values, size, (size_t)group, of.absmax, self->ranged ? of.least : NULL,
                                 self->ranged ? of.most : NULL);
        }
    size_t usual = 0;
    while (usual < count && is_finite(of.absmax[usual])) usual++;
    decide(self, &of, usual, usual == count && (end - begin) % group != 0, &how);
    usual = store(self, &how, usual, row / job->row_block * per_row + begin / group);
    if (usual < count) {
        uint64_t first = begin + usual * group;
        *position = culprit(self, row, rows, first, end - first < group ? end - first : group);
        return SL_E_RANGE;
    }
    bool held = rows == 1 && end - begin <= TILE;
    for (uint64_t r = row; r < row + rows && job->codes != NULL; r++)
        for (uint64_t c = begin; c < end; c += TILE) {
            size_t size = (size_t)(end - c < TILE ? end - c : TILE);
            if (!held) load(self, r, c, size, values);
            write_codes(self, &how, values, size, job->codes + r * job->row_bytes + c * (uint64_t)job->bits / 8);
        }
    return SL_OK;
}

static void prepare_ranking(encoder *self) {
    const sl_encoding *job = self->job;
    ranking *own = &self->ranking;
    *own = job->method == SL_ENCODE_MLX_MXFP4 || job->method == SL_ENCODE_MLX_NVFP4 ? E2M1_SMALLER : E2M1_EVEN;
    if (job->table == NULL) return;
    for (uint8_t i = 0; i < 16; i++) { /* a stable order of the codes by their values */
        uint8_t at = i;
        for (; at > 0 && job->table[own->map[at - 1]] > job->table[i]; at--) own->map[at] = own->map[at - 1];
        own->map[at] = i;
    }
    for (int k = 0; k < 15; k++) own->bounds[k] = (job->table[own->map[k]] + job->table[own->map[k + 1]]) / 2.0f;
}

static void prepare_e4m3(encoder *self) {
    if (self->job->method != SL_ENCODE_NVFP4 && self->job->method != SL_ENCODE_MLX_NVFP4) return;
    for (uint8_t code = 0; code < 128; code++) {
        float number = of_e4m3(code);
        self->e4m3[code] = self->job->method == SL_ENCODE_NVFP4 ? number / self->job->global : number;
    }
    if (self->job->method == SL_ENCODE_MLX_NVFP4) self->e4m3[0] = float_of(SL_F32_INFINITY); /* all codes are 0 */
}

int32_t sl_encode(int32_t tier, const sl_encoding *job, uint64_t *position) {
    if (!sl_tier_available(tier) || job->group == 0 || job->row_block == 0) return SL_E_ARGUMENT;
    if (job->from != SL_F32 && job->from != SL_BF16 && job->from != SL_F16) return SL_E_ARGUMENT;
    if ((job->group < 16 || job->group % 8 != 0) && job->group < job->columns) return SL_E_ARGUMENT;
    if (job->bits < 2 || job->bits > 8 || job->bits == 7) return SL_E_ARGUMENT;
    if (job->bits != 4 && job->bits != 8 && job->columns % 8 != 0) return SL_E_ARGUMENT;
    encoder self = {.job = job,
                    .steps = sl_tier_encode(tier),
                    .load = job->from == SL_F32 ? NULL : sl_tier_convert(tier, job->from, SL_F32),
                    .ranged = job->method == SL_ENCODE_MLX || job->method == SL_ENCODE_INT_ZERO};
    prepare_ranking(&self);
    prepare_e4m3(&self);
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
