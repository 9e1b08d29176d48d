"""What pyproject.toml cannot say: the cffi extension, the wheel tag of the stable ABI, and what a build needs."""

import re
import shutil
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, ExecError, PlatformError

NEEDS = """

safeload was not built: to build it from source, pip needs a C compiler and the headers of Python.
  Debian, Ubuntu   apt install gcc libc6-dev python3-dev
  Fedora           dnf install gcc python3-devel
  Alpine           apk add gcc musl-dev python3-dev
  macOS            xcode-select --install
  Windows          Visual Studio Build Tools with "Desktop development with C++"
  conda            conda install c-compiler
A wheel needs none of these: build one on a machine that has them (pip wheel .), and install the file here."""


class BuildExtension(build_ext):
    """Says what to install when there is no compiler, or when it fails."""

    def build_extensions(self):
        """Compiles, or ends with one message."""
        command = getattr(self.compiler, "compiler_so", None)  # of compilers that are called like cc; MSVC finds itself
        if command and shutil.which(command[0]) is None:
            raise PlatformError(f"there is no C compiler {command[0]!r}{NEEDS}")
        try:
            super().build_extensions()
        except (CCompilerError, CompileError, ExecError, PlatformError, OSError) as error:
            raise CompileError(f"{error}{NEEDS}") from error


class Build(build):
    """Compiles first, so that the message of a failure does not come after 100 lines on copied files."""

    sub_commands = sorted(build.sub_commands, key=lambda command: command[0] != "build_ext")


def long_description():
    """README.md as a package index shows it: without the pictures and links that lead into a checkout."""
    text = Path(__file__).with_name("README.md").read_text("utf-8")
    text = re.sub(r"<picture>.*?</picture>\n\n", "", text, flags=re.DOTALL)
    return re.sub(r"\[([^\]]+)\]\((?!https?://)[^)]+\)", r"\1", text)


# One wheel for CPython 3.10 and later; a free-threaded interpreter has no stable ABI and gets its own.
options = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp310"}}

setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    cffi_modules=["csrc/ffi_build.py:ffibuilder"],
    cmdclass={"build": Build, "build_ext": BuildExtension},
    options=options,
)
