"""safeload's exceptions, and the decorators of public functions and classes.

System errors stay ``OSError``. Invalid arguments raise ``TypeError`` or ``ValueError``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ForwardRef, TypeVar

__all__ = [
    "ForbiddenError",
    "FormatError",
    "InvalidDeviceError",
    "LimitError",
    "MissingDeviceError",
    "MissingShardError",
    "NoMatchError",
    "RangeError",
    "RemoteError",
    "RemotePermissionError",
    "RemoteTimeoutError",
    "SafeloadError",
    "SafetensorError",
    "TensorNotFoundError",
    "UnsupportedDtypeError",
    "UnsupportedError",
    "VerificationError",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)
_GENERATOR = 0x20  # inspect.CO_GENERATOR; importing inspect takes milliseconds


class SafeloadError(Exception):
    """Base class of safeload's exceptions; also available as ``SafetensorError``.

    Attributes:
        path: the file with the error; None for bytes in memory, or if no file is involved.
        offset: byte of the error in the file; None if the error has no single position.
        tensor: name of the tensor with the error; None if no single tensor is involved.

    Example:
        >>> from pathlib import Path
        >>> import safeload
        >>> Path("page.safetensors").write_text("<!DOCTYPE html>")
        15
        >>> try:
        ...     safeload.load("page.safetensors")
        ... except safeload.SafeloadError as error:
        ...     print(f"not loaded: {error}")
        not loaded: page.safetensors: this is an HTML page...
    """

    def __init__(
        self, *args: object, path: str | None = None, offset: int | None = None, tensor: str | None = None
    ) -> None:
        super().__init__(*args)
        self.path = path
        self.offset = offset
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, self.__dict__


SafetensorError = SafeloadError


class FormatError(SafeloadError, ValueError):
    """A file breaks its format. The message ends with the path and the byte offset.

    Example:
        >>> import os
        >>> import safeload
        >>> os.truncate("model.safetensors", 1_000_000)
        >>> try:
        ...     safeload.open("model.safetensors")
        ... except safeload.FormatError as error:
        ...     print(error.path, error.offset)
        model.safetensors 795
    """

    def __init__(
        self, message: str, path: str | None = None, offset: int | None = None, *, tensor: str | None = None
    ) -> None:
        super().__init__(message, path=path, offset=offset, tensor=tensor)

    def __str__(self) -> str:
        where = [] if self.path is None else [self.path]
        if self.offset is not None:
            where.append(f"byte {self.offset}")
        return f"{self.args[0]} ({', '.join(where)})" if where else str(self.args[0])


class MissingShardError(FormatError):
    """Files of a checkpoint are missing."""


class UnsupportedError(SafeloadError):
    """The input is valid, but safeload does not support it. The message suggests an alternative.

    Example:
        >>> import safeload
        >>> safeload.convert("tiny-llama", "llama.npz")
        Traceback (most recent call last):
        safeload.errors.UnsupportedError: tensor 'lm_head.weight' is bfloat16, which npz does not support: ...
    """


class ForbiddenError(SafeloadError):
    """A pickle references a global that is not on the allowlist.

    Other programs should not unpickle such a file from an untrusted source, because that could run code. safeload can
    read the tensors around unknown objects with ``unknown_globals="inert"``.

    Example:
        >>> import safeload
        >>> safeload.open("lightning.ckpt")
        Traceback (most recent call last):
        safeload.errors.ForbiddenError: lightning.ckpt: the pickle references ... my.module.Config. ...
    """


class VerificationError(SafeloadError):
    """A file is not the file of its manifest, signature or cache, or nothing there covers it.

    Example:
        >>> import safeload
        >>> safeload.load("model.safetensors", verify=True)
        Traceback (most recent call last):
        safeload.errors.VerificationError: model.safetensors: nothing to verify against: ...
    """


class LimitError(SafeloadError):
    """The input exceeds a limit of safeload.

    Example:
        >>> import pickle
        >>> import safeload
        >>> nested = []
        >>> for _ in range(300):
        ...     nested = [nested]
        >>> with open("deep.pkl", "wb") as file:
        ...     pickle.dump(nested, file)
        >>> safeload.open("deep.pkl")
        Traceback (most recent call last):
        safeload.errors.LimitError: deep.pkl: the file has more than 200 levels of containers
    """


class RangeError(SafeloadError, ValueError):
    """The target cannot represent a value: NaN or infinity when quantizing, or a block scale beyond float16.

    Example:
        >>> import numpy as np
        >>> import safeload
        >>> safeload.quantize(np.float32([0.5, np.nan]), "int8")
        Traceback (most recent call last):
        safeload.errors.RangeError: element [1] is nan: only finite numbers can be quantized
    """


class TensorNotFoundError(SafeloadError, KeyError):
    """No tensor has the requested name.

    Example:
        >>> import safeload
        >>> safeload.open("model.safetensors")["conv1.weights"]
        Traceback (most recent call last):
        safeload.errors.TensorNotFoundError: File does not contain tensor conv1.weights; similar names: ...
    """

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0])


class NoMatchError(TensorNotFoundError):
    """A pattern of ``only`` or ``drop`` matches no name.

    Example:
        >>> import safeload
        >>> safeload.load("tiny-llama", only="layers.0")
        Traceback (most recent call last):
        safeload.errors.NoMatchError: only='layers.0' matches none of 30 names, because it must match whole names; ...
    """


class UnsupportedDtypeError(SafeloadError, KeyError):
    """A tensor has a dtype that safetensors lacks. Also a KeyError, which safetensors raises for torch."""

    __str__ = SafeloadError.__str__


class InvalidDeviceError(SafeloadError, RuntimeError, ValueError):
    """The ``device`` argument names no device. Also a RuntimeError, which torch raises."""


class MissingDeviceError(UnsupportedError, RuntimeError):
    """This machine, or this build of torch, lacks the device. Also a RuntimeError, which torch raises."""


def _arguments(error: Any) -> tuple[Any, ...]:
    """Return the arguments to rebuild a system error, because ``args`` lacks its file names."""
    if error.filename2 is not None or getattr(error, "winerror", None) is not None:
        return error.errno, error.strerror, error.filename, getattr(error, "winerror", None), error.filename2
    return error.args if error.filename is None else (error.errno, error.strerror, error.filename)


def _reduced(error: Any) -> tuple[Any, ...]:
    return _made, (*type(error).__bases__, _arguments(error), vars(error))


class _ExplainedError(OSError):
    """A system error with a message of its own. Tracebacks show the name of the system error."""

    message: str

    def __str__(self) -> str:
        return self.message

    __reduce__ = _reduced


class _UnsavedError(SafeloadError):
    """A system error of saving, which is a SafetensorError too."""

    __reduce__ = _reduced


@cache
def _named_alike(base: Any, kind: Any) -> Any:
    """Return a class of errors that are both, with the name of the system error."""
    return type(kind.__name__, (base, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _made(base: Any, kind: Any, arguments: tuple[Any, ...], fields: dict[str, Any]) -> Any:
    error = _named_alike(base, kind)(*arguments)
    vars(error).update(fields)
    return error


def path_error(number: int, path: str | None, message: str) -> Any:
    """Return the error for a path that does not exist, or for a folder, with a message of its own."""
    kind = FileNotFoundError if number == errno.ENOENT else IsADirectoryError
    return _made(_ExplainedError, kind, (number, os.strerror(number), path), {"message": message})


def missing_file(path: str | None, message: str) -> FileNotFoundError:
    """Return the error for a path that does not exist. safetensors' tests assert the message's first words."""
    error: FileNotFoundError = path_error(errno.ENOENT, path, message)
    return error


def unsaved(error: OSError) -> OSError:
    """Return a system error of saving as a SafetensorError too, because safetensors raises that class."""
    kind = type(error)
    if isinstance(error, SafeloadError) or kind.__module__ != "builtins":  # errors of stores have their own classes
        return error
    saved: OSError = _made(_UnsavedError, kind, _arguments(error), {**vars(error), "path": error.filename})
    return saved


class RemoteError(OSError):
    """A remote store failed to return data: it refused the request, broke off, stalled or sent an invalid response.

    Transient errors are retried first. The message ends with the URL and the byte range.

    Attributes:
        path: the URL, without user, password and query.
        begin: first byte of the requested range; None if no range was requested.
        end: offset after the last byte of the range.
        tensor: name of the first tensor in the range; None if the range holds no tensor.
    """

    def __init__(
        self,
        message: str,
        path: str | None = None,
        begin: int | None = None,
        end: int | None = None,
        *,
        tensor: str | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.begin = begin
        self.end = end
        self.tensor = tensor

    def __str__(self) -> str:
        where = [] if self.path is None else [self.path]
        if self.begin is not None:
            where.append(f"bytes [{self.begin}, {self.end})")
        subject = "" if self.tensor is None else f"tensor {self.tensor!r}: "
        return f"{subject}{self.args[0]}" + (f" ({', '.join(where)})" if where else "")

    __reduce__ = SafeloadError.__reduce__


class RemoteTimeoutError(RemoteError, TimeoutError):
    """A remote store did not respond in time."""


class RemotePermissionError(RemoteError, PermissionError):
    """A remote store refused access: credentials are missing, wrong or expired."""


def public(function: _Function) -> _Function:
    """Decorate a public function, method or generator: tracebacks of SafeloadErrors end at its own frame."""
    if function.__code__.co_flags & _GENERATOR:

        @wraps(function)
        def boundary(*args: Any, **kwargs: Any) -> Any:
            try:
                return (yield from function(*args, **kwargs))
            except BaseException as error:
                _trim(error)
                raise

    else:

        @wraps(function)
        def boundary(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs) if kwargs else function(*args)  # without a copy of the dict
            except BaseException as error:
                _trim(error)
                raise

    return boundary  # type: ignore[return-value]


def exported(door: str = "safeload") -> Callable[[_Class], _Class]:
    """Decorate a class with the module that users import it from: pickles name that module, so they survive moves."""

    def decorate(cls: _Class) -> _Class:
        for name, hint in list(cls.__annotations__.items()):
            text = str(getattr(hint, "__forward_arg__", hint))
            if not text.replace("None", "").islower():  # `typing.get_type_hints` finds only builtins at the door
                cls.__annotations__ = {**cls.__annotations__, name: ForwardRef(text, module=cls.__module__)}
        cls.__module__ = door
        return cls

    return decorate


def _trim(error: BaseException) -> None:
    """Remove the frame of `boundary` (CPython 3.10 keeps it), and every frame after the next of a SafeloadError."""
    if error.__traceback__ is not None:
        frames = error.__traceback__.tb_next
        if frames is not None and isinstance(error, SafeloadError):
            frames.tb_next = None
        error.__traceback__ = frames


def one_line(error: BaseException) -> str:
    """Return an error as one line. System errors appear without their number, but with the byte of the failure."""
    if isinstance(error, OSError) and error.strerror is not None and error.filename is not None:
        message = str(error) if isinstance(error, _ExplainedError) else f"{error.strerror}: {error.filename}"
        return "; ".join((message, *getattr(error, "__notes__", ())))
    return str(error) or type(error).__name__


def __dir__() -> list[str]:
    return __all__
