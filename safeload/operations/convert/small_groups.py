"""Quantize small tensors in groups, ahead of the writer that takes them one by one."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ...base import log
from ...base.arrays import Array
from ...base.scheme import INT8, SCHEMES
from ...engine.codes.quantized_tensor import QuantizedTensor, storage_of
from ...engine.codes.source import Source
from ..quantize.quantize import Request, Rounding, maxima_of, run_requests, scales_of

# A group is small enough for the caches, and large enough that a tensor takes little time beside its bytes.
_TENSORS, _BYTES = 256, 1 << 20
# Bytes of the largest magnitudes of int8 tensors that are kept between their scales and their codes.
_KEPT_BYTES = 16 << 20


class SmallTensor(NamedTuple):
    """A tensor to quantize."""

    scheme: str
    shape: tuple[int, ...]
    axis: int | None  # of the scales
    nbytes: int  # in the source
    source: Callable[[], Source]  # opens its values
    rounding: Rounding | None


class SmallGroups:
    """Quantizes small tensors in groups: a writer asks for tensors in order, and a group is the next few."""

    def __init__(self, threads: int | None) -> None:
        self._threads = threads
        self._tensors: dict[str, SmallTensor] = {}
        self._waiting: dict[tuple[str, str], OrderedDict[str, None]] = {}  # names in order, by scheme and part
        self._codes: dict[str, Array] = {}
        self._maxima: dict[str, Array] = {}
        self._maxima_bytes = 0
        # After a failure all tensors are quantized alone, so that the writer gets the error of the tensor it asked for.
        self._failed = False

    def add(self, name: str, tensor: SmallTensor) -> None:
        """Add a tensor to quantize."""
        self._tensors[name] = tensor

    def begin(self, names: Iterable[str]) -> None:
        """Set the order in which a writer asks for tensors; without an order each is quantized alone."""
        self._waiting = {}
        self._codes, self._maxima, self._maxima_bytes = {}, {}, 0
        for name in names:
            tensor = self._tensors.get(name)
            for part in () if tensor is None else ("scale", "codes") if tensor.scheme == INT8 else ("codes",):
                self._waiting.setdefault((self._tensors[name].scheme, part), OrderedDict())[name] = None

    def codes(self, name: str) -> Array:
        """Return the codes of a tensor."""
        if name not in self._codes:
            self._codes.update(self._in_group(name, "codes", self._quantize))
        codes = self._codes.pop(name)
        self._forget(name)
        return codes

    def scale(self, name: str) -> Array:
        """Return the scales of an int8 tensor, like `codes`."""
        maxima = self._maxima.get(name)
        if maxima is None:
            for each, bits in self._in_group(name, "scale", self._largest).items():
                self._keep(each, bits)
                maxima = bits if each == name else maxima
        assert maxima is not None
        _, scale = storage_of(INT8, self._tensors[name].shape, self._tensors[name].axis)
        assert scale is not None
        return scales_of(maxima)[0].reshape(scale[1])

    def _in_group(
        self, name: str, part: str, run: Callable[[Mapping[str, SmallTensor]], dict[str, Array]]
    ) -> dict[str, Array]:
        """Call a function with a tensor and its successors, or with the tensor alone if they fail together."""
        group = self._next(name, part)
        if len(group) > 1:
            try:
                return run(group)
            except Exception as error:
                log.debug("a group of %d small tensors failed: %s", len(group), error)
                self._failed = True
        return run({name: self._tensors[name]})

    def _next(self, name: str, part: str) -> dict[str, SmallTensor]:
        """Return a tensor and its successors in the order of the writer; the tensor alone if it is out of order."""
        group, size = {name: self._tensors[name]}, self._tensors[name].nbytes
        waiting = self._waiting.get((group[name].scheme, part), OrderedDict())
        if self._failed or next(iter(waiting), None) != name:
            waiting.pop(name, None)
            return group
        for other in waiting:
            if other == name:
                continue
            size += self._tensors[other].nbytes
            if size > _BYTES or len(group) == _TENSORS:
                break
            group[other] = self._tensors[other]
        for other in group:
            del waiting[other]
        return group

    def _largest(self, group: Mapping[str, SmallTensor]) -> dict[str, Array]:
        maxima = maxima_of([(tensor.source(), tensor.axis) for tensor in group.values()], self._threads)
        return dict(zip(group, maxima, strict=True))

    def _quantize(self, group: Mapping[str, SmallTensor]) -> dict[str, Array]:
        layouts = [storage_of(tensor.scheme, tensor.shape, tensor.axis) for tensor in group.values()]
        requests, position = [], 0
        memory = np.empty(sum(math.prod(codes[1]) for codes, _ in layouts), np.uint8)
        for (name, tensor), (codes, scale) in zip(group.items(), layouts, strict=True):
            data: Array = np.ndarray(codes[1], codes[0], memory, position)
            position += math.prod(codes[1])
            scales = None if scale is None else np.zeros(scale[1], scale[0])
            result = QuantizedTensor(tensor.scheme, tensor.shape, data, scales, tensor.axis)
            target = SCHEMES[tensor.scheme].target(tensor.rounding)
            requests.append(Request(tensor.source(), result, target, maxima=self._maxima.get(name)))
        run_requests(requests, threads=self._threads, progress=None)
        return {name: request.result.data for name, request in zip(group, requests, strict=True)}  # type: ignore[misc]

    def _keep(self, name: str, maxima: Array) -> None:
        if self._maxima_bytes + maxima.nbytes <= _KEPT_BYTES:
            self._maxima[name] = maxima
            self._maxima_bytes += maxima.nbytes

    def _forget(self, name: str) -> None:
        maxima = self._maxima.pop(name, None)
        self._maxima_bytes -= 0 if maxima is None else maxima.nbytes
