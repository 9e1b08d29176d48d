"""Tracebacks of safeload's errors end at the public function: no frame inside the package follows."""

import asyncio
import copy
import gc
import inspect
import io
import pickle
import re
import sys
import threading
import traceback
import typing
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from builders.public import classes, functions

import safeload
from safeload import cluster, gguf, moon, plugins
from safeload.numpy import load, load_file, save, save_file

pytestmark = pytest.mark.no_core

W = np.ones((4, 64), np.float32)


@pytest.fixture
def good(tmp_path, monkeypatch):
    """A good file, a file that is cut, and a page."""
    monkeypatch.chdir(tmp_path)
    save_file({"w": W, "i": np.arange(3)}, "good.safetensors", durable=False)
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "good.safetensors").read_bytes()[:-8])
    (tmp_path / "page.safetensors").write_text("<!DOCTYPE html>")
    return tmp_path


def opened():
    return safeload.open("good.safetensors")


def closed():
    with safeload.safe_open("good.safetensors", "np") as file:
        return file


def quantized():
    return safeload.quantize(W, "q8_0")


def undecodable():
    return safeload.QuantizedTensor("q8_k", (2, 256), np.zeros((2, 292), np.uint8))


def changed(kind):
    """A checkpoint, slice or handle whose file has another size by now."""
    save_file({"w": W}, "old.safetensors", durable=False)
    opened = safeload.open("old.safetensors") if kind != "handle" else safeload.safe_open("old.safetensors")
    value = opened if kind != "slice" else opened.get_slice("w")
    save_file({"w": W, "v": W}, "old.safetensors", durable=False)
    return value


def edited(action, path="good.safetensors"):
    with safeload.edit(path) as file:
        action(file)


def loader(*arrivals):
    return safeload.PrefetchLoader(["w"], (arrival for arrival in arrivals))


def written():
    with safeload.Writer("taken.safetensors") as writer:
        writer.add("w", W)
        save_file({"w": W}, "taken.safetensors", durable=False)


def handle():
    with open("page.safetensors", "rb") as file:
        return safeload._safe_open_handle(file)


def spec(nbytes):
    return safeload.TensorSpec(dtype="float32", shape=W.shape, data_ptr=W.ctypes.data, data_len=nbytes)


def deep():
    raise safeload.LimitError("deep")


# For each public function, a call that fails.
CALLS = {
    "open": lambda: safeload.open("page.safetensors"),
    "open of an object": lambda: safeload.open(io.BytesIO(b"<!DOCTYPE html>")),
    "load": lambda: safeload.load("cut.safetensors"),
    "load of a name": lambda: safeload.load("good.safetensors", ["v"]),
    "load of a pattern": lambda: safeload.load("good.safetensors", only="v*"),
    "Checkpoint": lambda: opened()["v"],
    "Checkpoint.get_slice": lambda: opened().get_slice("v"),
    "Checkpoint.take": lambda: opened().take("v", [0]),
    "Checkpoint.load": lambda: opened().load(["v"]),
    "Checkpoint.stream": lambda: opened().stream(["v"]),
    "numpy.load": lambda: load(b"<!DOCTYPE html>"),
    "numpy.load_file": lambda: load_file("page.safetensors"),
    "numpy.load_file of a name": lambda: load_file("good.safetensors", names=["v"]),
    "numpy.save": lambda: save({"w": np.array(["text"])}),
    "numpy.save_file": lambda: save_file({"w": np.array(["text"])}, "x.safetensors"),
    "safe_open": lambda: safeload.safe_open("page.safetensors"),
    "safe_open.get_tensor": lambda: safeload.safe_open("good.safetensors").get_tensor("v"),
    "safe_open.get_slice": lambda: safeload.safe_open("good.safetensors").get_slice("v"),
    "safe_open.keys": lambda: closed().keys(),
    "deserialize": lambda: safeload.deserialize(b"<!DOCTYPE html>"),
    "info": lambda: safeload.info("page.safetensors"),
    "info of a pattern": lambda: safeload.info("good.safetensors", only="v*"),
    "check of a pattern": lambda: safeload.check("good.safetensors", only="v*"),
    "stats": lambda: safeload.stats("page.safetensors"),
    "diff": lambda: safeload.diff("good.safetensors", "page.safetensors"),
    "diff of a pattern": lambda: safeload.diff({"w": W}, {"w": W}, only="v*"),
    "quantize": lambda: safeload.quantize(W * np.nan, "q8_0"),
    "quantization_error": lambda: safeload.quantization_error({}, {"w": quantized()}),
    "load_quantized": lambda: safeload.load_quantized({"w": W * np.inf}),
    "QuantizedTensor.dequantize": lambda: safeload.QuantizedTensor(
        "q8_k", (2, 256), np.zeros((2, 292), np.uint8)
    ).dequantize(),
    "convert": lambda: safeload.convert("good.safetensors", "x.moon"),
    "convert to a folder": lambda: safeload.convert("page.safetensors", "out", max_shard_size="1GB"),
    "plan_convert": lambda: cluster.plan_convert("page.safetensors", "out", max_shard_size="1GB"),
    "save": lambda: safeload.save({"w": np.array(["text"])}, "x.safetensors"),
    "save of a generator": lambda: safeload.save(iter([("w", np.array(["text"]))]), "x.safetensors"),
    "Writer.add": lambda: safeload.Writer("x.safetensors").add("w", np.array(["text"])),
    "edit": lambda: safeload.edit("page.safetensors"),
    "make_patch": lambda: safeload.make_patch("page.safetensors", "good.safetensors", "p.safetensors"),
    "apply_patch": lambda: safeload.apply_patch("good.safetensors", "page.safetensors"),
    "moon.save_file": lambda: moon.save_file({"w": W}, "x.moon"),
    "moon.load_file": lambda: moon.load_file("page.safetensors"),
    "copy of a checkpoint": lambda: copy.copy(changed("checkpoint")),
    "deep copy of a checkpoint": lambda: copy.deepcopy(changed("checkpoint")),
    "unpickled checkpoint": lambda: pickle.loads(pickle.dumps(changed("checkpoint"))),
    "copy of a slice": lambda: copy.copy(changed("slice")),
    "deep copy of a slice": lambda: copy.deepcopy(changed("slice")),
    "unpickled slice": lambda: pickle.loads(pickle.dumps(changed("slice"))),
    "copy of safe_open": lambda: copy.copy(changed("handle")),
    "deep copy of safe_open": lambda: copy.deepcopy(changed("handle")),
    "unpickled safe_open": lambda: pickle.loads(pickle.dumps(changed("handle"))),
    "copy of SafeSlice": lambda: copy.copy(changed("handle").get_slice("w")),
    "deep copy of SafeSlice": lambda: copy.deepcopy(changed("handle").get_slice("w")),
    "unpickled SafeSlice": lambda: pickle.loads(pickle.dumps(changed("handle").get_slice("w"))),
    "len of safe_open": lambda: len(closed()),
    "iteration over safe_open": lambda: list(closed()),
    "in safe_open": lambda: "w" in closed(),
    "pickle of safe_open": lambda: pickle.dumps(closed()),
    "safe_open.offset_keys": lambda: closed().offset_keys(),
    "safe_open.metadata": lambda: closed().metadata(),
    "safe_open.get_tensors": lambda: closed().get_tensors(),
    "safe_open.get_tensor_meta": lambda: closed().get_tensor_meta("w"),
    "safe_open.prefetch": lambda: closed().prefetch(),
    "safe_open of a file object": handle,
    "SafeSlice": lambda: safeload.safe_open("good.safetensors").get_slice("w")[100],
    "PrefetchLoader.take": lambda: loader().take("v"),
    "PrefetchLoader.take, later": lambda: loader(None).take("w"),
    "PrefetchLoader": lambda: list(loader(("w", None, deep))),
    "items": lambda: dict(safeload.open("page.safetensors").items()),
    "asarray of a QuantizedTensor": lambda: np.asarray(undecodable()),
    "TensorSpec": lambda: safeload.TensorSpec(dtype="f", shape=[], data_ptr=0, data_len=0),
    "serialize": lambda: safeload.serialize({"w": spec(8)}),
    "serialize_file": lambda: safeload.serialize_file({"w": spec(8)}, "x.safetensors"),
    "scan": lambda: safeload.scan("none://x"),
    "verify": lambda: safeload.verify("good.safetensors"),
    "stack": lambda: safeload.stack("page.safetensors", safeload.layouts.MOONDREAM2),
    "Layout.from_json": lambda: safeload.Layout.from_json({"name": 1}),
    "Plan.pieces": lambda: safeload.Plan().pieces,
    "Plan.id": lambda: safeload.Plan().id,
    "run_piece": lambda: cluster.run_piece({"operation": "none"}),
    "finalize": lambda: cluster.finalize({}, []),
    "Writer": lambda: safeload.Writer("x.safetensors", metadata={"\ud800": ""}),
    "Writer.close": written,
    "Edit.rename": lambda: edited(lambda file: file.rename("v", "u")),
    "Edit: del": lambda: edited(lambda file: file.__delitem__("v")),
    "Edit: new tensor": lambda: edited(lambda file: file.__setitem__("v", quantized())),
    "Edit: metadata": lambda: edited(lambda file: file.metadata.__setitem__("k", "\ud800")),
    "plugins.as_array": lambda: plugins.as_array(SimpleNamespace(scheme="q8_0", dtype=None, shape=())),
    "gguf.save_file": lambda: gguf.save_file({"w": np.ones(3, np.uint64)}, "x.gguf"),
}


# CPython 3.10 keeps the frame of the decorator, before the frame of the function.
BOUNDARY = ("boundary",) if sys.version_info < (3, 11) else ()


def frames_inside(error):
    """The frames of safeload in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(safeload.__path__[0])]
    return [frame for frame in own if frame.name not in BOUNDARY]


@pytest.mark.parametrize("name", CALLS)
def test_the_last_frame_is_the_public_function(name, good):
    with pytest.raises(safeload.SafeloadError) as caught:
        CALLS[name]()
    inside = frames_inside(caught.value)
    assert len(inside) == 1, inside
    assert traceback.extract_tb(caught.value.__traceback__)[-1] == inside[0]
    assert inside[0].name != "boundary"
    assert inside[0].line != "raise"  # the line that failed, not the one that raised again


def test_a_stream_is_cut_where_it_fails(good):
    for by_layer in (False, True):
        (good / "cut.safetensors").write_bytes((good / "good.safetensors").read_bytes())
        stream = safeload.open("cut.safetensors").stream(by_layer=by_layer)
        with open("cut.safetensors", "r+b") as file:
            file.truncate(200)
        with pytest.raises(safeload.SafeloadError) as caught:
            list(stream)
        assert [frame.name for frame in frames_inside(caught.value)] == ["__next__"]


def test_other_errors_keep_their_frames(good):
    with pytest.raises(FileNotFoundError) as caught:
        safeload.open("missing.safetensors")
    assert [frame.name for frame in frames_inside(caught.value)][:2] == ["open", "open_paths"]


def test_a_wrong_argument_is_an_error_of_the_callers_line():
    with pytest.raises(
        TypeError, match=r"^(Checkpoint\.)?load\(\) got an unexpected keyword argument 'nothing'$"
    ) as caught:
        safeload.load("good.safetensors", nothing=1)
    assert not frames_inside(caught.value)


def test_frames_of_the_caller_stay(good):
    def outer():
        return inner()

    def inner():
        return safeload.load("page.safetensors")

    with pytest.raises(safeload.UnsupportedError) as caught:
        outer()
    names = [f.name for f in traceback.extract_tb(caught.value.__traceback__) if f.name not in BOUNDARY]
    assert names[-3:] == ["outer", "inner", "load"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, ZeroDivisionError])
def test_an_error_of_a_callback_is_the_same_object_with_its_frames(kind, good):
    error = kind("from the callback")

    def callback(*_):
        raise error

    with pytest.raises(BaseException) as caught:  # noqa: PT011 - of any kind
        safeload.load("good.safetensors", dtype="float16", progress=callback)
    assert error in (caught.value, caught.value.__cause__, caught.value.__context__)
    assert traceback.extract_tb(error.__traceback__)[-1].name == "callback"


def test_causes_and_contexts_stay(good):
    handled, cause = ZeroDivisionError(), OSError("the cause")
    try:
        raise handled
    except ZeroDivisionError:
        with pytest.raises(safeload.TensorNotFoundError) as caught:
            safeload.open("good.safetensors").get_slice("v")
    assert caught.value.__context__ is handled

    def tensors():
        raise safeload.FormatError("bad") from cause
        yield

    with pytest.raises(safeload.FormatError) as caught:
        safeload.save(tensors(), "x.safetensors")
    assert caught.value.__cause__ is cause


def test_an_error_of_the_block_keeps_the_frames_of_the_block(good):
    def block():
        with plugins.atomic_file("new.bin"):
            safeload.load("page.safetensors")

    def added():
        with safeload.Writer("new.safetensors"):
            safeload.load("page.safetensors")

    for function in (block, added):
        with pytest.raises(safeload.UnsupportedError) as caught:
            function()
        names = [f.name for f in traceback.extract_tb(caught.value.__traceback__) if f.name not in BOUNDARY]
        assert names[-2:] == [function.__name__, "load"]
    assert not [*good.glob("new*")]


def test_an_iteration_that_ends_early_is_closed(good):
    closed = []

    def arrivals():
        try:
            yield "w", W, lambda: None
            yield "v", W, lambda: None
        finally:
            closed.append(True)

    with safeload.PrefetchLoader(["w", "v"], arrivals()) as loader:
        iterator = iter(loader)
        assert next(iterator)[0] == "w"
        iterator.close()
        assert next(iterator, None) is None
    assert closed


def test_tracebacks_end_in_threads_and_event_loops_too(good):
    errors = []

    def attempt():
        try:
            safeload.load("page.safetensors")
        except safeload.SafeloadError as error:
            errors.append(error)

    async def main():
        await asyncio.to_thread(attempt)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    asyncio.run(main())
    assert [[frame.name for frame in frames_inside(error)] for error in errors] == [["load"]] * 2


def test_an_error_that_was_caught_keeps_no_memory(good):
    """No frame of the boundary refers to the error, which would keep arrays until a garbage collection."""
    array = np.ones(3, np.complex64)
    gone = weakref.ref(array)
    gc.disable()
    try:
        with pytest.raises(safeload.SafeloadError) as caught:
            gguf.save_file({"w": array}, "x.gguf")
        del array, caught
        assert gone() is None
    finally:
        gc.enable()


# ---- what is decorated ----

# These raise no error of safeload's. `install_as_safetensors` warns at its caller's line.
QUIET = "install_as_safetensors show_config nest flatten"
# Methods of these classes read, write or check something; objects of all other classes are results.
ACTIVE = """
Checkpoint TensorSlice TensorStream LayerStream safe_open _safe_open_handle SafeSlice PrefetchLoader
QuantizedTensor Writer Plan Location TensorSpec Edit
"""
# Their methods that only return what the object knows, or close it. `open` and others call the constructors.
KNOWING = """
__repr__ __str__ __eq__ __hash__ __enter__ __length_hint__ close dtype shape ndim size nbytes
Checkpoint.__init__ TensorSlice.__init__ TensorStream.__init__ LayerStream.__init__
SafeSlice.__init__ PrefetchLoader.__init__ Location.__init__
Edit.__init__ Edit.__iter__ Edit.__len__ Edit.__contains__
Checkpoint.__iter__ Checkpoint.__len__ Checkpoint.__contains__ Checkpoint.__exit__ Checkpoint.named_globals
Checkpoint.tensors TensorSlice.__len__
TensorStream.__reduce__ LayerStream.__reduce__
safe_open.__exit__ SafeSlice.__reduce__ SafeSlice.get_shape SafeSlice.get_dtype
PrefetchLoader.names PrefetchLoader.__len__ PrefetchLoader.__exit__ QuantizedTensor.parts QuantizedTensor.__reduce__
TensorSpec.data_ptr TensorSpec.data_len Location.shown
"""
# A `Candidate` exists only while safeload opens its file.
WITHIN = ("Candidate",)


def decorated(function):
    return inspect.unwrap(function) is not function


def test_every_public_function_is_decorated():
    bare = [name.rpartition(".")[2] for name, function in functions() if "safeload" in name and not decorated(function)]
    assert sorted(bare) == sorted(QUIET.split())


def test_every_method_that_reads_or_writes_is_decorated():
    found = {kind.__name__ for kind in classes()}
    assert set(ACTIVE.split()) <= found
    bare = []
    for name, function in functions():
        kind, _, method = name.rpartition(".")
        if kind in ACTIVE.split() and not decorated(function):
            bare += [] if {name, method} & set(KNOWING.split()) else [name]
    assert not bare


def test_whatever_documents_an_error_of_safeload_is_decorated():
    errors = [
        name for name in safeload.errors.__all__ if issubclass(getattr(safeload.errors, name), safeload.SafeloadError)
    ]
    said = re.compile(rf"\b({'|'.join(errors)})\b")
    bare = []
    for name, function in functions():
        text = (inspect.getdoc(function) or "").partition("Raises:")[2].partition("Example:")[0]
        if said.search(text) and not decorated(function) and name.partition(".")[0] not in WITHIN:
            bare.append(name)
    assert not bare


def test_a_decorated_function_looks_like_itself():
    for name, function in functions():
        inner = inspect.unwrap(function)
        for attribute in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
            assert getattr(function, attribute) == getattr(inner, attribute), name
        assert inspect.signature(function) == inspect.signature(inner)
        assert inspect.getsource(function) == inspect.getsource(inner)
        if "safeload" in name:
            assert pickle.loads(pickle.dumps(function)) is function
    assert typing.get_type_hints(safeload.edit)["return"].__name__ == "Edit"
