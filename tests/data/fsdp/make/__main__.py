"""Make the fixtures of rank files again, with torch's own `torch.save`.

    pip install torch==2.13.0 safetensors==0.8.0 numpy
    cd tests/data/fsdp && python -m make [FOLDER]

Processes are joined by gloo; no GPU is needed. ``<fixture>.safetensors`` holds the whole tensors.
"""

import sys

from .folders import make

if __name__ == "__main__":
    make(sys.argv[1] if len(sys.argv) > 1 else ".")
