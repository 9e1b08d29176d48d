"""safeload in the place of safetensors: in this program, and in the Python programs that it starts."""

import os
import signal
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest

import safeload
from safeload.numpy import save_file

pytest.importorskip("safetensors")
pytestmark = pytest.mark.no_core

posix = pytest.mark.skipif(os.name == "nt", reason="signals and symbolic links of POSIX")
SHIM = Path(safeload.__file__).parent / "compat" / "shim"

# Before the code of a test: the interpreter does not have the real package, or it has another one.
WITHOUT_REAL = """
import importlib.machinery, sys
class Rest:
    def find_spec(name, path=None, target=None):
        return None if name == "safetensors" else importlib.machinery.PathFinder.find_spec(name, path, target)
    find_distributions = importlib.machinery.PathFinder.find_distributions
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Rest
"""
INSTALL = "import sys, safeload\nundo = safeload.install_as_safetensors()\n"


def environment(**variables):
    rest = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return rest | {name: str(value) for name, value in variables.items() if value is not None}


def run(*arguments, status=0, folder=os.sep, executable=sys.executable, **variables):
    """The output of a Python program, in lines. It starts apart from the source tree, whose core may not be built."""
    done = subprocess.run(
        [executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env=environment(**variables),
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout.splitlines() if status == 0 else (done.stdout + done.stderr).splitlines()


def python(code, **options):
    return run("-W", "error", "-c", code, **options)


def command(*arguments, **options):
    return run("-W", "error", "-m", "safeload.as_safetensors", *arguments, **options)


@pytest.fixture
def path(tmp_path):
    save_file({"x": np.arange(6, dtype=np.float32)}, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


# ---- one program ----


def test_every_module_of_safetensors_is_safeloads():
    code = """
import safetensors, safetensors.numpy, safeload.numpy
from safetensors import SafetensorError, safe_open, serialize, deserialize, TensorSpec, serialize_file
from safetensors import _safe_open_handle, numpy
from safetensors.numpy import save_file as save
from safetensors._safetensors_rust import SafetensorError as raw, __version__
assert safetensors.numpy is numpy is safeload.numpy and save is safeload.numpy.save_file
assert SafetensorError is raw is safeload.SafetensorError and issubclass(safe_open, safeload.safe_open)
assert serialize is safeload.serialize and TensorSpec is safeload.TensorSpec
print(safetensors.__version__, __version__, safetensors._safetensors_rust.__name__)
"""
    assert python(INSTALL + code) == ["0.8.0 0.8.0 safetensors._safetensors_rust"]
    assert python(WITHOUT_REAL + INSTALL + code) == ["0.8.0 0.8.0 safetensors._safetensors_rust"]


def test_names_are_those_of_the_real_package():
    import safetensors
    from safetensors import _safetensors_rust

    code = "import safetensors, safetensors._safetensors_rust as r; print(*dir(safetensors)); print(*dir(r))"
    package, compiled = (line.split() for line in python(INSTALL + code))
    assert {name for name in dir(safetensors) if name != "__builtins__"} <= {*package, *safetensors.__dict__}
    public = {name for name in dir(safetensors) if not name.startswith("__")} - {"flax", "numpy", "torch"}
    assert public <= set(package)
    assert {name for name in dir(_safetensors_rust) if not name.startswith("__")} <= set(compiled)
    with_star = "from safetensors import *\nprint(safe_open, serialize, deserialize, SafetensorError, serialize_file)"
    assert "safeload" in python(INSTALL + with_star)[0]


def test_an_unknown_name_or_module_is_the_usual_error():
    code = """
import safetensors
for code in "safetensors.nothing", "from safetensors import nothing", "import safetensors.nothing", "safetensors.torch":
    try: exec(code)
    except (AttributeError, ImportError) as error: print(type(error).__name__, error)
"""
    lines = python(INSTALL + code)
    assert lines[0] == "AttributeError module 'safetensors' has no attribute 'nothing'"
    assert lines[1].startswith("ImportError cannot import name 'nothing' from 'safetensors'")
    assert lines[2] == "ModuleNotFoundError No module named 'safetensors.nothing'"
    assert lines[3] == "AttributeError module 'safetensors' has no attribute 'torch'"


def test_nothing_is_imported_before_a_program_asks_for_it():
    code = (
        f"ALIAS = {safeload.install_as_safetensors.__module__!r}"
        + """
import importlib.util
assert importlib.util.find_spec("safetensors").origin == sys.modules[ALIAS].__file__
import safetensors
assert not {"numpy", "torch", "jax"} & set(sys.modules)
if importlib.util.find_spec("torch"):
    import safetensors.torch
    assert "torch" not in sys.modules and callable(safetensors.torch.load_file)
"""
    )
    python(INSTALL + code)


@pytest.mark.parametrize("before", ["", WITHOUT_REAL])
def test_clients_that_ask_for_the_version_get_the_supported_one(before):
    code = """
import importlib.metadata as metadata
print(metadata.version("safetensors"), metadata.version("SafeTensors"), metadata.metadata("safetensors")["Name"])
print(metadata.distribution("safetensors").read_text("RECORD"), metadata.requires("safetensors"))
undo()
try: print(metadata.metadata("safetensors").get("Summary"))
except metadata.PackageNotFoundError: print("absent")
assert metadata.version("numpy")
"""
    lines = python(before + INSTALL + code)
    assert lines[:2] == ["0.8.0 0.8.0 safetensors", "None None"]
    assert "safeload" not in lines[2]


def test_a_framework_that_is_not_installed_is_missing_as_in_safetensors():
    absent = """
import importlib.machinery
class Rest:
    def find_spec(name, path=None, target=None):
        if name in ("torch", "jax"): return None
        return importlib.machinery.PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Rest
for name in "torch", "flax":
    try: __import__("safetensors." + name)
    except ModuleNotFoundError as error: print(error, error.name)
    assert "safetensors." + name not in sys.modules
"""
    assert python(INSTALL + absent) == ["No module named 'torch' torch", "No module named 'jax' jax"]


# A framework of which only as much exists as a module of safetensors needs.
FAKE_MLX = """
import types
core = types.ModuleType("mlx.core"); core.array = lambda x: ("mlx", x.tolist()); mlx = types.ModuleType("mlx")
mlx.core = core; sys.modules.update({"mlx": mlx, "mlx.core": core}); mlx.__path__ = []
"""


def test_modules_that_safeload_lacks_are_those_of_the_real_package(path):
    code = f"""
import safetensors.mlx, safeload.numpy
print(safetensors.mlx.__file__)
assert safetensors.mlx.numpy is safeload.numpy
with open({str(path)!r}, "rb") as file: print(safetensors.mlx.load(file.read()))
with safetensors.safe_open({str(path)!r}, framework="np") as file:
    assert file.get_tensor("x").sum() == 15
for framework in "tf", "mlx":
    with safetensors.safe_open({str(path)!r}, framework) as file: print(type(file).__module__, *file.keys())
"""
    lines = python(INSTALL + FAKE_MLX + code)
    assert lines[0].endswith("mlx.py")
    assert "safeload" not in lines[0]
    assert lines[1] == "{'x': ('mlx', [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])}"
    assert lines[2:] == ["builtins x"] * 2


def test_modules_that_safeload_lacks_need_the_real_package(path):
    code = f"""
import safetensors
for name in "mlx", "paddle", "tensorflow":
    try: __import__("safetensors." + name)
    except ImportError as error: print(error)
try: safetensors.safe_open({str(path)!r}, "mlx")
except safetensors.SafetensorError as error: print(error)
"""
    lines = python(WITHOUT_REAL + INSTALL + FAKE_MLX + code)
    assert lines[0] == (
        "safetensors.mlx is not part of safeload: install the real package for it, pip install safetensors"
    )
    assert [line.split()[0] for line in lines[1:3]] == ["safetensors.paddle", "safetensors.tensorflow"]
    assert lines[3].startswith("framework mlx is not supported")


def test_a_folder_of_weights_is_no_package(tmp_path):
    (tmp_path / "safetensors").mkdir()
    code = "import safetensors; print(safetensors.__path__)"
    assert python(WITHOUT_REAL + INSTALL + code, folder=tmp_path) == ["[]"]


def test_functions_files_and_classes_pickle(path):
    code = f"""
import pickle, copy
import safetensors, safetensors.numpy
for value in safetensors.numpy.save_file, safetensors.safe_open, safetensors.SafetensorError, safetensors.TensorSpec:
    assert pickle.loads(pickle.dumps(value)) is value
with safetensors.safe_open({str(path)!r}, "np") as file:
    for copied in pickle.loads(pickle.dumps(file)), copy.copy(file):
        assert type(copied) is safetensors.safe_open and copied.get_tensor("x").sum() == 15
"""
    python(INSTALL + code)
    # By the names under which the real package pickles.
    data = b"csafetensors.numpy\nsave_file\n.", b"csafetensors._safetensors_rust\nSafetensorError\n."
    code = f"import pickle\nfor data in {data!r}: assert 'safeload' in pickle.loads(data).__module__"
    python(INSTALL + code)


def test_reloading_keeps_the_alias():
    code = """
import importlib, safetensors, safetensors.numpy, safeload.numpy
assert importlib.reload(safetensors) is safetensors and safetensors.__version__ == "0.8.0"
assert importlib.reload(safetensors.numpy) is safeload.numpy is safetensors.numpy
assert safetensors.numpy.__spec__.name == "safeload.numpy" and safetensors.safe_open
importlib.invalidate_caches()
"""
    python(INSTALL + code)


def test_threads_that_import_at_once_get_one_module():
    code = """
import threading, importlib
names = ["safetensors", "safetensors.numpy", "safetensors._safetensors_rust", "safeload.numpy"] * 8
barrier, results = threading.Barrier(len(names)), []
def work(name):
    barrier.wait()
    module = importlib.import_module(name)
    results.append((name.replace("safeload", "safetensors"), id(module), callable(getattr(module, "safe_open"))))
threads = [threading.Thread(target=work, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(results) == 32 and len(set(results)) == 3, set(results)
"""
    python(INSTALL + code)


def test_importing_safetensors_first_is_a_warning_that_names_the_line():
    code = """
import sys, warnings, safetensors.numpy, safeload
from safetensors.numpy import load_file
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    undo = safeload.install_as_safetensors()
    undo(); undo = safeload.install_as_safetensors(); again = safeload.install_as_safetensors()
    import safetensors.numpy
    more = safeload.install_as_safetensors()
assert [w.lineno for w in caught] == [6, 7] and {w.category for w in caught} == {RuntimeWarning}, caught
assert {w.filename for w in caught} == {"<string>"}
print(caught[0].message)
assert load_file.__module__ == "safetensors.numpy" and safetensors.numpy is safeload.numpy
"""
    (line,) = python(code)
    assert line == (
        "safetensors has already been imported, and modules keep the functions that they have imported from it: call "
        "safeload.install_as_safetensors() before other imports"
    )


def test_modules_that_are_mocked_or_forbidden_come_back():
    code = """
import sys, warnings, unittest.mock, safeload
warnings.simplefilter("ignore")
class Forbid:
    def find_spec(name, path=None, target=None):
        if name == "safetensors": raise ImportError("forbidden")
sys.meta_path.insert(0, Forbid)
for value in unittest.mock.MagicMock(), object(), None:
    sys.modules["safetensors"] = value
    undo = safeload.install_as_safetensors()
    import safetensors
    assert safetensors.__version__ == "0.8.0" and safetensors.__path__ == []
    undo()
    assert sys.modules["safetensors"] is value
"""
    python(code)


@pytest.mark.parametrize("before", ["", "import safetensors.numpy"])
def test_undo_restores_modules_finders_and_environment(before):
    code = f"""
import os, sys, warnings, importlib, safeload, safeload.numpy
safeload.safe_open, safeload.install_as_safetensors
warnings.simplefilter("ignore")
def state(): return dict(sys.modules), list(sys.meta_path), dict(os.environ)
for search in None, "", "/a", os.pathsep.join(["/a", "/b"]):
    for name in [name for name in sys.modules if name.partition(".")[0] == "safetensors"]: del sys.modules[name]
    {before}
    os.environ.pop("PYTHONPATH", None)
    if search is not None: os.environ["PYTHONPATH"] = search
    state_before, finders = state(), sys.meta_path
    first = safeload.install_as_safetensors()
    second = safeload.install_as_safetensors(subprocesses=True)
    third = safeload.install_as_safetensors(subprocesses=True)
    importlib.import_module("safetensors.numpy"), importlib.import_module("safetensors._safetensors_rust")
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0].endswith("shim")
    second(), second(), first()
    assert sys.modules["safetensors.numpy"] is safeload.numpy and "shim" in os.environ["PYTHONPATH"]
    third()
    assert state() == state_before and sys.meta_path is finders, set(sys.modules) ^ set(state_before[0])
    import safetensors.numpy
    assert safetensors.numpy.load_file.__module__ == "safetensors.numpy"
"""
    python(code)


def test_undo_keeps_what_a_program_has_changed_meanwhile():
    code = """
import os
more = safeload.install_as_safetensors(subprocesses=True)
os.environ["PYTHONPATH"] += os.pathsep + "/mine"
sys.meta_path.insert(0, "mine")
undo(), more()
assert sys.meta_path.pop(0) == "mine"
print(os.environ["PYTHONPATH"])
gone = safeload.install_as_safetensors(subprocesses=True)
del os.environ["PYTHONPATH"]
gone()
print("PYTHONPATH" in os.environ)
"""
    assert python(INSTALL + code, PYTHONPATH="/a") == [os.pathsep.join(["/a", "/mine"]), "False"]


# ---- programs that it starts ----

WHO = "import safetensors.numpy; print(safetensors.numpy.load_file.__module__)"


def test_a_program_started_by_this_one_uses_safeload_only_if_asked():
    code = f"""
import os, subprocess
def child(*options): return subprocess.run([sys.executable, *options, "-c", {WHO!r}], check=True)
child()
more = safeload.install_as_safetensors(subprocesses=True)
child(), child("-I"), child("-E"), undo(), child(), more(), child()
"""
    real, ours = "safetensors.numpy", "safeload.numpy"
    assert python(INSTALL + code) == [real, ours, real, real, ours, real]


def test_processes_of_multiprocessing_use_safeload(tmp_path):
    (tmp_path / "main.py").write_text(
        "import multiprocessing\n"
        "def who(_):\n    import safetensors.numpy\n    return safetensors.numpy.load_file.__module__, __name__\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(who, [0]))\n"
    )
    assert command(tmp_path / "main.py") == ["[('safeload.numpy', '__mp_main__')]"]


def test_a_program_is_run_as_without_the_command(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, safetensors\n"
        "assert sys.modules['__main__'].__dict__ is globals() and __name__ == '__main__' and __spec__ is None\n"
        "print(__file__, sys.argv, sys.path[0], safetensors.__version__)\n"
    )
    (tmp_path / "mod.py").write_text("import sys, safetensors; print(__spec__.name, sys.argv[1:], sys.path[0])")
    assert command(script, "-h", "--x", "") == [f"{script} {[str(script), '-h', '--x', '']} {tmp_path} 0.8.0"]
    assert command("-m", "mod", "-c", "a b", folder=tmp_path) == [f"mod ['-c', 'a b'] {os.path.realpath(tmp_path)}"]
    assert command("-c", "import sys; print(sys.argv)", "-m", "x") == ["['-c', '-m', 'x']"]
    standard_input = subprocess.run(
        [sys.executable, "-m", "safeload.as_safetensors", "-", "x"],
        input=f"import sys; print(sys.argv); {WHO}",
        capture_output=True,
        text=True,
        cwd=os.sep,
        env=environment(),
        check=True,
    )
    assert standard_input.stdout.splitlines() == ["['-', 'x']", "safeload.numpy"]


@pytest.mark.parametrize("form", [["-m", "safeload.as_safetensors"], ["-msafeload.as_safetensors"]])
def test_options_of_python_are_kept(form):
    show = "import sys; print(sys.flags.optimize, sys.flags.utf8_mode, sys.warnoptions, sys._xoptions)"
    arguments = ["-O", "-W", "ignore", "-X", "utf8", "-X", "a=b"]
    plain = run(*arguments, "-c", show)
    assert run(*arguments, *form, "-c", show) == plain
    combined = [f"-O{form[0][1:]}", *form[1:]]  # -Om safeload.as_safetensors, -Omsafeload.as_safetensors
    assert run(*combined, "-c", show) == run("-O", "-c", show)


def test_exit_status_and_traceback_are_the_programs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import safetensors\ndef f():\n    raise ValueError(3)\nf()\n")
    lines = command(script, status=1)
    assert lines == run(script, status=1)
    assert [line for line in lines if "File" in line] == [
        f'  File "{script}", line 4, in <module>',
        f'  File "{script}", line 3, in f',
    ]
    assert command("-c", "raise SystemExit(7)", status=7) == []
    assert command("-c", "import os; os._exit(3)", status=3) == []
    assert "can't open file" in command(tmp_path / "none.py", status=2)[0]
    assert "No module named nothing_here" in command("-m", "nothing_here", status=1)[0]


@posix
def test_the_program_gets_the_signals():
    code = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    arguments = [sys.executable, "-m", "safeload.as_safetensors", "-c", code]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    for number in (signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen(arguments, text=True, cwd=os.sep, env=environment(), **pipes) as process:
            assert int(process.stdout.readline()) == process.pid
            process.send_signal(number)
            error = process.communicate(timeout=60)[1]
            assert process.returncode == -number
            assert ("KeyboardInterrupt" in error) == (number == signal.SIGINT)
            assert "as_safetensors" not in error


def test_the_usage_is_printed_for_help_and_mistakes_are_named():
    text = command("--help")
    assert text == command("-h")
    assert text[0] == "usage: python -m safeload.as_safetensors SCRIPT [ARG ...]"
    assert max(map(len, text)) <= 79
    assert "no SCRIPT given" in command(status=2)[0]
    assert "unknown option -u" in command("-u", "x.py", status=2)[0]
    for option in ("-I", "-E", "-S"):
        code = f"import sys; sys.path[:] = {sys.path!r}; sys.argv[1:] = ['x.py']; import safeload.as_safetensors as a"
        (line,) = run(option, "-c", f"{code}\nsys.exit(a.main(['x.py']))", status=2)
        assert "-I, -E and -S switch off" in line


@posix
def test_a_copy_in_the_working_directory_is_found_by_the_program_too(tmp_path):
    """As in a checkout that is not installed."""
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "safeload").symlink_to(Path(safeload.__file__).parent)
    (tmp_path / "script.py").write_text("import safeload; print(safeload.__file__)\n" + WHO)
    # The installed package is hidden from the path, as if there were only the copy.
    hide = f"""
import os, sys
here = {str(Path(safeload.__file__).parent.parent)!r}
sys.path[1:] = [entry for entry in sys.path[1:] if os.path.abspath(entry or ".") != here]
import safeload.as_safetensors as command
os.execv = command._run = lambda *_: sys.exit(print(os.environ["PYTHONPATH"]))
command.main([{str(tmp_path / "script.py")!r}])
"""
    (line,) = python(hide, folder=root)
    shim, folder = line.split(os.pathsep)
    assert (os.path.basename(shim), folder) == ("shim", os.path.realpath(root))
    assert run(tmp_path / "script.py", PYTHONPATH=line)[1] == "safeload.numpy"


# ---- the shim in other interpreters ----


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A Python without safeload and NumPy, in which safetensors is something else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    executable = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    (site,) = run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", executable=executable)
    package = Path(site) / "safetensors"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '9.9'")
    information = Path(site) / "safetensors-9.9.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: safetensors\nVersion: 9.9\n")
    return executable


VERSIONS = (
    "import safetensors, importlib.metadata, importlib.util; "
    "print(safetensors.__version__, importlib.metadata.version('safetensors'), "
    "'shim' in importlib.util.find_spec('safetensors').origin)"
)


@pytest.mark.parametrize(
    "more",
    [[], pytest.param([Path(safeload.__file__).parent.parent], marks=posix)],
    ids=["absent", "without NumPy"],
)
def test_a_python_without_safeload_imports_the_real_package(bare, more, tmp_path):
    for entry in more:  # only safeload: a folder of site-packages would bring NumPy too
        (tmp_path / "safeload").symlink_to(entry / "safeload")
    search = os.pathsep.join([str(SHIM), str(tmp_path)])
    assert run("-W", "error", "-c", VERSIONS, executable=bare, PYTHONPATH=search) == ["9.9 9.9 False"]


def test_the_shim_imports_nothing_for_a_program_that_does_not_ask(path):
    code = "import sys; print(*[name for name in sys.modules if name.startswith(('safe', 'numpy'))])"
    assert run("-c", code, PYTHONPATH=SHIM) == [""]
    listing = (
        "import importlib.metadata, sys; list(importlib.metadata.distributions()); print('safeload' in sys.modules)"
    )
    assert run("-c", listing, PYTHONPATH=SHIM) == ["False"]


def test_the_path_is_as_without_the_shim(tmp_path):
    show = "import sys; print(sys.path)"
    assert run("-c", show, PYTHONPATH=os.pathsep.join([str(SHIM), str(tmp_path)])) == run(
        "-c", show, PYTHONPATH=tmp_path
    )
    assert command("-c", show) == run("-c", show)


def test_the_shim_runs_the_sitecustomize_that_it_hides(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("ran = [__file__]")
    code = f"import sitecustomize; print(sitecustomize.ran); {WHO}"
    expected = [str([str(tmp_path / "sitecustomize.py")]), "safeload.numpy"]
    assert run("-c", code, PYTHONPATH=os.pathsep.join([str(SHIM), str(tmp_path)])) == expected
    # The shim twice, and two copies of it: each runs once.
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "sitecustomize.py").write_text((SHIM / "sitecustomize.py").read_text())
    for search in ([SHIM, SHIM, tmp_path], [SHIM, copy, tmp_path], [copy, SHIM, tmp_path]):
        assert run("-c", code, PYTHONPATH=os.pathsep.join(map(str, search))) == expected


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.8"])
def test_an_older_python_runs_as_without_the_shim(version):
    """It has no safeload; if one is on the path, it is of no use."""
    found = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    if not found:
        pytest.skip(f"needs Python {version}, as pyenv installs it")
    packages = str(Path(safeload.__file__).parent.parent)
    code = "import sys\ntry: import safetensors\nexcept ImportError as error: print(error); print(sys.argv)"
    plain, shimmed = (
        subprocess.run(
            [found[0], "-B", "-c", code],  # Python 2 would write beside the module
            capture_output=True,
            text=True,
            cwd=os.sep,
            env=environment(PYTHONPATH=path),
            check=True,
        )
        for path in (packages, os.pathsep.join([str(SHIM), packages]))
    )
    assert (shimmed.stdout, shimmed.stderr) == (plain.stdout, plain.stderr)
    assert plain.stdout.endswith("\n['-c']\n")


def test_an_error_of_the_hidden_sitecustomize_is_shown_as_ever(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("1 / 0")
    done = subprocess.run(
        [sys.executable, "-c", WHO],
        capture_output=True,
        text=True,
        cwd=os.sep,
        env=environment(PYTHONPATH=os.pathsep.join([str(SHIM), str(tmp_path)])),
        check=True,
    )
    assert "ZeroDivisionError" in done.stderr
    assert done.stdout == "safeload.numpy\n"


def test_a_program_under_the_command_can_install_and_undo():
    code = """
import os, warnings, safeload
before = os.environ["PYTHONPATH"]
undo = safeload.install_as_safetensors(subprocesses=True)
import safetensors.numpy
assert os.environ["PYTHONPATH"] == before
undo()
assert os.environ["PYTHONPATH"] == before
import safetensors.numpy
print(safetensors.numpy.load_file.__module__)
"""
    assert command("-c", code) == ["safeload.numpy"]
