"""Rows of the command line: exit status, stdout and stderr of each command. A new call is a row of the list here."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from builders.paths import DATA

from . import fixtures
from .rows import Rows

NAMES = (
    *("info", "get", "check", "stats", "convert", "edit", "diff", "patch", "report", "scan", "verify", "sign", "ls"),
    "completion",
)
HELP = [["--help"], *([name, "--help"] for name in NAMES)]

# Run in this order in one folder, where each sees what those before it have written.
CALLS = [
    ["info", "multi_layer.safetensors"],
    ["multi_layer.safetensors"],
    ["info", "model"],
    ["info", "model", "--tree"],
    ["info", "model", "--json"],
    ["info", "llama"],
    ["info", "iq.gguf"],
    ["info", "lora"],
    ["info", "lora", "--base", "base.safetensors"],
    ["info", "mixed_types.pt", "--json"],
    ["info", "package-module.pt"],
    ["info", "absent.safetensors"],
    ["info", "org/absent"],
    ["get", "base.safetensors", "absent"],
    ["get", "llama", "model.norm.weight"],
    ["get", "llama", "model.embed_tokens.weight", "--json"],
    ["check", "llama"],
    ["check", "llama", "--json"],
    ["check", "broken.pt"],
    ["check", "cut.safetensors"],
    ["verify", "model", "--write", "model.json"],
    ["verify", "model", "--against", "model.json", "--tensors"],
    ["verify", "model", "--against", "model.json"],
    ["verify", "model", "--against", "model.json", "--json"],
    ["verify", "model"],
    ["stats", "llama"],
    ["stats", "llama", "--sort", "absmax", "--json"],
    ["scan", "mixed_types.pt"],
    ["scan", "package-module.pt", "--json"],
    ["convert", "llama", "out.safetensors"],
    ["convert", "llama", "out.safetensors"],
    ["convert", "llama", "out.safetensors", "--overwrite", "--dtype", "float32", "--json"],
    ["convert", "llama", "folder", "--quantize", "w8a8"],
    ["convert", "llama", "q4.gguf", "--quantize", "q4_k_m"],
    ["convert", "llama", "raw.gguf", "--quantize", "q8_0", "--raw"],
    ["convert", "llama", "bad.safetensors", "--quantize", "q9_9"],
    ["convert", "llama", "bad.safetensors", "--nonsense"],
    ["convert", "llama"],
    ["convert", "llama", "wrong.suffix"],
    ["convert", "base.safetensors", "merged.safetensors", "--adapter", "lora"],
    ["diff", "llama", "out.safetensors"],
    ["diff", "llama", "llama"],
    ["diff", "llama", "folder", "--json"],
    ["edit", "out.safetensors", "--metadata", "license=MIT"],
    ["edit", "out.safetensors"],
    ["info", "out.safetensors"],
    ["patch", "make", "base.safetensors", "merged.safetensors", "patch.safetensors"],
    ["patch", "apply", "base.safetensors", "patch.safetensors", "again.safetensors"],
    ["diff", "merged.safetensors", "again.safetensors"],
    ["report", "llama", "-o", "report.html"],
    ["sign", "model"],
    ["ls"],
    ["completion", "bash"],
    ["completion", "zsh"],
    ["completion", "fish"],
    ["nonsense-command"],
    ["--version"],
    [],
]


def run(argv: list[str], folder: Path) -> str:
    """Exit status and streams of a command."""
    command = [sys.executable, "-m", "safeload", *argv]
    done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", stdin=subprocess.DEVNULL)
    return f"exit {done.returncode}\n{done.stdout}" + (f"\nstderr: {done.stderr}" if done.stderr else "")


def of_help(work: Path) -> Rows:
    """Help; spaces, and whether a metavariable is repeated for a short option, differ between versions of Python."""
    for argv in HELP:
        text = " ".join(run(argv, work).split())
        yield f"commands/{' '.join(argv)}", re.sub(r"(-[\w-]+) (\S+), (-[\w-]+ \2)", r"\1, \3", text)


def of_calls(work: Path) -> Rows:
    """Commands on a few files."""
    names = ("multi_layer.safetensors", "gguf/iq.gguf", "lora/base.safetensors", "torch/mixed_types.pt")
    for name in (*names, "torch/broken.pt", "torch/package-module.pt"):
        shutil.copy(DATA / name, work)
    shutil.copytree(DATA / "signatures/model", work / "model")
    shutil.copytree(DATA / "lora/plain", work / "lora")
    shutil.copytree(fixtures.made("llama_cpp/llama3", work), work / "llama")
    content = (work / "multi_layer.safetensors").read_bytes()
    (work / "cut.safetensors").write_bytes(content[:-1])
    for number, argv in enumerate(CALLS):
        yield f"commands/{number:02} {' '.join(argv)}", run(argv, work)
