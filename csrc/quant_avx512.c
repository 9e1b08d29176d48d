#include "quant.h"
const sl_kernel sl_quant_kernels_avx512[] = {{-1, -1, NULL}};
const sl_quant sl_quant_avx512 = {NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
