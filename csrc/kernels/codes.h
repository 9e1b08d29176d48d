/* Packing of codes, the counterpart of restore.h. */
#ifndef SL_CODES_H
#define SL_CODES_H

#include "base/base.h"

/* Codes of a block, which fill whole bytes in every order. */
#define SL_CODES_UNIT ((uint64_t)32)

/* The byte of a row at which a code begins. */
static inline uint64_t sl_codes_begin(const sl_codes *codes, uint64_t first) {
    uint64_t bits = (uint64_t)codes->bits;
    return codes->block_bytes > 0 ? first / SL_CODES_UNIT * codes->block_bytes
                                  : first / 8 * bits + first % 8 * bits / 8;
}

/* Sets *bytes to the bytes from the first code of a row to the last. Returns false if they do not fit in 64 bits. */
bool sl_codes_bytes(const sl_codes *codes, uint64_t width, uint64_t *bytes);

/* Packs codes [first, first + count) of the row at `row` from the low bits of a byte each. Codes that begin within a
 * byte are added to it; the bits after the last code become 0. In blocks and in other orders than a stream, `first` and
 * `count` are whole blocks or words. */
void sl_codes_put(const sl_codes *codes, const uint8_t *bytes, uint64_t first, uint64_t count, uint8_t *row);

/* The least number of words to turn. */
#define SL_CODES_LANES ((uint64_t)4)

/* Transposes eight rows of `count` words of eight nibbles, `step` bytes apart. `out` gets eight lines of `count` words:
 * word i of line n holds nibble n of word i of each row, as SL_ORDER_STREAM or SL_ORDER_WORDS. Each word is first
 * combined with `flip` by an exclusive or. */
void sl_codes_turn(int order, uint32_t flip, const uint8_t *words, uint64_t step, uint64_t count, uint8_t *out);

#endif
