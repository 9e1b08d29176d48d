"""Make the fixtures of training checkpoints again, with torch's own writers.

    pip install torch==2.13.0 safetensors==0.8.0 zstandard==0.25.0 numpy
    cd tests/data/dcp && python -m make

Processes are joined by gloo; no GPU is needed. ``expected_<processes>.safetensors`` holds the whole tensors, as
`DTensor.full_tensor` gives them.
"""

import sys

from .folders import COMMITTED, KINDS, make

if __name__ == "__main__":
    every = dict.fromkeys((1, 2, 4), KINDS)
    folders = [argument for argument in sys.argv[1:] if argument != "--all"]
    make(folders[0] if folders else ".", every if "--all" in sys.argv else COMMITTED)
