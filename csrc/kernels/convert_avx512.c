/* Conversions with AVX-512, only if it is clearly faster than AVX2 with the data in cache; otherwise memory limits
 * both. */
#include "kernels/convert_lanes.h"
#include "kernels/isa.h"

#ifdef SL_X86

#define TARGET SL_AVX512

/* 32 elements: two registers of results. */
#define STEP ((size_t)32)

TARGET static __m512i bf16_lanes(const uint8_t *source) {
    __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)source)), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(bits), _mm512_castsi512_ps(bits), _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(bits, nan, bits, _mm512_set1_epi32(0x00400000));
}

TARGET SL_INLINE void bf16_to_f32(const uint8_t *in, uint8_t *out) {
    _mm512_storeu_si512(out, bf16_lanes(in));
    _mm512_storeu_si512(out + 64, bf16_lanes(in + 32));
}

CONVERSION(sl_bf16_to_f32_avx512, bf16_to_f32, STEP, SL_BF16, 2, SL_F32, 4)

TARGET SL_INLINE void f16_to_f32(const uint8_t *in, uint8_t *out) {
    _mm512_storeu_ps(out, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)in)));
    _mm512_storeu_ps(out + 64, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(in + 32))));
}

CONVERSION(sl_f16_to_f32_avx512, f16_to_f32, STEP, SL_F16, 2, SL_F32, 4)

TARGET static __m256i f16_lanes(const uint8_t *source) {
    return _mm512_cvtps_ph(_mm512_loadu_ps(source), _MM_FROUND_TO_NEAREST_INT);
}

TARGET SL_INLINE void f32_to_f16(const uint8_t *in, uint8_t *out) {
    _mm256_storeu_si256((__m256i *)out, f16_lanes(in));
    _mm256_storeu_si256((__m256i *)(out + 32), f16_lanes(in + 64));
}

CONVERSION(sl_f32_to_f16_avx512, f32_to_f16, STEP, SL_F32, 4, SL_F16, 2)

/* Rounds to the upper halves of the lanes. Rounding does not change the canonical NaN. 0xea: (a & b) | c. */
TARGET static __m512i round_to_bf16(const uint8_t *source) {
    const __m512i sign = _mm512_set1_epi32((int)0x80000000u), canonical = _mm512_set1_epi32(0x7fc00000);
    __m512i bits = _mm512_loadu_si512(source);
    __mmask16 nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(bits), _mm512_castsi512_ps(bits), _CMP_UNORD_Q);
    bits = _mm512_mask_ternarylogic_epi32(bits, nan, sign, canonical, 0xea);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}

TARGET SL_INLINE void f32_to_bf16(const uint8_t *in, uint8_t *out) {
    const __m512i upper = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                           25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(round_to_bf16(in), upper, round_to_bf16(in + 64)));
}

CONVERSION(sl_f32_to_bf16_avx512, f32_to_bf16, STEP, SL_F32, 4, SL_BF16, 2)

/* ---- small floats: a table of magnitudes, whose sign is added ---- */

/* Magnitudes [first, first + 16) as f16 if that is the target, else as the upper halves of f32, which are exact. Codes
 * above the largest magnitude are taken without their upper bits. */
TARGET static __m256i magnitudes(const small_float *format, int32_t to, int first) {
    const __m512i consecutive = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int mantissa_bits = format->mantissa_bits, ones = (1 << (format->exponent_bits + mantissa_bits)) - 1,
        largest = ones;
    if (format->special == ONE_NAN) largest = ones - 1;
    if (format->special == IEEE) largest = ones - (1 << mantissa_bits);
    __m512i code = _mm512_and_si512(_mm512_add_epi32(consecutive, _mm512_set1_epi32(first)), _mm512_set1_epi32(ones));
    __m512i bits = _mm512_add_epi32(_mm512_sll_epi32(code, _mm_cvtsi32_si128(23 - mantissa_bits)),
                                    _mm512_set1_epi32((127 - format->bias) << 23));
    __m512i step = _mm512_set1_epi32((int)power_of_two(1 - format->bias - mantissa_bits));
    __m512 subnormal = _mm512_mul_ps(_mm512_cvtepi32_ps(code), _mm512_castsi512_ps(step));
    __mmask16 small = _mm512_cmplt_epi32_mask(code, _mm512_set1_epi32(1 << mantissa_bits));
    bits = _mm512_mask_mov_epi32(bits, small, _mm512_castps_si512(subnormal));
    __mmask16 special = _mm512_cmpgt_epi32_mask(code, _mm512_set1_epi32(largest));
    __mmask16 infinite = _mm512_mask_cmpeq_epi32_mask(special, code, _mm512_set1_epi32(largest + 1));
    bits = _mm512_mask_mov_epi32(bits, special, _mm512_set1_epi32(0x7fc00000));
    if (format->special == IEEE) bits = _mm512_mask_mov_epi32(bits, infinite, _mm512_set1_epi32(0x7f800000));
    if (to == SL_F16) return _mm512_cvtps_ph(_mm512_castsi512_ps(bits), _MM_FROUND_TO_NEAREST_INT);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
}

/* Loads 32 codes into words, whose upper bits are undefined. */
TARGET SL_INLINE __m512i load_codes(int bits, const uint8_t *in) {
    if (bits == 8) return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)in));
    if (bits == 4) {
        __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)in));
        return _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    }
    /* Each quarter takes the 6 bytes of its 8 codes, and each word the two bytes that hold its code. */
    const __m512i quarters = _mm512_setr_epi32(0x10000, 2, 0, 0, 0x40003, 5, 0, 0, 0x70006, 8, 0, 0, 0xa0009, 11, 0, 0);
    const __m128i pairs = _mm_setr_epi8(0, 1, 0, 1, 1, 2, 2, 3, 3, 4, 3, 4, 4, 5, 5, 6);
    __m512i bytes = _mm512_castsi256_si512(_mm256_maskz_loadu_epi32(0x3f, in));
    bytes = _mm512_shuffle_epi8(_mm512_permutexvar_epi16(quarters, bytes), _mm512_broadcast_i32x4(pairs));
    return _mm512_srlv_epi16(bytes, _mm512_set1_epi64(0x0002000400060000));
}

TARGET SL_INLINE void convert_codes(const small_float *format, int32_t to, const __m512i table[4], const uint8_t *in,
                                    uint8_t *out) {
    int bits = 1 + format->exponent_bits + format->mantissa_bits;
    __m512i codes = load_codes(bits, in), words;
    if (bits == 8) {
        __mmask32 upper = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40));
        words = _mm512_permutex2var_epi16(table[0], codes, table[1]);
        words = _mm512_mask_mov_epi16(words, upper, _mm512_permutex2var_epi16(table[2], codes, table[3]));
    } else
        words = _mm512_permutexvar_epi16(codes, table[0]);
    __m512i top = bits == 8   ? _mm512_slli_epi16(codes, 8)
                  : bits == 6 ? _mm512_slli_epi16(codes, 10)
                              : _mm512_slli_epi16(codes, 12);
    words = _mm512_or_si512(words, _mm512_and_si512(top, _mm512_set1_epi16((short)0x8000)));
    if (format->special == MINUS_ZERO_IS_NAN) {
        __mmask32 nan = _mm512_cmpeq_epi16_mask(codes, _mm512_set1_epi16(0x80));
        words = _mm512_mask_mov_epi16(words, nan, _mm512_set1_epi16((short)(to == SL_F16 ? 0xfe00 : 0xffc0)));
    }
    if (to != SL_F32) {
        _mm512_storeu_si512(out, words);
        return;
    }
    __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(words));
    __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(words, 1));
    _mm512_storeu_si512(out, _mm512_slli_epi32(low, 16));
    _mm512_storeu_si512(out + 64, _mm512_slli_epi32(high, 16));
}

/* The last codes pass through a copy. */
TARGET SL_INLINE void convert_small(const small_float *format, int32_t to, const void *source, void *destination,
                                    size_t count) {
    size_t bits = 1 + (size_t)(format->exponent_bits + format->mantissa_bits), out_bytes = to == SL_F32 ? 4 : 2;
    const uint8_t *in = source;
    uint8_t *out = destination;
    __m512i table[4];
    for (int k = 0; k < (bits == 8 ? 4 : 1); k++)
        table[k] = _mm512_inserti64x4(_mm512_castsi256_si512(magnitudes(format, to, 32 * k)),
                                      magnitudes(format, to, 32 * k + 16), 1);
    for (; count >= STEP; count -= STEP, in += STEP / 8 * bits, out += STEP * out_bytes) {
        sl_prefetch_results(out, STEP * out_bytes);
        convert_codes(format, to, table, in, out);
    }
    if (count == 0) return;
    uint8_t codes[STEP] = {0}, values[STEP * 4];
    memcpy(codes, in, (count * bits + 7) / 8);
    convert_codes(format, to, table, codes, values);
    memcpy(out, values, count * out_bytes);
}

#define EACH_SMALL_FLOAT(ROW)                  \
    ROW(SL_F8_E4M3, f8_e4m3, E4M3FN)           \
    ROW(SL_F8_E5M2, f8_e5m2, E5M2)             \
    ROW(SL_F8_E4M3FNUZ, f8_e4m3fnuz, E4M3FNUZ) \
    ROW(SL_F8_E5M2FNUZ, f8_e5m2fnuz, E5M2FNUZ) \
    ROW(SL_F6_E2M3, f6_e2m3, E2M3)             \
    ROW(SL_F6_E3M2, f6_e3m2, E3M2)             \
    ROW(SL_F4, f4, E2M1)

#define DEFINE_TO(name, format, to, target)                                                                \
    TARGET static void sl_##name##_to_##to##_avx512(const void *source, void *destination, size_t count) { \
        convert_small(&format, target, source, destination, count);                                        \
    }

#define DEFINE(dtype, name, format)      \
    DEFINE_TO(name, format, f32, SL_F32) \
    DEFINE_TO(name, format, f16, SL_F16) \
    DEFINE_TO(name, format, bf16, SL_BF16)

#define ENTRIES(dtype, name, format)                                                        \
    {dtype, SL_F32, sl_##name##_to_f32_avx512}, {dtype, SL_F16, sl_##name##_to_f16_avx512}, \
        {dtype, SL_BF16, sl_##name##_to_bf16_avx512},

EACH_SMALL_FLOAT(DEFINE)

const sl_kernel sl_kernels_avx512[] = {
    {SL_BF16, SL_F32, sl_bf16_to_f32_avx512}, {SL_F16, SL_F32, sl_f16_to_f32_avx512},
    {SL_F32, SL_F16, sl_f32_to_f16_avx512},   {SL_F32, SL_BF16, sl_f32_to_bf16_avx512},
    EACH_SMALL_FLOAT(ENTRIES){-1, -1, NULL},
};

#endif
