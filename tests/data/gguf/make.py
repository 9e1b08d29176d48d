"""Makes iq.gguf again: weights that ggml's own quantizers put into grids, in a file that gguf-py writes.

    pip install gguf==0.19.0 pywhispercpp==1.5.1
    python tests/data/gguf/make.py

It looks like a file of dynamic quantization: each layer has the type that its importance asks for, the norms are f32.
ggml searches its grids for neighbours first, which takes half a minute.
"""

import ctypes
import sys
from pathlib import Path

import gguf
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from builders import ggml_reference  # noqa: E402
from builders.iq_weights import METADATA, TYPES, weights  # noqa: E402


def quantize(library: ctypes.CDLL, scheme: str, x: np.ndarray) -> np.ndarray:
    """Blocks [rows, bytes of a row] as ggml makes them where every column is as important as another."""
    kind = gguf.GGMLQuantizationType[scheme.upper()]
    if scheme.startswith("iq3"):
        library.iq3xs_init_impl(ctypes.c_int({"iq3_xxs": 256, "iq3_s": 512}[scheme]))
    else:
        library.iq2xs_init_impl(ctypes.c_int(kind))
    rows, columns = x.shape
    block, size = gguf.GGML_QUANT_SIZES[kind]
    out, importance = np.zeros((rows, columns // block * size), np.uint8), np.ones(columns, np.float32)
    function = getattr(library, f"quantize_{scheme}")
    function.restype = ctypes.c_size_t
    places = (ctypes.c_void_p(array.ctypes.data) for array in (x, out))
    counts = ctypes.c_int64(rows), ctypes.c_int64(columns)
    assert function(*places, *counts, ctypes.c_void_p(importance.ctypes.data)) == out.nbytes
    return out


def main() -> None:
    library = ggml_reference.load()
    assert library is not None, "pywhispercpp, whose wheel holds ggml, is not installed"
    writer = gguf.GGUFWriter(HERE / "iq.gguf", METADATA["general.architecture"])
    for key, value in METADATA.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        elif key != "general.architecture":
            writer.add_string(key, value)
    for name, x in weights().items():
        if name in TYPES:
            kind = gguf.GGMLQuantizationType[TYPES[name].upper()]
            writer.add_tensor(name, quantize(library, TYPES[name], x), raw_dtype=kind)
        else:
            writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
