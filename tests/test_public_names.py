"""The front row of names, and the names behind it."""

import copy
import inspect
import pickle
import pickletools
import subprocess
import sys
import typing
from importlib import import_module

import fsspec
import numpy as np
import pytest
from builders.public import doors, own, public_names

import safeload
from safeload import cluster, plugins, remote

pytestmark = pytest.mark.no_core

FRONT_ROW = """
open load save convert check info report diff stats quantize quantization_error load_quantized astype nest flatten
safe_open scan verify local_models install_as_safetensors show_config edit make_patch apply_patch
Checkpoint QuantizedTensor TensorInfo Writer Signature Info CheckReport ConvertReport DiffReport
SafeloadError SafetensorError FormatError UnsupportedError TensorNotFoundError ForbiddenError RemoteError
VerificationError __version__
"""

# Public names behind the front row.
BEHIND = """
DiffReport Finding HISTOGRAM_EDGES KEPT_NAMES Layout LimitError Limits LoadStats Plan QuantizedDict
RangeError RemotePermissionError RemoteTimeoutError SafeSlice StackedDict StackedTensor Summary TensorDiff TensorMeta
TensorCheck TensorSpec TensorStats _safe_open_handle deserialize finalize plan_convert run_piece serialize
serialize_file stack Edit FileCheck LayerStream LocalModel LocalModels ScanFinding ScanReport TensorLike
TensorSlice TensorStream VerifyReport families ModelFamily extract ExtractReport
"""

MODULES = ("cluster", "errors", "gguf", "jax", "layouts", "moon", "numpy", "plugins", "remote", "torch")


def test_the_front_row_is_short():
    assert sorted(safeload.__all__) == sorted(FRONT_ROW.split())
    assert len(safeload.__all__) <= 42


@pytest.mark.parametrize("name", [*BEHIND.split(), *MODULES])
def test_other_names_still_resolve(name):
    """Each in a new interpreter's order: no name needs another one first."""
    assert getattr(safeload, name) is not None


def test_names_for_clusters_resolve_in_both_places():
    for name in cluster.__all__:
        assert getattr(cluster, name) is getattr(safeload, name)


def test_a_module_resolves_without_an_import_of_its_own():
    code = "import safeload; print(safeload.cluster.run_piece.__name__, safeload.errors.FormatError.__name__)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["run_piece", "FormatError"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("load_checkpoint", "safeload.torch and safeload.jax"),
        ("load_file", "safeload.numpy"),
        ("save_file", "safeload.numpy"),
        ("merge", "adapters="),
        ("validate", "safeload.check"),
        ("dequantize", 'dtype="float32"'),
        ("summary", "safeload.info"),
        ("take", "safeload.open(path).take"),
    ],
)
def test_a_name_from_elsewhere_is_answered_with_its_place(name, hint):
    with pytest.raises(AttributeError) as caught:
        getattr(safeload, name)
    assert str(caught.value).startswith(f"module 'safeload' has no attribute '{name}'; ")
    assert hint in str(caught.value)


def test_advice_is_about_names_that_do_not_exist():
    assert not set(safeload._INSTEAD) & {*safeload.__all__, *safeload._MODULE_OF, *safeload._MODULES}


def test_an_unknown_name_gets_no_advice():
    with pytest.raises(AttributeError, match=r"^module 'safeload' has no attribute 'nothing'$"):
        _ = safeload.nothing


@pytest.mark.parametrize("module", MODULES)
def test_completion_in_a_module_offers_its_public_names_only(module):
    offered = dir(getattr(safeload, module))
    assert not {"Any", "annotations", "os", "errno", "Mapping"} & set(offered)
    assert set(getattr(safeload, module).__all__) <= set(offered)


def public_classes():
    return {value: name for name, value in public_names().items() if inspect.isclass(value) and own(value)}


def test_a_public_class_names_the_door_that_users_import_it_from():
    names = {door.__name__ for door in doors()}
    assert len(public_classes()) > 60
    for kind in public_classes():
        assert kind.__module__ in names, kind
        assert getattr(import_module(kind.__module__), kind.__qualname__) is kind
        assert pickle.loads(pickle.dumps(kind)) is kind
    assert repr(safeload.Checkpoint) == "<class 'safeload.Checkpoint'>"


def test_hints_of_a_public_class_resolve():
    """At the door `typing` finds few of the names that annotations use."""
    for kind in public_classes():
        assert typing.get_type_hints(kind).keys() >= vars(kind).get("__annotations__", {}).keys()
    assert typing.get_type_hints(safeload.Info)["tensors"].__args__ == (str, safeload.TensorInfo)


def instances(folder):
    """Objects of public classes, as programs get them."""
    path, packed = str(folder / "w.safetensors"), str(folder / "q.safetensors")
    weights = {"w": np.ones((4, 64), np.float32)}
    safeload.save(weights, path)
    safeload.save({"w": safeload.quantize(weights["w"], "int8", axis=0)}, packed)
    opened = safeload.open(path)
    opened.load()
    yield from (opened, opened.get_slice("w"), opened.last_load, opened.tensors["w"])
    yield from (safeload.open(packed), safeload.open(packed).get_slice("w"), safeload.open(packed)["w"])
    handle = safeload.safe_open(path)
    yield from (handle, handle.get_slice("w"), handle.get_tensor_meta("w"))
    with open(path, "rb") as file:
        yield safeload._safe_open_handle(file)
    yield safeload.quantize(weights["w"], "q8_0")
    yield from (safeload.info(path), safeload.check(path), safeload.stats(path), safeload.stats(weights["w"]))
    yield from (safeload.diff(path, packed), safeload.diff(path, {"w": weights["w"] + 1}), safeload.scan(path))
    table = safeload.quantization_error(path, safeload.load_quantized(path, {"*": "q8_0"}))
    yield from (table, table["w"], safeload.load_quantized(path, {"*": "q8_0"}).summary)
    yield from (safeload.convert(path, str(folder / "w.npz")), safeload.local_models(str(folder)))
    yield safeload.families()[0]
    yield from (safeload.plan_convert(path, str(folder / "out"), max_shard_size="1MB"), safeload.Limits())
    yield from (safeload.layouts.MOONDREAM2, safeload.layouts.MOONDREAM2.tensors[0], safeload.Signature("s", "k"))
    yield from (
        safeload.ScanReport(),
        safeload.VerifyReport("p", "s", "", []),
        safeload.Finding("error", "c", None, "m"),
    )
    yield from (plugins.StoredTensor("w", "f32", (), 0), plugins.Content(None))
    yield from (safeload.FormatError("bad", path, 3), safeload.errors.NoMatchError("no", tensor="w"))
    yield safeload.RemoteError("no", "http://a", 0, 1)


# Classes inside that pickles still name: of the local file system, of a checkpoint's dict, of the rows of a table.
INNER = {"LOCAL", "TensorInfos", "TensorDescription", "Dtype"}


def named(value):
    """The names of safeload in a pickle."""
    operations = pickletools.genops(pickle.dumps(value, 3))
    names = [argument.split(" ") for opcode, argument, _ in operations if opcode.name == "GLOBAL"]
    return {(module, name) for module, name in names if module.partition(".")[0] == "safeload"}


def test_pickles_of_public_objects_name_public_classes(tmp_path):
    names = {door.__name__ for door in doors()}
    kinds = set()
    for value in instances(tmp_path):
        kinds.add(type(value))
        again = pickle.loads(pickle.dumps(value, 3))
        assert type(again) is type(copy.copy(value)) is type(value)
        assert {name for module, name in named(value) if module not in names} <= INNER, type(value)
    assert len(kinds) > 30
    location = remote.of_fsspec(fsspec.filesystem("memory"), "models")
    assert str(pickle.loads(pickle.dumps(location))) == str(location)
    assert ("safeload.remote", "Location") in named(location)
