"""A gate for many models: check, verify, stats and report with several paths, and with a tree of folders."""

import json
import os

import numpy as np
import pytest
from builders.commands import run
from builders.models import small, write_folder

from safeload.numpy import save_file


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Two good models and a bad one, at different depths."""
    monkeypatch.chdir(tmp_path)
    for folder, value in (("tree/a", 1), ("tree/deep/er/b", 2), ("tree/deep/nan", np.nan)):
        os.makedirs(folder)
        save_file({"w": np.float32([[value, 0.5]])}, f"{folder}/model.safetensors", durable=False)
    return tmp_path


PATHS = ("tree/a", "tree/deep/er/b", "tree/deep/nan")


def slashed(text):
    """A text with the paths of POSIX."""
    return text.replace(os.sep, "/")


def test_check_prints_a_line_for_each_model_and_the_worst_status(tree, capsys):
    status, out, err = run(capsys, "check", *PATHS)
    assert (status, err) == (1, "")
    assert out.splitlines() == [
        "ok     tree/a: no errors",
        "ok     tree/deep/er/b: no errors",
        "error  tree/deep/nan: 1 error; error: w: 1 of 2 values is NaN, the first at [0, 0] (value.nan)",
        "",
        "3 models: 1 with errors",
    ]
    assert run(capsys, "check", *PATHS[:2])[0] == 0


def test_recursive_finds_the_models_of_a_tree(tree, capsys):
    status, out, err = run(capsys, "check", "-r", "tree")
    assert (status, slashed(out), err) == run(capsys, "check", *PATHS)
    status, out, _ = run(capsys, "check", "--recursive", "tree/a")
    assert (status, out.splitlines()[-1]) == (0, "1 model: no errors")


def test_json_is_a_line_for_each_model(tree, capsys):
    status, out, err = run(capsys, "check", "-r", "tree", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert (status, [(slashed(line["path"]), line["status"], line["ok"]) for line in lines]) == (
        1,
        [("tree/a", 0, True), ("tree/deep/er/b", 0, True), ("tree/deep/nan", 1, False)],
    )
    assert err == "3 models: 1 with errors\n"


@pytest.mark.parametrize("command", ["check", "stats", "report", "verify"])
def test_an_unreadable_model_does_not_stop_the_others(tree, capsys, command):
    status, out, err = run(capsys, command, "absent", "tree/a", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["path"] for line in lines] == ["absent", "tree/a"]
    failed = 2 if command == "verify" else 1
    assert (status, lines[0]["status"], err.splitlines()[0][:9]) == (failed, failed, "2 models:")
    assert "No such file or directory" in lines[0]["error"]


@pytest.mark.parametrize("command", ["check", "stats", "report", "verify"])
def test_a_folder_without_models_fails(tree, capsys, command):
    os.makedirs("tree/empty")
    status, out, _ = run(capsys, command, "-r", "tree/empty")
    assert (status, out.splitlines()[0]) == (2 if command == "verify" else 1, "error  tree/empty: no models found")


def test_a_tree_with_parts_that_are_not_searched_fails(tree, capsys, monkeypatch):
    os.makedirs("/".join(["tree", *"abcdefghijklmnopqrst"]))
    status, out, _ = run(capsys, "check", "-r", "tree/a", "tree")
    assert status == 1
    assert "its folders were not searched, because the limit is 16 levels" in out


def test_incomplete_shards_of_a_tree_fail(tree, capsys):
    os.makedirs("tree/shards")
    save_file({"w": np.ones((2, 2), "f4")}, "tree/shards/model-00001-of-00002.safetensors", durable=False)
    status, out, _ = run(capsys, "check", "-r", "tree/shards")
    assert status == 1
    assert "model-00002-of-00002.safetensors" in out


def test_stats_summarises_each_model(tree, capsys):
    status, out, _ = run(capsys, "stats", "-r", "tree")
    assert status == 0
    assert slashed(out).splitlines() == [
        "ok     tree/a: 1 tensor, absmax 1 (w)",
        "ok     tree/deep/er/b: 1 tensor, absmax 2 (w)",
        "ok     tree/deep/nan: 1 tensor, absmax 0.5 (w), 1 NaN",
        "",
        "3 models: no errors",
    ]


def test_report_writes_a_page_for_each_model(tree, capsys):
    status, _, _ = run(capsys, "report", "-r", "tree", "-o", "pages")
    assert (status, sorted(os.listdir("pages"))) == (
        1,
        ["tree-a.html", "tree-deep-er-b.html", "tree-deep-nan.html"],
    )
    # Models with the same name for their pages get different pages, again in a second call.
    os.rename("tree/deep/nan", "tree-a")
    for _ in range(2):
        assert run(capsys, "report", "tree/a", "tree-a", "-o", "more")[0] == 1
        assert sorted(os.listdir("more")) == ["tree-a-2.html", "tree-a.html"]


def test_verify_takes_several_models(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "tree" / name).mkdir(parents=True)
        write_folder(tmp_path / "tree" / name, *small("llama"))
        assert run(capsys, "verify", f"tree/{name}", "--write", f"tree/{name}/list.json")[0] == 0
    status, out, _ = run(capsys, "verify", "-r", "tree")
    assert status == 0
    assert out.splitlines()[-1] == "2 models: no errors"
    with open("tree/b/config.json", "a") as file:
        file.write(" ")
    status, out, _ = run(capsys, "verify", "-r", "tree")
    assert status == 1
    assert "; config.json changed" in out.splitlines()[1]


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "--against", "list.json"),
        ("verify", "--write", "list.json"),
        ("check", "--parameters", "3"),
        ("report", "-o", "-"),
    ],
)
def test_options_of_a_single_model_are_refused_for_several(tree, capsys, arguments):
    status, _, err = run(capsys, *arguments, *PATHS)
    assert status == 2
    assert "takes a single model" in err or "writes a single page" in err


def test_recursive_refuses_urls(tree, capsys):
    status, out, err = run(capsys, "check", "-r", "tree", "hf://owner/name")
    assert (status, out) == (2, "")
    assert "--recursive searches folders on this machine" in err


def test_stdin_can_be_one_of_several(tree, capsys):
    status, _, err = run(capsys, "check", "-", "-")
    assert status == 2
    assert "stdin can be read only once" in err


def test_many_models_take_flat_memory(tmp_path, monkeypatch, capsys):
    resource = pytest.importorskip("resource")
    monkeypatch.chdir(tmp_path)
    for number in range(120):
        os.makedirs(f"tree/{number}")
        tensors = {f"layers.{layer}.w": np.full((8, 8), 0.5 + layer, "f4") for layer in range(200)}
        save_file(tensors, f"tree/{number}/model.safetensors", durable=False)
    assert run(capsys, "check", "-r", "tree", "--structure")[0] == 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        assert run(capsys, "check", "-r", "tree", "--threads", "1")[0] == 0
        before, after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, before
    assert before - after < 4096, f"{before - after} KiB more for 120 models"
