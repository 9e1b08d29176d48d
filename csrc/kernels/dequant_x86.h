/* Sixteen codes in an x86 register, shared by AVX2 and AVX-512, which convert codes to f32 differently. The including
 * file defines TARGET. */
#ifndef SL_DEQUANT_X86_H
#define SL_DEQUANT_X86_H

#include "base/base.h"
#include "kernels/isa.h"

#ifdef SL_X86

typedef __m128i codes;

TARGET SL_INLINE codes codes_at(const void *bytes) { return _mm_loadu_si128(bytes); }

TARGET SL_INLINE codes codes_of(uint64_t low, uint64_t high) { return _mm_set_epi64x((int64_t)high, (int64_t)low); }

TARGET SL_INLINE codes take(codes all, int shift, int8_t mask) {
    codes shifted = shift < 0 ? _mm_slli_epi16(all, -shift) : _mm_srli_epi16(all, shift);
    return _mm_and_si128(shifted, _mm_set1_epi8(mask));
}

TARGET SL_INLINE codes either(codes a, codes b) { return _mm_or_si128(a, b); }

TARGET SL_INLINE codes less(codes all, int8_t bias) { return _mm_sub_epi8(all, _mm_set1_epi8(bias)); }

TARGET SL_INLINE codes thrice(codes all) { return _mm_add_epi8(all, _mm_add_epi8(all, all)); }

/* 3 * code reaches 256 with 86, and 512 with 171. */
TARGET SL_INLINE codes top_digit(codes all) {
    codes one = _mm_cmpeq_epi8(_mm_max_epu8(all, _mm_set1_epi8(86)), all);
    codes two = _mm_cmpeq_epi8(_mm_max_epu8(all, _mm_set1_epi8((char)171)), all);
    return _mm_sub_epi8(_mm_setzero_si128(), _mm_add_epi8(one, two));
}

TARGET SL_INLINE float half_at(const uint8_t bytes[2]) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bytes[0] | bytes[1] << 8)));
}

#endif
#endif
