/* The rest of sl_api.h: functions that belong to no other file. */
#include <stdlib.h>

#include "safeload.h"

void sl_free(void *memory) { free(memory); }

const char *sl_compiler(void) {
#if defined(__clang__)
    return __VERSION__; /* starts with "Clang" */
#elif defined(__GNUC__)
    return "GCC " __VERSION__;
#else
    return "MSVC";
#endif
}
