"""Downloads the sdist of safetensors 0.8.0 into a folder and prints its path.

pip wants a sdist's metadata, for which it runs the build backend, maturin, which wants Rust. A stand-in backend that
knows the metadata is enough to get the file.
"""

import os
import subprocess
import sys
from pathlib import Path

REQUIREMENT = "safetensors==0.8.0"

BACKEND = """
import os

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = "safetensors-0.8.0.dist-info"
    os.makedirs(os.path.join(folder, name))
    for file, text in (("METADATA", "Metadata-Version: 2.1\\nName: safetensors\\nVersion: 0.8.0\\n"),
                       ("WHEEL", "Wheel-Version: 1.0\\n")):
        with open(os.path.join(folder, name, file), "w") as out:
            out.write(text)
    return name
"""


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    backend = folder / "backend" / "maturin"
    backend.mkdir(parents=True, exist_ok=True)
    (backend / "__init__.py").write_text(BACKEND)
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(backend.parent)}
    command = [sys.executable, "-m", "pip", "download", "-q", *options, REQUIREMENT]
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    print(next(folder.glob("safetensors-*.tar.gz")))


if __name__ == "__main__":
    main()
