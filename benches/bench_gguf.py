"""GGUF files against gguf-py: opening one with a long vocabulary, reading its tokens, writing it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import files
import numpy as np
import pytest
from builders import gguf_build as g
from compare import Comparison, race, ratio

import safeload
from safeload import gguf as ours_gguf

gguf = pytest.importorskip("gguf", reason="gguf is absent")

PEER = "gguf-py GGUFReader"
TOKENS, LAYERS = 250_000, 32


@pytest.fixture(scope="module")
def vocabulary() -> Path:
    path = files.CACHE / f"vocabulary-v{files.VERSION}.gguf"
    if not path.exists():
        files.CACHE.mkdir(parents=True, exist_ok=True)
        make_vocabulary(path)
    return path


def make_vocabulary(path: Path) -> None:
    """As large models have it: 250,000 tokens with scores and types, as many merges, 290 small tensors.

    Of the format's own fields, by neither library.
    """
    rng = np.random.default_rng(6)
    sizes = rng.integers(1, 12, TOKENS)
    letters = rng.integers(97, 123, int(sizes.sum()), np.uint8).tobytes().decode()
    ends = np.cumsum(sizes).tolist()
    tokens = [letters[end - size : end] for end, size in zip(ends, sizes.tolist(), strict=True)]
    merges = [f"{a} {b}" for a, b in zip(tokens, reversed(tokens), strict=True)]
    entries = [
        g.entry("general.architecture", g.STRING, "llama"),
        g.entry("llama.block_count", g.U32, LAYERS),
        g.entry("tokenizer.ggml.tokens", g.ARRAY, (g.STRING, tokens)),
        g.entry("tokenizer.ggml.scores", g.ARRAY, (g.F32, rng.standard_normal(TOKENS).tolist())),
        g.entry("tokenizer.ggml.token_type", g.ARRAY, (g.I32, [1] * TOKENS)),
        g.entry("tokenizer.ggml.merges", g.ARRAY, (g.STRING, merges)),
    ]
    names = ["token_embd.weight", *(f"blk.{layer}.{part}.weight" for layer in range(LAYERS) for part in "abcdefghi")]
    tensors = [g.tensor(name, (64,), 0, 256 * k) for k, name in enumerate(names)]
    path.write_bytes(g.build(entries, tensors, np.ones(64 * len(names), "<f4").tobytes()))


def _tokens_of_peer(reader: Any) -> list[str]:
    return reader.fields["tokenizer.ggml.tokens"].contents()


def _same_tensors(mine: list[str], theirs: list[str]) -> None:
    assert mine == theirs
    assert len(mine) == 9 * LAYERS + 1


def test_open_a_long_vocabulary(vocabulary: Path, table, report) -> None:
    def ours() -> list[str]:
        with safeload.open(vocabulary) as opened:
            return list(opened)

    def theirs() -> list[str]:
        return [tensor.name for tensor in gguf.GGUFReader(vocabulary).tensors]

    def limit() -> list[str]:  # what no reader is spared
        with open(vocabulary, "rb") as file:
            file.read()
        return names

    names = theirs()
    mine = race({"ours": ours, "limit": limit}, 30, check=_same_tensors)
    pairs = ratio(ours, theirs, 2, check=_same_tensors)
    rows = [
        table.add("open and list, 250,000 tokens", PEER, pairs, target=50),
        table.add("open and list, 250,000 tokens", "limit: read the file", Comparison(mine["ours"], mine["limit"])),
    ]
    report(ours, rows, rounds=10)


def test_tokens_of_a_long_vocabulary(vocabulary: Path, table, report) -> None:
    def ours() -> list[str]:
        with safeload.open(vocabulary) as opened:
            return opened.metadata["tokenizer.ggml.tokens"]

    def theirs() -> list[str]:
        return _tokens_of_peer(gguf.GGUFReader(vocabulary))

    def check(mine: list[str], other: list[str]) -> None:
        assert mine == other

    row = table.add("open and read 250,000 tokens", PEER, ratio(ours, theirs, 1, check=check))
    report(ours, [row], rounds=5)


def test_write_a_long_vocabulary(vocabulary: Path, tmp_path: Path, table, report) -> None:
    reader = gguf.GGUFReader(vocabulary)
    tensors, tokens = safeload.load(vocabulary), _tokens_of_peer(reader)
    with safeload.open(vocabulary) as opened:
        metadata = opened.metadata

    def save(given: Any) -> Callable[[], bytes]:
        def run() -> bytes:
            ours_gguf.save_file(tensors, tmp_path / "ours.gguf", given, durable=False)
            return b""

        return run

    def theirs() -> bytes:
        writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
        writer.add_array("tokenizer.ggml.tokens", tokens)
        for name, array in tensors.items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return b""

    peer = "gguf-py GGUFWriter"
    mine = {"tokenizer.ggml.tokens": tokens}
    row = table.add("write 250,000 tokens, durable=False", peer, ratio(save(mine), theirs, 3))
    kept = ratio(save(metadata), theirs, 3)
    second = table.add("write them and 250,000 merges as they were read", peer, kept)
    report(save(metadata), [row, second], rounds=3)
