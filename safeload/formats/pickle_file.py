"""Files of pickle.dump with NumPy arrays in dicts, lists and tuples: one pickle per file, of any protocol."""

from __future__ import annotations

import mmap
import os
import re
from functools import partial
from typing import Any

from ..base.messages import error_about
from ..base.text import clip, printable, show
from ..engine.run.weight_file import WeightFile
from ..errors import ForbiddenError, SafeloadError, UnsupportedError
from ..stores.local import LocalStore
from . import paddle
from .foreign import HEAD_SIZE
from .registry import Candidate, Content, OpenRequest
from .torch.globals import ALLOWED, TENSOR, Storage
from .torch.legacy_file import EXTRACTED, pickle_at, storage_in
from .torch.tensors import PickleTables, content_of, make_tables
from .unpickle import run
from .unpickle.machine import Fault, Foreign, Global, Inert, describe
from .unpickle.numpy_arrays import NumpyArray
from .unpickle.run import Unpickled, check_foreign

# The function that pickle calls for the storage of a tensor: its argument is a torch file of the format before 1.6.
_LOAD = "torch.storage._load_from_bytes"


def _load_from_bytes(args: tuple[Any, ...]) -> Any:
    if len(args) != 1 or type(args[0]) is not bytes:
        raise Fault(f"{_LOAD} takes bytes of at most {run.MAX_PICKLE} bytes, got {describe(args)}")
    try:
        return storage_in(args[0], _LOAD)
    except SafeloadError as error:
        raise Fault(str(error), UnsupportedError) from None


# `scan` does not know the last row, because torch itself executes the pickle in the bytes.
_TABLE = {**ALLOWED, _LOAD: Global(_LOAD, TENSOR, _load_from_bytes, copies=True)}

# Functions that make an object of their first argument, in pickles of protocols 0 and 1.
_RECONSTRUCTORS = ("copy_reg._reconstructor", "copyreg._reconstructor")
# The first class of scikit-learn in a pickle: module and class are two strings, or two lines of protocol 0.
_ESTIMATOR = re.compile(rb"sklearn\.[\w.]+(?:\x94\x8c.|\n)(\w+)", re.DOTALL)


def _locate(storage: Storage) -> int:
    raise UnsupportedError(f"storage {show(storage.key)} is not in a pickle")


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Read the table of an open file; see `read_tables`."""
    return content_of(candidate.file, request, lambda request: read_tables(candidate.file, request))


def read_tables(file: WeightFile, request: OpenRequest, begin: int = 0) -> PickleTables:
    """Return the arrays of the pickle at ``begin``; bytes before it belong to an object array of `numpy.save`."""
    path = file.path
    pickled = _unpickle(file, request, begin)
    if type(pickled.value) is NumpyArray and pickled.value.items is not None:
        items, shape = pickled.value.items, pickled.value.shape
        pickled = pickled._replace(value=items[0] if shape == () and len(items) == 1 else items)
    is_paddle = paddle.is_paddle(pickled.value, path)
    if is_paddle:
        paddle.plain(pickled.value)
    tables = make_tables(pickled, request, path, _locate)
    if is_paddle:
        tables = paddle.adapt(pickled.value, tables, file, whole=request.root is None)
    if not tables.names:
        raise error_about(
            UnsupportedError,
            f"this is a pickle that torch.save did not write (it holds {describe(pickled.value)}), without NumPy "
            "arrays; only tensors and arrays can be read from pickles",
            path=path,
        )
    end = begin + pickled.end
    if end < file.size:
        raise error_about(
            UnsupportedError,
            f"{file.size - end} bytes follow the pickle, which ends at byte {end}; files of several "
            "pickles are not supported",
            path=path,
        )
    return tables


def _run(file: WeightFile, begin: int, *, inert: bool) -> Unpickled:
    """Run the pickle of a file. A pickle that is too large for memory is mapped, and its arrays stay where they are."""
    data = _mapped(file) if file.size > run.MAX_PICKLE and not begin else None
    if data is None:
        return pickle_at(file, begin, None, inert, _TABLE)
    return run.unpickle(data, _TABLE, _refuse_id, path=file.path, inert=inert)


def _mapped(file: WeightFile) -> Any:
    """Map a local file; None if the system or the store cannot."""
    store = file.store
    if not isinstance(store, LocalStore) or os.name == "nt":
        return None
    try:
        return store.use(partial(mmap.mmap, access=mmap.ACCESS_READ), 0)
    except (OSError, ValueError):
        return None


def _refuse_id(value: Any) -> Any:
    raise Fault(EXTRACTED)


def _unpickle(file: WeightFile, request: OpenRequest, begin: int) -> Unpickled:
    """Run the pickle of a file, with errors that name its kind if it has unknown globals."""
    path = file.path
    try:
        return _run(file, begin, inert=False)
    except ForbiddenError as error:
        if "joblib.numpy_pickle" in str(error):
            model = _ESTIMATOR.search(file.read_at(0, HEAD_SIZE))
            kind = f"a joblib file with a scikit-learn model ({model[1].decode()})" if model else "a joblib file"
            text = f"this is {kind}, which stores arrays between the opcodes of a pickle; "
            advice = "load it with joblib and save the arrays with numpy.savez or as safetensors"
            raise error_about(UnsupportedError, text + advice, path=path) from None
        try:
            pickled = _run(file, begin, inert=True)
        except SafeloadError:
            if request.inert:
                raise
            raise error from None
    root = pickled.value
    clause = "the pickle references"
    if type(root) in (Inert, Foreign):
        if root.name in _RECONSTRUCTORS and root.args and type(root.args[0]) is Foreign:  # protocols 0 and 1
            root = root.args[0]
        name = clip(printable(root.name), 200)
        clause = f"this is a pickle of {name}, not of weights alone: it references"
        if name.startswith("sklearn."):
            clause = f"this is a scikit-learn model ({name.rpartition('.')[2]}), not weights: it references"
    check_foreign(pickled.foreign, path, request.inert, clause)
    return pickled
