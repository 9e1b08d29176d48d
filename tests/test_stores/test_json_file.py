"""JSON beside weights: one reader for index.json, config.json, layouts and manifests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from builders import inside
from builders.holes import extend

import safeload
from safeload import FormatError
from safeload.numpy import save_file

needs_fifo = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFO here")


@pytest.fixture
def folder(tmp_path):
    """A model whose config.json the test writes."""
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "model.safetensors", durable=False)
    return tmp_path


def config_of(folder):
    with safeload.open(folder) as opened:
        return opened.config


def nested(depth, opening="[", closing="]"):
    return '{"x":' + opening * (depth - 1) + closing * (depth - 1) + "}"


@pytest.mark.parametrize("text", ["{}", '{"a": [1, {"b": null}]}', nested(64), "\ufeff{}"])
def test_what_is_within_the_limits_is_read(text, folder):
    (folder / "config.json").write_text(text, "utf-8")
    assert config_of(folder) == json.loads(text.removeprefix("\ufeff"))


@pytest.mark.parametrize(
    "text",
    [
        nested(65),
        nested(65, '[{"k":', "}]").replace("[]", "[0]"),
        nested(2000),
        nested(200_000),
        '{"a":' * 200_000,
    ],
    ids=["one more", "objects", "2,000", "200,000", "200,000 open"],
)
def test_deep_nesting_is_refused(text, folder):
    path = folder / "config.json"
    path.write_text(text)
    with pytest.raises(FormatError) as caught:
        safeload.open(folder)
    assert caught.value.path == str(path)


def test_the_limit_of_size_is_judged_before_a_byte_is_read(folder):
    path = folder / "config.json"
    with path.open("wb") as file:
        extend(file, 1 << 40)
    with pytest.raises(FormatError, match="the limit is 67,108,864"):
        safeload.open(folder)
    path.write_bytes(b"{}".ljust(1 << 20))
    assert config_of(folder) == {}


@pytest.mark.parametrize("digits", [100, 5_000, 100_000])
def test_a_long_number_is_read_or_refused_as_python_does(digits, folder):
    path = folder / "config.json"
    path.write_text('{"x": ' + "9" * digits + "}")
    if digits == 100:
        assert config_of(folder)["x"] == 10**100 - 1
    else:
        with pytest.raises(FormatError, match="is not JSON") as caught:
            safeload.open(folder)
        assert len(str(caught.value)) < 400 + len(str(path))


def make_folder(folder, name, kind):
    folder.mkdir()
    save_file({"w": np.zeros(2, np.float32)}, folder / "model.safetensors", durable=False)
    place = folder / name
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "zero":
        place.symlink_to("/dev/zero")
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(name)


_OPEN = inside.program("""
import os, sys, safeload
try:
    import resource
    if "asan" not in os.environ.get("LD_PRELOAD", ""):  # AddressSanitizer maps terabytes
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
except ImportError: pass
calls = {
    "open": lambda path, name: safeload.open(path),
    "index": lambda path, name: safeload.open(f"{path}/{name}"),
    "layout": lambda path, name: safeload.Layout.from_json(f"{path}/{name}"),
    "manifest": lambda path, name: safeload.verify(path + "/a.safetensors", f"{path}/{name}"),
    "config": lambda path, name: safeload.check(path + "/a.safetensors", config=f"{path}/{name}"),
}
for call in calls:
    try: calls[call](*sys.argv[1:])
    except (safeload.SafeloadError, OSError): print(call, "is refused")
""")


@needs_fifo
@pytest.mark.parametrize("kind", ["fifo", "zero", "loop"])
def test_what_is_no_regular_file_is_neither_waited_for_nor_read(kind, tmp_path):
    if kind == "zero" and not Path("/dev/zero").exists():
        pytest.skip("no /dev/zero here")
    name = "model.safetensors.index.json"
    make_folder(tmp_path / "model", name, kind)
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "a.safetensors")  # not the model by itself
    done = subprocess.run(
        [sys.executable, "-c", _OPEN, str(tmp_path / "model"), name],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    calls = ("open", "index", "layout", "manifest", "config")
    assert done.stdout.splitlines() == [f"{call} is refused" for call in calls], done.stderr


@needs_fifo
@pytest.mark.parametrize("kind", ["fifo", "zero"])
def test_a_config_that_is_no_regular_file_is_refused(kind, tmp_path):
    make_folder(tmp_path / "model", "config.json", kind)
    with pytest.raises(FormatError, match=r"config\.json is not a regular file"):
        safeload.open(tmp_path / "model")
