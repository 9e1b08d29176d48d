"""backend="pread" against runai-model-streamer. The last file in the alphabet: its Python layer imports torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_load import plain_pread, prepare
from compare import Comparison, race, same_bytes

import safeload.numpy

ROUNDS = 9  # medians of three vary from 0.5 to 1.2
STRATEGY = "RUNAI_STREAMER_FS_STRATEGY"


def _streamer(path: Path, strategy: str | None) -> Callable[[], dict[str, Any]]:
    """All tensors through the streamer's own API, kept, as a loader would.

    Args:
        path: the file.
        strategy: how it reads. None for its default, which reads the disk directly, whatever the page cache holds.
    """
    from runai_model_streamer import SafetensorsStreamer

    def load() -> dict[str, Any]:
        if strategy is None:
            os.environ.pop(STRATEGY, None)
        else:
            os.environ[STRATEGY] = strategy
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path))
            return dict(streamer.get_tensors())

    return load


def _same(ours: dict[str, Any], theirs: Any) -> None:
    import torch

    if not isinstance(theirs, dict):  # the limit
        return
    assert sorted(ours) == sorted(theirs)
    for name, array in ours.items():
        tensor = theirs[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (torch.bfloat16, array.shape), name
        assert same_bytes(array, tensor.view(torch.uint8).numpy()), name


def test_pread_against_the_streamer(llama: Path, table, report) -> None:
    pytest.importorskip("runai_model_streamer", exc_type=ImportError, reason="runai-model-streamer or torch is absent")
    logging.getLogger("runai_model_streamer").setLevel(logging.WARNING)
    sides: dict[str, Callable[[], Any]] = {"ours": lambda: safeload.numpy.load_file(llama, backend="pread")}
    for strategy in ("io_uring_buffered", "sync_buffered", None):
        load = _streamer(llama, strategy)
        try:
            load()
        except Exception as error:  # whatever it raises where the kernel has no io_uring
            print(f"runai-model-streamer with {strategy}: {error}")
            continue
        sides[f"runai-model-streamer, {strategy or 'default (direct reads)'}"] = load
    sides["limit: preadv into one fresh array"] = plain_pread(llama)
    try:
        samples = race(sides, ROUNDS, check=_same, prepare=prepare(llama))
    finally:
        os.environ.pop(STRATEGY, None)
    rows = [
        table.add(
            'load_file 2.5 GB, backend="pread"',
            name,
            Comparison(samples["ours"], samples[name]),
            target=1 if name.startswith("runai") else None,
        )
        for name in sides
        if name != "ours"
    ]
    report(sides["ours"], rows, rounds=1, prepare=prepare(llama))
