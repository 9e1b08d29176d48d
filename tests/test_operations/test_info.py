"""`safeload.info` and `safeload.report`: what the commands of these names show, as functions."""

import io
import json
import os

import numpy as np
import pytest
from builders.inside import main

import safeload
from safeload.numpy import save, save_file

pytestmark = pytest.mark.no_core

W = {
    "model.layers.0.w": np.ones((64, 64), np.float32),
    "model.layers.1.w": np.full((64, 64), 2, np.float32),
    "norm": np.arange(3, dtype=np.float16),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """m.safetensors, and m/ with two shards and a config."""
    monkeypatch.chdir(tmp_path)
    save_file(W, "m.safetensors", {"license": "mit"}, durable=False)
    safeload.convert("m.safetensors", "m", max_shard_size=20_000)
    config = {"model_type": "x", "num_hidden_layers": 2, "hidden_size": 64}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("path", ["m.safetensors", "m", "m/model.safetensors.index.json"])
@pytest.mark.parametrize("options", [{}, {"only": "model.*"}, {"drop": ["norm"]}])
def test_the_function_and_the_command_say_the_same(path, options, folder, capsys):
    if path.startswith("m/"):
        path = next(str(file) for file in (folder / "m").iterdir() if file.name.endswith("index.json"))
    info = safeload.info(path, **options)
    flags = [flag for name, value in options.items() for flag in (f"--{name}", value if name == "only" else value[0])]
    assert main(["info", path, *flags]) == 0
    assert capsys.readouterr().out == f"{info}\n"
    assert main(["info", path, *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(info.to_dict()))


def test_what_an_info_has(folder):
    info = safeload.info("m")
    assert (info.format, info.tensor_count, info.parameters, info.nbytes) == ("safetensors", 3, 8195, 32774)
    assert info.model == "x, 2 layers, hidden 64"
    assert [*info.tensors] == [*safeload.open("m")]
    assert info.memory["float32"] == 4 * info.parameters
    assert sum(info.files.values()) > info.nbytes
    assert info.dtypes == {"F32": (2, 8192, 32768), "F16": (1, 3, 6)}
    assert repr(info) == "<Info 'm': safetensors, 3 tensors, 32 KiB>"
    assert not info.selected
    assert safeload.info("m", only="norm").tensors["norm"].shape == (3,)
    with pytest.raises(AttributeError):
        info.format = "gguf"


def test_an_info_outlives_its_files(folder):
    safeload.gguf.save_file(W, "m.gguf", {"general.architecture": "llama", "llama.block_count": 2})
    info = safeload.info("m.gguf")
    text = str(info)
    os.remove("m.gguf")
    assert info.metadata["llama.block_count"] == 2
    assert str(info) == text
    assert info.model.startswith("llama, 2 layers")


def test_file_objects(folder):
    data = io.BytesIO(b"before" + save(W))
    data.seek(6)
    assert safeload.info(data).parameters == 8195
    report = safeload.report(data, "page.html", quantize="q8_0")
    assert (report.ok, report.tensors, data.tell()) == (True, 3, 6)
    assert "model.layers" in (folder / "page.html").read_text("utf-8")


@pytest.mark.skipif(os.name == "nt", reason="pipes")
def test_pipes_are_listed_and_have_no_page(folder):
    for function in (safeload.info, lambda file: safeload.report(file, "page.html")):
        reader, writer = os.pipe()
        os.write(writer, save({"w": np.ones(3, np.float32)}))
        os.close(writer)
        with open(reader, "rb") as file:
            if function is safeload.info:
                assert function(file).parameters == 3
                continue
            with pytest.raises(ValueError, match="a pipe only once"):
                function(file)
    assert not (folder / "page.html").exists()


def test_nothing_and_hostile_names(folder):
    save_file({}, "empty.safetensors", durable=False)
    empty = safeload.info("empty.safetensors")
    assert empty.rows() == []
    assert "<th" in empty._repr_html_()
    save_file({"\x1b[31m<script>": np.ones(1)}, "hostile.safetensors", durable=False)
    hostile = safeload.info("hostile.safetensors")
    assert "\x1b" not in str(hostile) + hostile._repr_html_()
    assert "<script" not in hostile._repr_html_()


def test_an_adapter_and_its_base(folder):
    with pytest.raises(ValueError, match="base= needs a LoRA adapter, got m"):
        safeload.info("m", base="m.safetensors")


def test_nothing_is_listed_for_a_pattern_without_a_match(folder):
    with pytest.raises(safeload.TensorNotFoundError, match="only='x'"):
        safeload.info("m", only="x")


# ---- pages ----


def test_the_function_and_the_command_write_the_same_page(folder, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    steps = []
    report = safeload.report("m", "a.html", quantize="Q4_0", progress=lambda done, total: steps.append((done, total)))
    assert isinstance(report, safeload.CheckReport)
    assert main(["report", "m", "-o", "b.html", "--quantize", "q4_0"]) == (0 if report.ok else 1)
    assert (folder / "a.html").read_bytes() == (folder / "b.html").read_bytes()
    assert steps
    assert all(done <= total for done, total in steps)


def test_a_bad_file_gets_a_page_and_a_false_report(folder):
    (folder / "cut.safetensors").write_bytes((folder / "m.safetensors").read_bytes()[:-9])
    report = safeload.report("cut.safetensors", "cut.html")
    assert not report
    assert report.errors[0].code in (folder / "cut.html").read_text("utf-8")


@pytest.mark.parametrize("name", ["m.safetensors", "notes.txt", "m/config.json"])
def test_only_pages_are_replaced(name, folder):
    (folder / "notes.txt").write_text("mine")
    before = (folder / name).read_bytes()
    with pytest.raises((FileExistsError, ValueError), match=r"overwrite=True|which is read"):
        safeload.report("m.safetensors", name)
    assert (folder / name).read_bytes() == before
    safeload.report("m.safetensors", "page.html", digest=False)
    safeload.report("m.safetensors", "page.html")
    assert "SHA-256" in (folder / "page.html").read_text("utf-8")
    safeload.report("m.safetensors", "notes.txt", overwrite=True)
    with pytest.raises(ValueError, match="which is read"):
        safeload.report("m.safetensors", "m.safetensors", overwrite=True)


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"quantize": "q9"}, ValueError), ({"threads": 0}, ValueError)],
)
def test_wrong_arguments_write_no_page(options, kind, folder):
    with pytest.raises(kind):
        safeload.report("m.safetensors", "page.html", **options)
    assert not (folder / "page.html").exists()


def test_a_missing_file_is_an_error(folder):
    for call in (safeload.info, lambda path: safeload.report(path, "page.html")):
        with pytest.raises(FileNotFoundError):
            call("missing.safetensors")
    assert not (folder / "page.html").exists()
