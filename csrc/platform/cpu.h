/* Processor features, detected at run time. */
#ifndef SL_CPU_H
#define SL_CPU_H

#include "base/base.h"

typedef struct sl_cpu {
    bool avx2;   /* AVX2, F16C and FMA, which processors have together; the system saves the registers (XCR0) */
    bool avx512; /* also F, BW, DQ and VL */
    bool neon;   /* present on every AArch64 processor */
} sl_cpu;

sl_cpu sl_cpu_detect(void);

#endif
