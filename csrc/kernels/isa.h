/* Instruction sets that this compiler supports, and markers for functions that may use them. Files are compiled for the
 * baseline; only marked functions use more, and only if tier.c has found that the processor supports it. */
#ifndef SL_ISA_H
#define SL_ISA_H

/* Not with GCC for Windows, which does not align the stack for 32-byte spills (GCC bug 54412). */
#if (defined(__x86_64__) || defined(_M_X64)) && (!defined(__MINGW32__) || defined(__clang__))
#define SL_X86

#include <immintrin.h>

#if defined(_MSC_VER) && !defined(__clang__) /* allows all instructions in every function */
#define SL_AVX2
#define SL_AVX2_FMA
#define SL_AVX512
#else
#define SL_AVX2 __attribute__((target("avx2,f16c")))
#define SL_AVX2_FMA __attribute__((target("avx2,f16c,fma")))
#define SL_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,popcnt")))
#endif
#endif

#if defined(__aarch64__) && !defined(__AARCH64EB__)
#define SL_NEON /* part of the baseline */

#include <arm_neon.h>

#endif

#endif
