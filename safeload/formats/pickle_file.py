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
from .torch.globals import ALLOWED, Storage
from .torch.legacy_file import EXTRACTED, pickle_at
from .torch.tensors import PickleTables, content_of, make_tables
from .unpickle import run
from .unpickle.machine import Fault, Foreign, Inert, describe
from .unpickle.run import Unpickled, check_foreign

# Functions that make an object of their first argument, in pickles of protocols 0 and 1.
_RECONSTRUCTORS = ("copy_reg._reconstructor", "copyreg._reconstructor")
# The first class of scikit-learn in a pickle: module and class are two strings, or two lines of protocol 0.
_ESTIMATOR = re.compile(rb"sklearn\.[\w.]+(?:\x94\x8c.|\n)(\w+)", re.DOTALL)


def _locate(storage: Storage) -> int:
    raise UnsupportedError(f"storage {show(storage.key)} is not in a pickle")


def read(candidate: Candidate, request: OpenRequest) -> Content:
    """Read the table of an open file; see `read_tables`."""
    return content_of(candidate.file, request, lambda request: read_tables(candidate.file, request))


def read_tables(file: WeightFile, request: OpenRequest) -> PickleTables:
    """Return the arrays of a file.

    Raises:
        UnsupportedError: the pickle holds no array or an array of an unsupported dtype, or bytes follow the pickle.
        FormatError, ForbiddenError, LimitError, TensorNotFoundError: see the modules used.
        OSError: the file cannot be read.
    """
    path = file.path
    pickled = _unpickle(file, request)
    tables = make_tables(pickled, request, path, _locate)
    if paddle.is_paddle(pickled.value, path):
        tables = paddle.adapt(pickled.value, tables, file, whole=request.root is None)
    if not tables.names:
        raise error_about(
            UnsupportedError,
            f"this is a pickle that torch.save did not write (it holds {describe(pickled.value)}), without NumPy "
            "arrays; only tensors and arrays can be read from pickles",
            path=path,
        )
    if pickled.end < file.size:
        raise error_about(
            UnsupportedError,
            f"{file.size - pickled.end} bytes follow the pickle, which ends at byte {pickled.end}; files of several "
            "pickles are not supported",
            path=path,
        )
    return tables


def _run(file: WeightFile, *, inert: bool) -> Unpickled:
    """Run the pickle of a file. A pickle that is too large for memory is mapped, and its arrays stay where they are."""
    data = _mapped(file) if file.size > run.MAX_PICKLE else None
    if data is None:
        return pickle_at(file, 0, None, inert=inert)
    return run.unpickle(data, ALLOWED, _refuse_id, path=file.path, inert=inert)


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


def _unpickle(file: WeightFile, request: OpenRequest) -> Unpickled:
    """Run the pickle of a file, with errors that name its kind if it has unknown globals."""
    path = file.path
    try:
        return _run(file, inert=False)
    except ForbiddenError as error:
        if "joblib.numpy_pickle" in str(error):
            model = _ESTIMATOR.search(file.read_at(0, HEAD_SIZE))
            kind = f"a joblib file with a scikit-learn model ({model[1].decode()})" if model else "a joblib file"
            text = f"this is {kind}, which stores arrays between the opcodes of a pickle; "
            advice = "load it with joblib and save the arrays with numpy.savez or as safetensors"
            raise error_about(UnsupportedError, text + advice, path=path) from None
        try:
            pickled = _run(file, inert=True)
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
