#include "quant.h"
const sl_kernel sl_quant_kernels_neon[] = {{-1, -1, NULL}};
const sl_quant sl_quant_neon = {NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
