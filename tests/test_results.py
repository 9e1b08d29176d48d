"""Results as data frames, as plain values, as text and as tables for notebooks."""

import copy
import inspect
import json
import pickle
import re

import numpy as np
import pytest

import safeload
from safeload.numpy import save_file

pytestmark = pytest.mark.no_core

# More tensors than polars looks at to find the type of a column, first without and then with special values.
MANY = 120
ODD = {
    "z.nan": np.float32([[1, np.nan], [np.inf, 0]]),
    "z.whole": np.array([[1, 2**63 - 1]]),
    "z.empty": np.zeros((0, 3), np.float16),
    "z.single": np.float64(2.5),
    "z.<b>&": np.ones((64, 64), np.float32),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """a.safetensors with many tensors, and b.safetensors with changes."""
    folder = tmp_path_factory.mktemp("results")
    a = {f"a.{k}": np.full((2, 2), k, np.int32) for k in range(MANY)} | ODD
    b = {**a, "a.1": a["a.1"] + 1, "z.single": np.float64(2), "new": np.ones(3, np.float32)}
    b["z.empty"] = np.zeros((1, 3), np.float16)
    del b["a.2"]
    save_file(a, folder / "a.safetensors", durable=False)
    save_file(b, folder / "b.safetensors", durable=False)
    (folder / "a.pkl").write_bytes(pickle.dumps([np.float32, {"a": 1}]))
    size = (folder / "a.pkl").stat().st_size
    listed = {name: {"size": size, "sha256": 64 * "0"} for name in ("a.pkl", "gone.bin")}
    (folder / "list.json").write_text(json.dumps({"safeload_manifest": 1, "files": listed}))
    return folder


def results(folder):
    a, b = folder / "a.safetensors", folder / "b.safetensors"
    weights = {f"layers.{k}.weight": np.full((64, 64), k + 1, np.float32) for k in range(MANY)}
    loaded = safeload.load_quantized({**weights, **ODD, "z.nan": np.ones((2, 2))}, {"*": "q8_0", "*.3.*": "int8"})
    x = weights["layers.0.weight"]
    return {
        "Info": safeload.info(a),
        "CheckReport": safeload.check(a),
        "ConvertReport": safeload.convert(weights, folder / "c.safetensors", quantize="q8_0", overwrite=True),
        "DiffReport": safeload.diff(a, b),
        "Summary": loaded.summary,
        "StatsTable": safeload.stats(a, histogram=True),
        "TensorStats": safeload.stats(ODD["z.nan"]),
        "QuantizationTable": safeload.quantization_error(weights, {k: loaded[k] for k in weights}),
        "QuantizationStats": safeload.quantization_error(x, safeload.quantize(x, "q8_0")),
        "ScanReport": safeload.scan(folder / "a.pkl"),
        "VerifyReport": safeload.verify(folder, folder / "list.json"),
        "LocalModels": safeload.local_models(folder),
        "ExtractReport": safeload.extract(
            weights, {name: value + 1 for name, value in weights.items()}, folder / "lora", rank=1, overwrite=True
        ),
    }


@pytest.fixture(scope="module")
def every(folder):
    return results(folder)


NAMES = (
    *("Info", "CheckReport", "ConvertReport", "DiffReport", "Summary"),
    *("StatsTable", "TensorStats", "QuantizationTable", "QuantizationStats"),
    *("ScanReport", "VerifyReport", "LocalModels", "ExtractReport"),
)
ABOUT_TENSORS = {"Info", "DiffReport", "ExtractReport", "Summary", "StatsTable", "TensorStats", "QuantizationTable"}


def is_plain(value):
    if isinstance(value, list):
        return all(type(item) in (int, str, float) for item in value)
    return type(value) in (int, float, str, bool)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_dicts_of_plain_values_in_the_same_columns(name, every):
    rows = every[name].rows()
    assert rows
    assert type(every[name]).__name__ == name
    assert len({tuple(row) for row in rows}) == 1
    assert all(is_plain(value) for row in rows for value in row.values()), rows[0]
    for column in rows[0]:
        assert len({type(row[column]) for row in rows}) == 1, column
    if name in ABOUT_TENSORS:
        assert [*rows[0]][:4] == ["name", "dtype", "shape", "nbytes"]


@pytest.mark.parametrize("name", NAMES)
def test_pandas_takes_rows(name, every):
    pandas = pytest.importorskip("pandas")
    rows = every[name].rows()
    assert pandas.DataFrame(rows).shape == (len(rows), len(rows[0]))


@pytest.mark.parametrize("name", NAMES)
def test_polars_takes_rows_and_changes_no_value(name, every):
    polars = pytest.importorskip("polars")
    rows = every[name].rows()
    back = polars.DataFrame(rows).to_dicts()
    assert json.dumps(back) == json.dumps(rows)


@pytest.mark.parametrize("name", NAMES)
def test_dicts_are_strict_json(name, every):
    values = every[name].to_dict()
    assert json.loads(json.dumps(values, allow_nan=False, default=list)) == json.loads(json.dumps(values, default=list))


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_shows_a_table(name, every):
    page = every[name]._repr_html_()
    assert re.fullmatch(
        r"<div>.*<table><thead><tr>(<th .*?</th>)+</tr></thead><tbody>(<tr>.*</tr>)+</tbody></table>.*</div>", page
    )
    assert page.count("<tr>") <= 21  # a header and 20 rows
    assert "<b>" not in page


@pytest.mark.parametrize("name", NAMES)
def test_results_are_copied_and_pickled(name, every):
    for other in (copy.copy(every[name]), copy.deepcopy(every[name]), pickle.loads(pickle.dumps(every[name]))):
        assert json.dumps(other.rows()) == json.dumps(every[name].rows())
        assert str(other) == str(every[name])


def test_rows_of_tensors_agree(every):
    """They can be joined by name."""
    about = {row["name"]: {key: row[key] for key in ("dtype", "shape", "nbytes")} for row in every["Info"].rows()}
    for row in every["StatsTable"].rows():
        assert {key: row[key] for key in about[row["name"]]} == about[row["name"]]
    changed = {row["name"]: row["status"] for row in every["DiffReport"].rows() if row["status"] != "equal"}
    assert changed == {
        "a.1": "different",
        "z.single": "different",
        "z.empty": "other shape",
        "new": "only in b",
        "a.2": "only in a",
    }


def test_rows_of_a_difference_have_its_relative_change(every):
    rows = {row["name"]: row for row in every["DiffReport"].rows()}
    assert rows["a.1"]["relative_change"] == 1
    assert rows["z.single"]["relative_change"] == 0.2
    assert rows["a.0"]["relative_change"] == 0
    assert np.isnan(rows["new"]["relative_change"])
    assert "relative_change" in every["DiffReport"]._repr_html_()


def test_dicts_of_results_print_as_tables(every):
    for name in ("StatsTable", "QuantizationTable"):
        table = every[name]
        lines = str(table).splitlines()
        assert len(lines) == len(table) + 1
        assert lines[0].startswith("tensor ")
        assert repr(table).splitlines()[-1] == f"... and {len(table) - 8:,} more"
        assert isinstance(table, dict)
        assert table == dict(table)


def test_a_report_in_a_pipe_cuts_no_name(capsys):
    name = "model." + ".".join(f"layer{k}" for k in range(40))
    report = safeload.diff({name: np.float32([1])}, {name: np.float32([2])})
    assert name in str(report)
    assert name in str(safeload.check({name: np.float32([np.nan])}))
    assert name in str(safeload.stats({name: np.float32([1])}))


EMPTY = {
    "check": lambda folder: safeload.check({"w": np.float32([[1, 2], [3, 4]])}),
    "scan": lambda folder: safeload.scan(folder / "a.safetensors"),
    "stats": lambda folder: safeload.stats({"w": np.array([True])}, drop="w"),
    "quantization_error": lambda folder: safeload.quantization_error({"w": np.ones(3)}, {"w": np.ones(3)}),
    "diff": lambda folder: safeload.diff(folder / "a.safetensors", folder / "a.safetensors"),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_table_without_rows_has_its_columns(name, folder):
    page = EMPTY[name](folder)._repr_html_()
    assert "<tbody></tbody>" in page
    assert page.count("<th ") >= 4


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_dicts_are_new_objects(name, every):
    """What a caller changes in them is not a change of the result."""
    result = every[name]
    before = json.dumps([result.rows(), result.to_dict()], default=list)
    for value in (*result.rows(), result.to_dict()):
        for item in value.values():
            if isinstance(item, (list, dict)):
                item.clear()
        value.clear()
    assert json.dumps([result.rows(), result.to_dict()], default=list) == before


@pytest.mark.parametrize("name", ["ConvertReport", "Summary", "TensorStats", "QuantizationStats"])
def test_results_about_one_thing_are_named_tuples(name, every):
    result = every[name]
    kind, fields = type(result), result._fields
    assert isinstance(result, tuple)
    assert [*inspect.signature(kind).parameters] == [*fields] == [*kind.__match_args__] == [*result._asdict()]
    assert kind(*result) == kind(**result._asdict()) == result._replace() == tuple(result)
    assert type(result._replace()) is type(kind._make(result)) is kind
    assert not hasattr(result, "__dict__")
    with pytest.raises(AttributeError):
        setattr(result, fields[0], None)
    with pytest.raises(AttributeError):
        result.other = None
    assert result.to_dict().keys() == set(fields)


@pytest.mark.parametrize("name", ["TensorStats", "QuantizationStats", "Summary"])
def test_their_repr_names_the_fields(name, every):
    result = every[name]
    assert re.match(rf"{name}\({result._fields[0]}=.*, {result._fields[1]}=", repr(result))
