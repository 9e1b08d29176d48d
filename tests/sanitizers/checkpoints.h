/* Files for the programs of this folder, made with the core's own writer or by hand. */
#ifndef CHECKPOINTS_H
#define CHECKPOINTS_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "safeload.h"

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
            abort();                                                                      \
        }                                                                                 \
    } while (0)

/* Bytes that grow. */
typedef struct bytes {
    char *data;
    size_t size, room;
} bytes;

static inline void add(bytes *to, const void *data, size_t size) {
    if (to->size + size > to->room) {
        to->room = 2 * (to->size + size);
        to->data = realloc(to->data, to->room);
        CHECK(to->data != NULL);
    }
    memcpy(to->data + to->size, data, size);
    to->size += size;
}

static inline void add_u32(bytes *to, uint32_t value) { add(to, &value, sizeof value); }
static inline void add_u64(bytes *to, uint64_t value) { add(to, &value, sizeof value); }

static inline void add_text(bytes *to, const char *text) {
    add_u64(to, strlen(text));
    add(to, text, strlen(text));
}

/* A safetensors file of `count` F32 tensors of `elements` each, named and placed against the order of both names and
 * bytes, so that the reader sorts them, with metadata and an escape. */
static inline bytes make_safetensors(unsigned count, uint64_t elements) {
    bytes header = {NULL, 0, 0}, file = {NULL, 0, 0};
    char entry[256];
    add(&header, entry,
        (size_t)snprintf(entry, sizeof entry, "{\"__metadata__\":{\"format\":\"p\\u0074\",\"note\":\"\"}"));
    for (unsigned i = 0; i < count; i++) {
        unsigned long long begin = 4 * elements * (count - 1 - i);
        int size =
            snprintf(entry, sizeof entry,
                     ",\"layer\\u002e%u.weight\":{\"dtype\":\"F32\",\"shape\":[1,%llu],\"data_offsets\":[%llu,%llu]}",
                     i * 7919 % count, (unsigned long long)elements, begin, begin + 4 * elements);
        add(&header, entry, (size_t)size);
    }
    add(&header, "}", 1);
    add_u64(&file, header.size);
    add(&file, header.data, header.size);
    for (uint64_t i = 0; i < count * elements; i++) {
        float value = (float)(i % 1000) / 8;
        add(&file, &value, sizeof value);
    }
    free(header.data);
    return file;
}

/* A GGUF file of `count` entries of metadata and as many tensors of 128 bytes, by turns F32 and I2_S. */
static inline bytes make_gguf(unsigned count) {
    bytes file = {NULL, 0, 0};
    char name[64];
    static const float zeros[32];
    add(&file, "GGUF", 4);
    add_u32(&file, 3);
    add_u64(&file, count);
    add_u64(&file, count);
    for (unsigned i = 0; i < count; i++) {
        snprintf(name, sizeof name, "key.%u", i * 7919 % count);
        add_text(&file, i == 0 ? "general.file_type" : name);
        add_u32(&file, i == 0 ? SL_GGUF_U32 : SL_GGUF_STRING);
        if (i == 0) {
            add_u32(&file, 40);
            continue;
        }
        add_text(&file, "some text, so that more than the first read is needed");
    }
    for (unsigned i = 0; i < count; i++) {
        snprintf(name, sizeof name, "blk.%u.weight", i * 7919 % count);
        add_text(&file, name);
        add_u32(&file, 2);
        add_u64(&file, i % 2 == 0 ? 16 : 384);
        add_u64(&file, i % 2 == 0 ? 2 : 1);
        add_u32(&file, i % 2 == 0 ? 0 : 36);
        add_u64(&file, sizeof zeros * i);
    }
    while (file.size % 32 != 0) add(&file, "", 1);
    for (unsigned i = 0; i < count; i++) add(&file, zeros, sizeof zeros);
    return file;
}

/* Writes a file of a new name under /tmp, which `path` becomes, and frees the bytes. */
static inline void write_file(bytes content, char path[32]) {
    strcpy(path, "/tmp/safeload-XXXXXX");
    int file = mkstemp(path);
    CHECK(file >= 0);
    for (size_t at = 0; at < content.size;) {
        ssize_t put = write(file, content.data + at, content.size - at);
        CHECK(put > 0);
        at += (size_t)put;
    }
    close(file);
    free(content.data);
}

#endif
