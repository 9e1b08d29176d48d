/* The rest of sl_api.h: functions that belong to no other file. */
#include <stdlib.h>

#include "platform/platform.h"

int32_t sl_file_write(int64_t file, uint64_t offset, const void *memory, uint64_t size, sl_error *error) {
    return sl_platform_write(file, false, offset, memory, size, error);
}

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
