"""Tensors wherever they are, as every operation takes them."""

import ml_dtypes
import numpy as np
import pytest
from builders.inside import Catalog, jobs

import safeload
from safeload import QuantizedTensor, SafeloadError, TensorNotFoundError, UnsupportedError
from safeload.numpy import save_file

pytestmark = pytest.mark.no_core

W = np.arange(64, dtype=np.float32).reshape(2, 32)
TENSORS = {
    "w": W,
    "half": W.astype(ml_dtypes.bfloat16),
    "count": np.int64(3),
    "int8": safeload.quantize(W, "int8", axis=0),
    "blocks": safeload.quantize(W, "q4_0"),
}


@pytest.fixture
def path(tmp_path):
    safeload.convert(TENSORS, tmp_path / "all.safetensors")
    return tmp_path / "all.safetensors"


@pytest.fixture(params=["path", "checkpoint", "dict", "list", "catalog"])
def catalog(request, path):
    with safeload.open(path) as opened:
        given = {
            "path": path,
            "checkpoint": opened,
            "dict": TENSORS,
            "list": [{name: TENSORS[name]} for name in TENSORS],
            "catalog": Catalog.of(opened),
        }[request.param]
        with Catalog.of(given) as made:
            yield made


def test_a_catalog_says_the_same_of_tensors_wherever_they_are(catalog):
    assert set(catalog) == set(TENSORS)
    assert len(catalog) == 5
    assert "w" in catalog
    assert "x" not in catalog
    abouts = {name: catalog.about(name) for name in TENSORS}
    assert {name: about.dtype for name, about in abouts.items()} == {
        "w": "float32",
        "half": "bfloat16",
        "count": "int64",
        "int8": "int8",
        "blocks": "q4_0",
    }
    assert [abouts[name].nbytes for name in TENSORS] == [256, 128, 8, 64 + 8, 2 * 18]
    assert [abouts[name].shape for name in TENSORS] == [(2, 32), (2, 32), (), (2, 32), (2, 32)]
    assert [abouts[name].floating for name in TENSORS] == [True, True, False, False, False]
    assert [(abouts[name].scheme, abouts[name].axis) for name in ("w", "int8", "blocks")] == [
        (None, None),
        ("int8", 0),
        ("q4_0", None),
    ]
    assert [name for name, about in abouts.items() if about.quantized] == ["int8", "blocks"]
    assert abouts["blocks"].row.code == "Q4_0"


def test_a_catalog_gives_the_same_tensors_wherever_they_are(catalog):
    for name, value in TENSORS.items():
        found = catalog.value(name)
        if isinstance(value, QuantizedTensor):
            assert found == value
            assert catalog.source(name) == value
            assert np.array_equal(catalog.array(name), value.dequantize())
        else:
            assert np.array_equal(found, value)
            source = catalog.values(name, "called")
            assert (source.name, source.size, source.shape) == ("called", value.nbytes, value.shape)
    source = catalog.in_place("int8")
    assert (source.row.code, source.shape) == ("F32", (2, 32))
    values = np.zeros(source.shape, np.float32)
    jobs.Batch(source.jobs(values.ctypes.data, source.row.number)).run()
    assert np.array_equal(values, TENSORS["int8"].dequantize())
    assert catalog.in_place("w").packed is None


def test_what_a_catalog_opened_itself_is_closed_with_it(path):
    with Catalog.of(path) as catalog:
        file = catalog.weight_files[0]
        with Catalog.of(catalog) as again:
            assert again.weight_files[0] is file
        with Catalog.of([catalog, {"more": W}]) as both:
            assert list(both)[-1] == "more"
        assert catalog.value("w").shape == (2, 32)
    with pytest.raises(ValueError, match="is closed"):
        file.check_open()
    with safeload.open(path) as opened:
        with Catalog.of(opened):
            pass
        assert opened["w"].shape == (2, 32)


def test_a_catalog_that_cannot_be_made_leaves_nothing_open(path, tmp_path, monkeypatch):
    seen = []
    closed = safeload.Checkpoint.close
    monkeypatch.setattr(safeload.Checkpoint, "close", lambda self: (seen.append(self.path), closed(self))[1])
    with pytest.raises(FileNotFoundError):
        Catalog.of([path, tmp_path / "none"])
    with pytest.raises(SafeloadError, match=r"tensor 'w' is in both .*all\.safetensors and a dict"):
        Catalog.of([path, {"w": W}])
    assert seen == [str(path)] * 2
    with pytest.raises(ValueError, match="the list of sources is empty"):
        Catalog.of([])


def test_what_the_origins_say_is_merged(tmp_path, path):
    save_file({"a": W}, tmp_path / "a.safetensors", {"made": "a", "a": "1"})
    safeload.convert({"b": W}, tmp_path / "b.npz")
    with Catalog.of([tmp_path / "a.safetensors", {"c": W}]) as catalog:
        assert catalog.format is None
        assert catalog.metadata == {"made": "a", "a": "1"}
        assert catalog.title == f"{tmp_path / 'a.safetensors'} and 1 more"
        assert catalog.nbytes == 2 * W.nbytes
        assert [name for name, _, _ in catalog.entries()] == ["a"]
    with Catalog.of([tmp_path / "a.safetensors", path]) as catalog:
        assert catalog.format == "safetensors"
        assert len(catalog.files) == 2
    with Catalog.of({"a": W}) as catalog:
        assert (catalog.title, catalog.format, catalog.files, catalog.config) == ("dict", None, [], None)


def test_codes_are_found_with_the_scale_of_another_origin(tmp_path):
    save_file({"x.weight": W.astype(ml_dtypes.float8_e4m3fn)}, tmp_path / "a.safetensors")
    scale = {"x.weight_scale_inv": np.ones((1, 1), np.float32)}
    with Catalog.of(tmp_path / "a.safetensors") as catalog:
        assert not catalog.codes
    with Catalog.of([tmp_path / "a.safetensors", scale]) as catalog:
        assert list(catalog.codes) == ["x.weight"]
        catalog.refuse_codes(scale, "this")
        with pytest.raises(UnsupportedError, match="this would treat the codes as weights"):
            catalog.refuse_codes(catalog, "this")


def test_what_no_weights_have_is_known_but_has_no_row():
    catalog = Catalog.of({"text": np.array(["a"]), "packed": np.zeros(4, ml_dtypes.float4_e2m1fn)})
    assert catalog.about("text").element is None
    with pytest.raises(SafeloadError, match="tensor 'text': dtype '<U1' cannot be saved"):
        _ = catalog.about("text").row
    assert catalog.about("packed").floating
    assert catalog.in_place("packed") is None


def test_names_that_there_are_not_are_refused(catalog):
    catalog.check(["w", "int8"])
    with pytest.raises(TensorNotFoundError, match="blok"):
        catalog.check(["w", "blok"])


def test_operations_take_a_catalog(path):
    with Catalog.of(path) as catalog:
        assert safeload.diff(catalog, TENSORS).same
        assert safeload.stats(catalog, names=["w"])["w"].max == 63
        assert safeload.check(catalog).ok
        assert safeload.quantization_error({"blocks": W, "int8": W}, catalog)["blocks"].max_error < 10
        assert set(safeload.load_quantized(catalog)) == set(TENSORS)
        assert catalog.value("w").shape == (2, 32)
