"""Make the fixtures of Orbax checkpoints again, with Orbax itself.

    pip install orbax-checkpoint==0.12.8 jax==0.10.2 numpy
    cd tests/data/orbax && python -m make

Each process has two CPU devices; `jax.distributed` joins the processes by gloo. Folders become zip archives.
``expected_<processes>.npz`` holds what Orbax restores, as NumPy arrays: dtypes unknown to NumPy as bytes, with the name
of the dtype after "|" in the key.
"""

import sys

from .folders import COMMITTED, KINDS, make

if __name__ == "__main__":
    every = dict.fromkeys((1, 2, 4), KINDS)
    folders = [argument for argument in sys.argv[1:] if argument != "--all"]
    make(folders[0] if folders else ".", every if "--all" in sys.argv else COMMITTED)
