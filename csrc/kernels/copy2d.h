/* Two-dimensional copies between strided layouts: transposing, and packing from arbitrary strides. */
#ifndef SL_COPY2D_H
#define SL_COPY2D_H

#include "base/base.h"

/* rows * columns elements at an address. Strides are bytes between consecutive rows or columns, and may be negative. */
typedef struct sl_plane {
    uint8_t *memory;
    int64_t row, column;
    bool streams; /* of a destination: whole lines of a transposed matrix are stored past the cache; see stream.h */
} sl_plane;

/* Copies elements of 1, 2, 4 or 8 bytes at any alignment. Source and destination must not overlap. */
void sl_copy_2d(size_t element, uint64_t rows, uint64_t columns, sl_plane source, sl_plane destination);

#endif
