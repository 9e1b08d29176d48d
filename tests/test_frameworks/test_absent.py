"""Without torch everything else works, and what needs it says what to type."""

import subprocess
import sys

import numpy as np

from safeload.numpy import save_file

ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import inspect
import safeload, safeload.torch as ours
path = sys.argv[1]
inspect.getmembers(safeload), inspect.getmembers(ours)
assert "torch" in dir(safeload) and safeload.torch is ours
calls = {
    "load_file": lambda: ours.load_file(path), "load": lambda: ours.load(open(path, "rb").read()),
    "save_file": lambda: ours.save_file({}, "x"), "save": lambda: ours.save({}),
    "load_model": lambda: ours.load_model(None, path), "save_model": lambda: ours.save_model(None, "x"),
    "load_checkpoint": lambda: ours.load_checkpoint(path), "safe_open": lambda: safeload.safe_open(path, "pt"),
    "_TYPES": lambda: ours._TYPES, "_find_shared_tensors": lambda: ours._find_shared_tensors,
}
for name, call in calls.items():
    for _ in range(2):
        try:
            call()
        except ImportError as error:
            assert str(error) == (
                "safeload.torch needs PyTorch, which is not installed: pip install torch"
            ), error
            assert error.name == "torch" and error.__suppress_context__
        else:
            assert name == "_find_shared_tensors", name
print(*safeload.load(path))
"""

BROKEN = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("libtorch_cpu.so: cannot open shared object file") from OSError("no such file")
sys.meta_path.insert(0, Broken())
import safeload.torch
safeload.torch.save({})
"""


def run(code, *arguments):
    return subprocess.run([sys.executable, "-I", "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_without_torch_the_error_says_what_to_type_and_all_else_works(tmp_path):
    save_file({"w": np.ones(2)}, tmp_path / "x")
    done = run(ABSENT, tmp_path / "x")
    assert (done.stdout, done.stderr) == ("w\n", "")


def test_a_torch_that_is_broken_says_what_is_wrong_with_it():
    done = run(BROKEN)
    assert done.stderr.endswith("ImportError: libtorch_cpu.so: cannot open shared object file\n")
    assert "OSError: no such file\n\nThe above exception was the direct cause" in done.stderr


def test_neither_import_nor_a_look_at_its_members_imports_torch():
    code = "import sys, inspect, safeload, safeload.torch; inspect.getmembers(safeload); dir(safeload.torch); "
    code += "print('torch' in sys.modules, 'torch' in dir(safeload), 'torch' in safeload.__all__)"
    assert run(code).stdout.split() == ["False", "True", "False"]
