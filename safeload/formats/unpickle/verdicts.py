"""Judge the globals of a pickle: harmless, unknown or dangerous, and why.

The allowlist of `torch.globals` decides what is harmless. The table of dangerous names decides nothing else: it
only gives a reason to names that are not on the allowlist anyway. A name that is in neither is unknown, never harmless.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Literal, NamedTuple, TypeAlias

from .machine import Global
from .trace import COMPUTED, GETATTR, NOT_TEXT

Verdict: TypeAlias = Literal["harmless", "unknown", "dangerous"]
HARMLESS: Verdict = "harmless"
UNKNOWN: Verdict = "unknown"
DANGEROUS: Verdict = "dangerous"
# From the best to the worst; the position is the exit status of ``safeload scan``.
VERDICTS: tuple[Verdict, ...] = (HARMLESS, UNKNOWN, DANGEROUS)

_RUNS, _CODE, _ANY = "runs programs", "runs code in the pickle", "reaches any object by its name"
_FILES, _NETWORK = "reads or writes files", "reaches the network"
_LOADS = "loads another pickle or library"

# Modules and names by reason; a module stands for everything in it. Names that sound files use stay unknown.
_TABLE = {
    _RUNS: (
        "_aix_support _osx_support _posixsubprocess _pyrepl _winapi antigravity asyncio commands.getoutput "
        "commands.getstatusoutput distutils.core distutils.dir_util distutils.file_util distutils.spawn "
        "distutils.util ensurepip fabric multiprocessing.connection multiprocessing.managers multiprocessing.util "
        "nt os paramiko pexpect pip platform._syscmd_ver platform.popen popen2 posix pty subprocess test.support "
        "torch.utils.collect_env torch.utils.cpp_extension uuid._get_command_stdout uuid._ifconfig_getter "
        "uuid._netstat_getter uuid._popen venv webbrowser"
    ),
    _CODE: (
        "IPython _operator.methodcaller bdb builtins.apply builtins.breakpoint builtins.compile builtins.eval "
        "builtins.exec builtins.execfile cProfile cloudpickle.cloudpickle._builtin_type "
        "cloudpickle.cloudpickle._fill_function cloudpickle.cloudpickle._function_setstate "
        "cloudpickle.cloudpickle._make_cell cloudpickle.cloudpickle._make_empty_cell "
        "cloudpickle.cloudpickle._make_function cloudpickle.cloudpickle._make_skel_func "
        "cloudpickle.cloudpickle.subimport code.InteractiveConsole code.InteractiveInterpreter code.interact "
        "codeop dill._dill._create_code dill._dill._create_function dill._dill._eval_repr dill._dill._get_attr "
        "dill._dill._import_module doctest idlelib lib2to3 logging.config marshal new.code new.function "
        "numexpr.evaluate numpy.f2py numpy.testing._private numpy.testing.utils operator.methodcaller "
        "pandas.core.computation.eval.eval pandas.eval pdb profile pydoc runpy sympy.core.sympify.sympify "
        "tensorflow.python.ops.script_ops timeit torch._dynamo.guards torch._inductor.codecache "
        "torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression "
        "torch.jit.unsupported_tensor_ops torch.utils.bottleneck.__main__ trace.Trace types.CodeType "
        "types.FunctionType types.LambdaType yaml.load yaml.unsafe_load"
    ),
    _ANY: (
        "_operator.attrgetter builtins.__import__ builtins.delattr builtins.globals builtins.locals "
        "builtins.reload builtins.setattr builtins.vars gc imp importlib operator.attrgetter pkgutil sys "
        "zipimport"
    ),
    _FILES: (
        "_io.FileIO _io.open _io.open_code _pyio builtins.file builtins.input builtins.open builtins.raw_input "
        "codecs.open fileinput io.FileIO io.open linecache logging.FileHandler logging.handlers mmap "
        "numpy.fromfile numpy.save numpy.savetxt shutil tempfile torch.from_file torch.save"
    ),
    _NETWORK: (
        "_socket aiohttp asyncore ftplib http.client http.server httplib httpx imaplib nntplib poplib "
        "requests.api requests.sessions smtplib socket.create_connection socket.getaddrinfo socket.gethostbyname "
        "socket.socket socketserver ssl telnetlib urllib.request urllib.urlopen urllib2 urllib3 websockets xmlrpc"
    ),
    _LOADS: (
        "_ctypes _pickle cPickle cffi ctypes joblib.load numpy.ctypeslib.load_library numpy.load "
        "pandas.io.pickle.read_pickle pandas.read_pickle pickle shelve torch.classes.load_library torch.hub "
        "torch.jit.load torch.load torch.ops.load_library torch.serialization.load torch.utils._config_module "
        "torch.utils.data.datapipes.utils.decoder"
    ),
}
# Modules of which another module's attribute is as dangerous as they are: "logging.os.system".
_INSIDE = frozenset(
    ("os", "posix", "nt", "sys", "subprocess", "importlib", "ctypes", "runpy", "pty", "shutil", "socket")
)
_BUILTINS = frozenset(("__builtin__", "__builtins__"))
# Parts of a name that lead from any object to any other.
_ATTRIBUTES = frozenset(
    ("__globals__", "__subclasses__", "__builtins__", "__code__", "__loader__", "__getattribute__", "__reduce_ex__")
)


class JudgedGlobal(NamedTuple):
    """A global, its verdict and the reason."""

    name: str
    verdict: Verdict
    reason: str


@cache
def _dangerous() -> dict[str, str]:
    """Return the reason of each dangerous module and name."""
    return {name: reason for reason, names in _TABLE.items() for name in names.split()}


def judge(name: str, allowed: Mapping[str, Global], *, called: bool) -> JudgedGlobal:
    """Judge a global by its dotted name: module and attributes."""
    if name in allowed:
        if not called or allowed[name].build is not None:
            return JudgedGlobal(name, HARMLESS, "on the allowlist")
        if name.endswith(".memmap"):
            return JudgedGlobal(name, DANGEROUS, _FILES)
        return JudgedGlobal(name, UNKNOWN, "on the allowlist, but not to be called")
    if name in GETATTR:
        return JudgedGlobal(name, UNKNOWN, "reads attributes; each is listed")
    parts = name.split(".")
    if COMPUTED in parts or NOT_TEXT in parts:
        return JudgedGlobal(name, DANGEROUS, "hidden: its name is computed when the pickle runs")
    reason = _reason(parts)
    if reason is not None:
        return JudgedGlobal(name, DANGEROUS, reason)
    return JudgedGlobal(name, UNKNOWN, "not on the allowlist")


def _reason(parts: list[str]) -> str | None:
    """Return why a name is dangerous, or None."""
    table = _dangerous()
    if parts[0] in _BUILTINS:
        parts = ["builtins", *parts[1:]]
    for size in range(1, len(parts) + 1):
        reason = table.get(".".join(parts[:size]))
        if reason is not None:
            return reason
    for k, part in enumerate(parts[1:], 1):
        if part in _ATTRIBUTES:
            return _ANY
        if k + 1 < len(parts) and (part in _INSIDE or part in ("builtins", *_BUILTINS)):
            return _reason(parts[k:])
    return None


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict; harmless if there is none."""
    return max(verdicts, key=VERDICTS.index, default=HARMLESS)
