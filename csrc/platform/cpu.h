/* Processor features, detected at run time. */
#ifndef SL_CPU_H
#define SL_CPU_H

#include "base/base.h"

typedef struct sl_cpu {
    bool avx2;   /* AVX2, F16C and FMA (no processor has one alone), and the system saves the registers (XCR0) */
    bool avx512; /* F, BW, DQ and VL on top of that */
    bool neon;   /* part of every AArch64 */
} sl_cpu;

sl_cpu sl_cpu_detect(void);

#endif
