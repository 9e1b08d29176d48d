"""A fork while another thread imports: the child does what the thread was about to do, whenever it is cut."""

import ast
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from builders import inside
from builders.inside import forking
from builders.paths import ROOT
from builders.thorough import dealt, part_of

from safeload.numpy import save_file

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

# A pristine process forks one for each moment: its thread does something for the first time, and at the thread's nth
# import, found or not, the main thread forks. The child does the thread's work from the beginning.
PROGRAM = """
import importlib.abc, os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore")
{before}
path, moments = sys.argv[1], [int(text) for text in sys.argv[2].split(",")]

def work():
    {work}

class Cut(importlib.abc.MetaPathFinder):
    def __init__(self, moment):
        self.left, self.begun, self.thread = moment, threading.Event(), None
    def find_spec(self, name, path=None, target=None):
        if threading.get_ident() == self.thread:
            self.left -= 1
            if self.left == 0:
                self.begun.set()
                time.sleep(0.02)  # a disk that takes its time

def forked(function):
    child = os.fork()
    if child == 0:
        status = 3
        try:
            signal.alarm(120)  # importing torch takes 30 s on a busy machine
            function()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def beside(moment):
    cut, errors = Cut(moment), []
    def run():
        cut.thread = threading.get_ident()
        try:
            work()
        except BaseException as error:
            errors.append(error)
        cut.begun.set()
    sys.meta_path.insert(0, cut)
    thread = threading.Thread(target=run)
    thread.start()
    cut.begun.wait()
    status = forked(work)
    thread.join()
    assert not errors, errors
    if status:
        os._exit(status if status > 0 else 9)

for moment in moments:
    status = forked(lambda: beside(moment))
    if status:
        sys.exit(f"forked at import {{moment}}: {{status}}")
print("fine")
"""

OPENED = "import numpy, safeload; opened = safeload.open(sys.argv[1])"
MOMENTS = [1, 2, 5, 13, 34, 89]

DOORS = {
    "first stream": (OPENED, "assert dict(opened.stream())['a'].sum() == 3"),
    "first open": ("import safeload", "assert safeload.open(path)['a'].sum() == 3"),
    "first load": ("import safeload", "assert safeload.load(path, dtype='bfloat16')['a'].sum() == 3"),
    "first safe_open": ("import safeload", "assert safeload.safe_open(path, 'np').get_tensor('a').sum() == 3"),
    "first load_file": ("import safeload", "import safeload.numpy as n; assert n.load_file(path)['a'].sum() == 3"),
    "first safe_open of numpy": ("import safeload.numpy", "safeload.numpy.safe_open(path, 'np').get_tensors()"),
    "first save": (
        "import safeload.numpy, numpy as np",
        "safeload.numpy.save_file({'a': np.ones(1)}, path + str(os.getpid()), durable=False)",
    ),
    "first convert": (
        "import safeload",
        "safeload.convert(path, path + str(os.getpid()) + '.npz', dtype='float16', overwrite=True)",
    ),
    "first quantize": (OPENED, "safeload.load_quantized(path, 'int8')"),
    "first stats and validate": (OPENED, "safeload.stats(path); assert safeload.check(path).ok"),
    "first patterns and plan": (
        OPENED,
        "opened.load(only='a*'); safeload.plan_convert(path, path + '.d', max_shard_size=99)",
    ),
    "first error": (OPENED, "try: opened['b']\n    except KeyError: pass"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("fork") / "model.safetensors"
    save_file({"a": np.ones(3, np.float32)}, path, durable=False)
    return path


def run(program, path, moments=MOMENTS):
    done = subprocess.run(
        [sys.executable, "-c", program, str(path), ",".join(map(str, moments))],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=path.parent,
    )
    assert done.stdout == "fine\n", done.stderr[-2000:]


@pytest.mark.parametrize("door", part_of([*DOORS], 0, 2))
def test_a_child_forked_during_a_first_use_can_do_it_too(door, path):
    before, work = DOORS[door]
    run(PROGRAM.format(before=before, work=work), path, part_of(MOMENTS, [*DOORS].index(door), 4))


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_a_child_forked_during_the_first_use_of_a_framework(library, path):
    pytest.importorskip(library)
    door = {
        # torch's own first sum is not safe either: a child waits forever for a C++ static that its parent initialized
        "torch": "from safeload.torch import load_file; assert load_file(path)['a'].numpy().sum() == 3",
        # JAX's own threads do not survive a fork: only its import is shown
        "jax": "from builders.inside import jax_arrays",
    }
    run(inside.program(PROGRAM.format(before="import safeload, builders.inside", work=door[library])), path, [2, 150])


def statements(tree):
    """Yield the statements in a tree, without looking at their expressions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield node
            yield from statements(node)


def test_every_package_that_is_imported_on_first_use_is_waited_for():
    """In functions, `try` blocks and modules that are themselves imported late."""
    roots = set()
    for module in (ROOT / "safeload").rglob("*.py"):
        for node in statements(ast.parse(module.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                roots |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                roots.add(node.module.partition(".")[0])
    only_for_types_or_the_command_line = {"distributed", "gguf", "safetensors", "typing_extensions"}
    assert roots - sys.stdlib_module_names - only_for_types_or_the_command_line <= forking.PACKAGES


def test_the_import_of_another_package_is_not_waited_for(tmp_path):
    """A program may run for hours in the import of a module of its own."""
    (tmp_path / "endless.py").write_text(
        "import time\nstarted.set()\ntime.sleep(60)\n".replace("started", "__import__('builtins').started")
    )
    program = """
import builtins, os, sys, threading, time
import safeload
sys.path.insert(0, sys.argv[1])
builtins.started = threading.Event()
threading.Thread(target=lambda: __import__("endless"), daemon=True).start()
builtins.started.wait()
begun = time.monotonic()
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
print(time.monotonic() - begun < 5, flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", program, str(tmp_path)], capture_output=True, text=True
    )
    assert done.stdout == "True\n", done.stderr


# A thread imports a module that has hooks for forks; its import is held up until the main thread forks.
HOOKED = """
import importlib.abc, os, sys, threading, time, warnings
warnings.simplefilter("ignore")
{before}
import safeload
module, held_up = sys.argv[1:]
begun = threading.Event()

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == held_up:
            begun.set()
            time.sleep(0.3)

def run():
    __import__(module)
    begun.set()

sys.modules.pop(held_up, None)
sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=run)
thread.start()
begun.wait()
for _ in range(2):
    child = os.fork()
    if child == 0:
        import logging
        from concurrent.futures import ThreadPoolExecutor
        logging.getLogger("x").debug("x")
        with ThreadPoolExecutor(1) as pool:
            os._exit(pool.submit(lambda: 7).result())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
thread.join()
import logging
from concurrent.futures import ThreadPoolExecutor, thread
with ThreadPoolExecutor(1) as pool:
    assert pool.submit(lambda: logging.getLogger("x").debug("x")).result() is None
assert not thread._global_shutdown_lock.locked()
print("fine")
"""


@pytest.mark.parametrize(
    ("held", "before"),
    dealt(
        [
            ("logging", "string"),  # before its hooks
            ("logging.handlers", "pickle"),
            ("concurrent.futures", "atexit"),  # after logging's hooks, but before a logger is made
            ("concurrent.futures.thread", "concurrent.futures._base"),
            ("concurrent.futures.process", "multiprocessing.connection"),
        ],
        ["", "import logging", "import concurrent.futures.thread"],
    ),
)
def test_a_fork_of_a_module_imported_meanwhile(held, before):
    module, held_up = held
    program = HOOKED.format(before=before)
    command = [sys.executable, "-I", "-c", program, module, held_up]
    done = subprocess.run(command, capture_output=True, text=True, timeout=25)  # a fork gives up waiting after 30 s
    assert (done.stdout, done.stderr) == ("fine\n", "")


def test_no_module_has_properties_that_lock():
    """Those of Python 3.10 and 3.11 share a lock among all instances: a child waits for it forever."""
    for module in (ROOT / "safeload").rglob("*.py"):
        text = module.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if "cached_property" in text else ():
            if isinstance(node, ast.ImportFrom) and node.module == "functools" and module.name != "forking.py":
                assert "cached_property" not in [alias.name for alias in node.names], module


@pytest.mark.parametrize("name", ["columns", "spans"])
def test_a_child_forked_during_a_cached_property_can_compute_it(name, path):
    """Threads load one checkpoint: the first to ask for a column computes it."""
    program = inside.program("""
import os, signal, sys, threading, warnings
import safeload
from builders.inside import Tensors, tensors_of
warnings.simplefilter("ignore")
name, entries = sys.argv[2], tensors_of(safeload.open(sys.argv[1]))
begun, ended, main = threading.Event(), threading.Event(), threading.get_ident()
cached = vars(Tensors)[name]
attribute = "function" if hasattr(cached, "function") else "func"
compute = getattr(cached, attribute)

def slow(self):
    if threading.get_ident() != main:
        begun.set()
        ended.wait()
    return compute(self)

setattr(cached, attribute, slow)
thread = threading.Thread(target=lambda: getattr(entries, name))
thread.start()
begun.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(len(getattr(entries, name)[0]))
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
ended.set()
print(status)
""")
    command = [sys.executable, "-I", "-c", program, str(path), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n", done.stderr


def test_a_process_lock_is_free_in_a_child():
    lock = forking.ProcessLock()
    with lock.own:
        assert lock.own.locked()
        child = os.fork()
        if child == 0:
            with lock.own:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not lock.own.locked()


def test_a_fork_waits_until_a_tls_context_is_complete():
    """A child forked meanwhile hangs in OpenSSL, 3 in 100 times, when it makes a context."""
    pytest.importorskip("urllib3")
    program = inside.program("""
import os, ssl, threading, time, warnings
warnings.simplefilter("ignore")
from builders.inside import http_client
make, begun, complete = ssl.create_default_context, threading.Event(), []

def slow(*arguments, **options):
    begun.set()
    time.sleep(0.3)
    context = make(*arguments, **options)
    complete.append(context)
    return context

ssl.create_default_context = slow
thread = threading.Thread(target=http_client._context, args=[True])
thread.start()
begun.wait()
child = os.fork()
if child == 0:
    http_client._context(False)
    os._exit(len(complete))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
thread.join()
http_client._context(False)
""")
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_stores_outlive_a_fork_and_their_locks_are_process_locks():
    for module in (ROOT / "safeload/stores").rglob("*.py"):
        if module.name != "thread_group.py":  # of one call, in the process that makes it
            assert not re.search(r"threading\.R?Lock|Condition\(", module.read_text("utf-8")), module


# Starts to import a package of many modules in a thread, and forks meanwhile.
SLOW = inside.program("""
import os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from builders.inside import forking
forking._PATIENCE = 0.6
threading.Thread(target=lambda: __import__("tokenizers")).start()
while "tokenizers" not in sys.modules:
    time.sleep(0.01)
child = os.fork()
if child == 0:
    os._exit(0 if "tokenizers.last" in sys.modules else 5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")


def test_a_fork_waits_for_an_import_that_gets_on(tmp_path):
    package = tmp_path / "tokenizers"
    package.mkdir()
    names = [*(f"part{k}" for k in range(12)), "last"]
    package.joinpath("__init__.py").write_text("".join(f"import tokenizers.{name}\n" for name in names))
    for name in names:
        package.joinpath(f"{name}.py").write_text("import time; time.sleep(0.1)")
    done = subprocess.run([sys.executable, "-I", "-c", SLOW, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0\n", done.stderr
