/* Runs a target over files, for compilers without libFuzzer: replay FILE... Each name is printed before its file is
 * run: the target ends the process when a property does not hold. */
#include <errno.h>

#include "property.h"

static uint8_t *read_whole(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        exit(2);
    }
    long length = ftell(file);
    rewind(file);
    /* Exactly as long as the file, so that AddressSanitizer sees a read beyond it. */
    uint8_t *bytes = length >= 0 ? malloc(length > 0 ? (size_t)length : 1) : NULL;
    if (bytes == NULL || fread(bytes, 1, (size_t)length, file) != (size_t)length) {
        fprintf(stderr, "%s: cannot be read\n", path);
        exit(2);
    }
    fclose(file);
    *size = (size_t)length;
    return bytes;
}

int main(int count, char **paths) {
    for (int i = 1; i < count; i++) {
        size_t size;
        uint8_t *bytes = read_whole(paths[i], &size);
        puts(paths[i]);
        fflush(stdout); /* nothing flushes it when the target ends the process */
        LLVMFuzzerTestOneInput(bytes, size);
        free(bytes);
    }
    return count > 1 ? 0 : 2;
}
