"""The rows of core/packing.py, and who reads them."""

import re

import numpy as np
import pytest
from builders.inside import SCHEMES, dtypes, main, presets
from builders.schemes import ENGINE_FORMATS

import safeload


def test_the_guide_has_a_line_for_each_scheme(pytestconfig):
    text = (pytestconfig.rootpath / "docs" / "guide" / "quantizing.md").read_text("utf-8")
    lines = re.findall(r"^\| `(\w+)` \|.*\| ([0-9.]+) \| .* \|$", text, re.MULTILINE)
    assert {name: float(bits) for name, bits in lines} == {row.name: row.bits for row in SCHEMES.values()}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_tensor_takes_the_bytes_that_its_row_says(scheme):
    row = SCHEMES[scheme]
    made = safeload.quantize(np.ones((2, 4 * row.block), np.float32), scheme)
    assert (made.scheme, made.data.nbytes * 8) == (scheme, 8 * row.block * row.bits)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gguf_holds_the_schemes_of_blocks(scheme, tmp_path):
    made = {"w": safeload.quantize(np.ones((2, 256), np.float32), scheme)}
    if SCHEMES[scheme].dtype.blocked:
        safeload.gguf.save_file(made, tmp_path / "w.gguf")
        assert safeload.load(tmp_path / "w.gguf")["w"] == made["w"]
    else:
        with pytest.raises(safeload.UnsupportedError, match=scheme):
            safeload.gguf.save_file(made, tmp_path / "w.gguf")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rounding", [None, "absmax", "ggml", "nearest"])
def test_a_scheme_takes_its_own_roundings_only(scheme, rounding):
    x = np.float32([[0.3, -0.7] * 128])
    own = SCHEMES[scheme].roundings
    if rounding is None:
        assert safeload.quantize(x, scheme) == safeload.quantize(x, scheme, rounding=next(iter(own), None))
    elif rounding in own:
        assert safeload.quantize(x, scheme, rounding=rounding).scheme == scheme
    else:
        with pytest.raises(ValueError, match="rounding"):
            safeload.quantize(x, scheme, rounding=rounding)


@pytest.mark.parametrize("scheme", ["q3_0", "int4", "", None, 4, ["q4_0"], {"q4_0"}, np.float32], ids=repr)
def test_what_is_no_scheme_is_refused_with_the_nearest(scheme):
    with pytest.raises(ValueError, match=r"did you mean '\w+', '\w+', '\w+', '\w+' or '\w+'\?"):
        safeload.quantize(np.ones(32, np.float32), scheme)


def test_a_scheme_that_is_only_read_is_called_that():
    for name, row in dtypes.BLOCK_TYPES.items():
        if name not in SCHEMES:
            for given in (name, row.code, f"{row.code}_M"):
                with pytest.raises(
                    ValueError, match=rf"{row.code} can only be read; writable schemes are {', '.join(SCHEMES)}(;|$)"
                ):
                    safeload.quantize(np.ones(32, np.float32), given)


@pytest.mark.parametrize("command", ["convert", "report"])
def test_the_command_line_offers_them_all(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for scheme in SCHEMES:
        assert scheme in text


def test_every_engine_format_is_listed_and_for_whole_models():
    variants = re.compile("-g[0-9]+$|-channel$|^mlx$")
    assert [name for name in presets() if not variants.search(name)] == ENGINE_FORMATS
    for name in presets():
        with pytest.raises(ValueError, match="is for whole models"):
            safeload.quantize(np.ones((2, 128), np.float32), name)
