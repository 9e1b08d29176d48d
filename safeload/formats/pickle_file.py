"""Files of pickle.dump with numpy arrays in dicts, lists and tuples: one pickle per file, of any protocol."""

from __future__ import annotations

import re

from ..base.text import clip, printable, show
from ..engine.run.weight_file import WeightFile
from ..errors import ForbiddenError, SafeloadError, UnsupportedError
from .foreign import HEAD_SIZE
from .registry import Candidate, Content, OpenRequest
from .torch.globals import Storage
from .torch.legacy_file import pickle_at
from .torch.tensors import Made, content_of, make_table
from .unpickle.machine import Foreign, Inert, describe
from .unpickle.run import check_foreign

# What pickles of protocols 0 and 1 call to make an object, whose class is the first argument.
_RECONSTRUCTORS = ("copy_reg._reconstructor", "copyreg._reconstructor")
# The first class of scikit-learn that a pickle names: module and class are two strings, or two lines of protocol 0.
_ESTIMATOR = re.compile(rb"sklearn\.[\w.]+(?:\x94\x8c.|\n)(\w+)", re.DOTALL)


def _locate(storage: Storage) -> int:
    raise UnsupportedError(f"storage {show(storage.key)} is not in a pickle")


def read(candidate: Candidate, wanted: OpenRequest) -> Content:
    """An open file with its table; see `read_table`."""
    return content_of(candidate.file, wanted, lambda wanted: read_table(candidate.file, wanted))


def read_table(file: WeightFile, wanted: OpenRequest) -> Made:
    """The arrays of a file.

    Raises:
        UnsupportedError: the pickle holds no array, or one of an unsupported dtype, or other bytes follow it.
        FormatError, ForbiddenError, LimitError, TensorNotFoundError: see the modules used.
        OSError: the file cannot be read.
    """
    path = file.path
    try:
        found = pickle_at(file, 0, None, inert=False)
    except ForbiddenError as error:
        if "joblib.numpy_pickle" in str(error):
            model = _ESTIMATOR.search(file.read_at(0, HEAD_SIZE))
            what = f" with a scikit-learn model ({model[1].decode()})" if model is not None else ""
            raise UnsupportedError(
                f"{path}: this is a file of joblib{what}, which puts the bytes of arrays between the opcodes of a "
                "pickle; load it where it was made and save the arrays with numpy.savez or as safetensors"
            ) from None
        try:
            found = pickle_at(file, 0, None, inert=True)
        except SafeloadError:
            if wanted.inert:
                raise
            raise error from None
        root = found.value
        asks = "the pickle asks"
        if type(root) in (Inert, Foreign):
            if root.name in _RECONSTRUCTORS and root.args and type(root.args[0]) is Foreign:  # protocols 0 and 1
                root = root.args[0]
            name = clip(printable(root.name), 200)
            asks = f"this is a pickle of {name}, not of weights alone: it asks"
            if name.startswith("sklearn."):
                asks = f"this is a scikit-learn model ({name.rpartition('.')[2]}), not weights: it asks"
        check_foreign(found.foreign, path, wanted.inert, asks)
    made = make_table(found, wanted, path, _locate)
    if not made.names:
        raise UnsupportedError(
            f"{path}: this is a pickle that torch.save did not write (it holds {describe(found.value)}) and that has "
            "no array of numpy; only tensors and arrays are read from pickles"
        )
    if found.end < file.size:
        raise UnsupportedError(
            f"{path}: {file.size - found.end} bytes follow the pickle, which ends at byte {found.end}; files of "
            "several pickles are not supported"
        )
    return made
