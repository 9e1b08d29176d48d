"""The front row of names, and the names behind it."""

import subprocess
import sys

import pytest

import safeload
from safeload import cluster

pytestmark = pytest.mark.no_core

FRONT_ROW = """
open load save convert check info report diff stats quantize quantization_error load_quantized astype nest flatten
safe_open scan verify local_models install_as_safetensors show_config edit make_patch apply_patch
Checkpoint QuantizedTensor TensorInfo Writer Signature Info CheckReport ConvertReport DiffReport
SafeloadError SafetensorError FormatError UnsupportedError TensorNotFoundError ForbiddenError RemoteError
VerificationError __version__
"""

# Public names that left the front row, or that another name replaced.
BEHIND = """
DiffReport Finding HISTOGRAM_EDGES KEPT_NAMES Layout LimitError Limits LoadStats Plan QuantizationError QuantizedDict
RangeError RemotePermissionError RemoteTimeoutError SafeSlice StackedDict StackedTensor Summary TensorDiff TensorMeta
TensorSpec TensorStats ValidationReport _safe_open_handle deserialize finalize plan_convert run_piece serialize
serialize_file stack validate
"""

MODULES = ("cluster", "errors", "gguf", "jax", "layouts", "moon", "numpy", "plugins", "remote", "torch")


def test_the_front_row_is_short():
    assert sorted(safeload.__all__) == sorted(FRONT_ROW.split())
    assert len(safeload.__all__) <= 42


@pytest.mark.parametrize("name", [*BEHIND.split(), *MODULES])
def test_other_names_still_resolve(name):
    """Each in a new interpreter's order: no name needs another one first."""
    assert getattr(safeload, name) is not None


def test_old_names_are_aliases():
    assert safeload.ValidationReport is safeload.CheckReport
    assert safeload.QuantizationError is safeload.QuantizationStats
    assert safeload.validate is safeload.check
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
