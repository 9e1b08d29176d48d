"""Downloads the sdists of safetensors whose tests safeload passes into a folder.

pip wants a sdist's metadata, for which it runs the build backend, maturin, which wants Rust. A stand-in backend that
knows the metadata is enough to get the file.
"""

import os
import subprocess
import sys
from pathlib import Path

VERSIONS = ("0.8.0", "0.9.0rc1")

BACKEND = """
import os

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = "safetensors-VERSION.dist-info"
    os.makedirs(os.path.join(folder, name))
    for file, text in (("METADATA", "Metadata-Version: 2.1\\nName: safetensors\\nVersion: VERSION\\n"),
                       ("WHEEL", "Wheel-Version: 1.0\\n")):
        with open(os.path.join(folder, name, file), "w") as out:
            out.write(text)
    return name
"""


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    for version in VERSIONS:
        backend = folder / f"backend-{version}" / "maturin"
        backend.mkdir(parents=True, exist_ok=True)
        (backend / "__init__.py").write_text(BACKEND.replace("VERSION", version))
        options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder)]
        environment = {**os.environ, "PYTHONPATH": str(backend.parent)}
        command = [sys.executable, "-m", "pip", "download", "-q", *options, f"safetensors=={version}"]
        subprocess.run(command, env=environment, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
