"""What pyproject.toml cannot say: the cffi extension, and the wheel tag of the stable ABI."""

import sysconfig

from setuptools import setup

# One wheel for CPython 3.10 and later; a free-threaded interpreter has no stable ABI and gets its own.
options = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp310"}}

setup(cffi_modules=["csrc/ffi_build.py:ffibuilder"], options=options)
