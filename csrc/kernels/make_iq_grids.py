"""Writes iq_grids.c, the grids of ggml's IQ types, from gguf-py: ``python csrc/kernels/make_iq_grids.py``.

The grids are data: found once by a search, and part of the format since. gguf-py has them packed like this file, 16
bits an entry. ``tests/test_core/test_dequantization.py`` makes the file again and compares.
"""

from pathlib import Path

from gguf import quants

PATH = Path(__file__).with_name("iq_grids.c")

# Name, C type of an entry, macro that unpacks four, and who has it in gguf-py.
GRIDS = (
    ("iq2_xxs", "uint64_t", "TWO", quants.IQ2_XXS),
    ("iq2_xs", "uint64_t", "TWO", quants.IQ2_XS),
    ("iq2_s", "uint64_t", "TWO", quants.IQ2_S),
    ("iq3_xxs", "uint32_t", "THREE", quants.IQ3_XXS),
    ("iq3_s", "uint32_t", "THREE", quants.IQ3_S),
    ("iq1", "uint64_t", "TWO", quants.IQ1_S),
)

HEAD = """\
/* The grids of ggml's IQ types, written by make_iq_grids.py: do not edit. */
#include "kernels/iq_grids.h"

/* clang-format off */

/* Four entries of 16 bits, the first on the left. */
#define SPLIT(unpack, word) unpack((word) >> 48), unpack((word) >> 32), unpack((word) >> 16), unpack(word),

/* 8 codes of 2 bits to bytes: halves, quarters and codes move apart. A product adds a copy that does not overlap. */
#define HALVES(word) (((word) & UINT64_C(0xffff)) * 0x1000001 & 0x000000ff000000ff)
#define QUARTERS(word) (HALVES(word) * 0x1001 & 0x000f000f000f000f)
#define BYTES(word) (QUARTERS(word) * 0x41 & 0x0303030303030303)
#define TWO(hex) SPLIT(BYTES, UINT64_C(0x##hex))

/* 4 codes of 3 bits, which have 4 bits each here, to bytes. */
#define PAIRS(word) ((((word) & UINT64_C(0xffff)) | ((word) & UINT64_C(0xffff)) << 8) & 0x00ff00ff)
#define NIBBLES(word) (uint32_t)(PAIRS(word) * 0x11 & 0x0f0f0f0f)
#define THREE(hex) SPLIT(NIBBLES, UINT64_C(0x##hex))
"""

COLUMNS = 5


def grid(name: str, kind: str, macro: str, owner: type) -> str:
    """The definition of a grid.

    Raises:
        ValueError: gguf-py packs it in some other way than the macros unpack it.
    """
    count, codes = owner.grid_shape
    packed = bytes.fromhex(owner.grid_hex.decode())
    if (codes, len(packed)) != ({"TWO": 8, "THREE": 4}[macro], 2 * count):
        raise ValueError(f"{name}: {len(packed)} bytes for {count} entries of {codes} codes")
    entries = [f"{packed[k + 1]:02x}{packed[k]:02x}" for k in range(0, len(packed), 2)]
    words = [f"{macro}({''.join(entries[k : k + 4])})" for k in range(0, count, 4)]
    lines = ["    " + "".join(words[k : k + COLUMNS]) for k in range(0, len(words), COLUMNS)]
    return "\n".join([f"\nconst {kind} sl_grid_{name}[{count}] = {{", *lines, "};\n"])


def values(name: str, plus: list[int], minus: list[int]) -> str:
    """The definition of what codes are worth, without and with the bit that says "minus"."""
    both = plus + [0] * (8 - len(plus)) + minus + [0] * (8 - len(minus))
    return f"\nconst int8_t sl_values_{name}[16] = {{{', '.join(map(str, both))}}};\n"


def source() -> str:
    """The text of the file."""
    text = [HEAD, *(grid(*row) for row in GRIDS)]
    for name, owner in (("iq2", quants.IQ2_S), ("iq3_xxs", quants.IQ3_XXS), ("iq3_s", quants.IQ3_S)):
        text.append(values(name, list(owner.grid_map), [-value for value in owner.grid_map]))
    # What is added to the codes of IQ1 is an eighth: eight times the sums are integers.
    codes, eighth = quants.IQ1_S.grid_map, float(quants.IQ1_S.delta)
    text.append(values("iq1", [round(8 * (x + eighth)) for x in codes], [round(8 * (x - eighth)) for x in codes]))
    return "".join(text)


if __name__ == "__main__":
    PATH.write_text(source(), encoding="utf-8")
