"""Make the fixtures of ZeRO checkpoints again, with DeepSpeed's own writer.

    pip install torch==2.13.0 safetensors==0.8.0 numpy packaging ninja setuptools
    DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8
    cd tests/data/deepspeed && DS_ACCELERATOR=cpu python -m make [FOLDER]

Processes are joined by gloo; no GPU is needed. ``<fixture>.safetensors`` holds the weights that DeepSpeed's
``zero_to_fp32`` gives.
"""

import sys

from .folders import make

if __name__ == "__main__":
    make(sys.argv[1] if len(sys.argv) > 1 else ".")
