"""Runs the examples of a page: ``pycon`` and ``console`` blocks, in order, in one folder, output compared."""

import doctest
import json
import os
import re
import shutil
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from sybil import Document, Example, Region, Sybil
from sybil.evaluators.doctest import DocTestEvaluator, OutputChecker
from sybil.example import SybilFailure
from sybil.parsers.abstract.doctest import DocTestStringParser
from sybil.parsers.markdown import CodeBlockParser

from builders.dcp_build import Checkpoint, grid
from builders.models import small, write_folder
from builders.orbax_build import OrbaxCheckpoint
from builders.paths import ROOT
from builders.shell import output_of
from builders.torch_build import Call, Ref, Storage, tensor, zip_file
from safeload.numpy import save_file

# README.md is run by test_readme.py, in the checkout.
PAGES = sorted((ROOT / "docs").rglob("*.md"))

# "..." stands for anything; lines are broken where the page needs it.
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

_PROMPT = "$ "
_END = "\x1eend of output"
_DOCUMENT = "<<'END'"
# Pages whose commands use libraries with threads, which do not survive a fork.
_WITH_OTHER_LIBRARIES = ("remote.md", "several-machines.md")


def _sessions(document: Document) -> Iterator[Region]:
    """The examples of ``pycon`` blocks."""
    parse = DocTestStringParser(DocTestEvaluator(FLAGS))
    for block in CodeBlockParser("pycon", evaluator=_never)(document):
        for region in parse(block.parsed, document.path):
            region.adjust(block, block.parsed)
            yield region


def _never(example: Example) -> None:
    raise AssertionError("only the sessions in a block are run")


def _run_console(example: Example) -> str | None:
    """Runs the lines that begin with "$ ", and compares all that they print with the lines between them."""
    commands, wanted = _split(example.parsed.splitlines())
    # One shell for the block, so that a later line sees $? and variables.
    script = "".join(f"{_started(command)}\nstatus=$?; echo '{_END}'; (exit $status)\n" for command in commands)
    scripts = sysconfig.get_path("scripts")
    environment = {**os.environ, "COLUMNS": "80", "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    output = output_of(script, environment, forks=Path(example.path).name not in _WITH_OTHER_LIBRARIES)
    outputs = output.split(f"{_END}\n")[:-1]
    for command, want, got in zip(commands, wanted, outputs, strict=True):
        if not OutputChecker().check_output(want, got, doctest.ELLIPSIS):
            return f"$ {command}\nexpected:\n{want}\ngot:\n{got}"
    return None


def _started(command: str) -> str:
    """A command, and for a scheduler in the background the wait for its file, which takes long on a busy machine."""
    scheduler = re.fullmatch(r"dask scheduler .*--scheduler-file (\S+) .*&", command)
    return (
        command
        if scheduler is None
        else f"{command}\nuntil [ -s {scheduler[1]} ] || ! kill -0 $! 2>&-; do sleep 0.05; done"
    )


def _split(lines: Iterable[str]) -> tuple[list[str], list[str]]:
    commands: list[str] = []
    wanted: list[str] = []
    for line in lines:
        if line.startswith(_PROMPT):
            commands.append(line.removeprefix(_PROMPT))
            wanted.append("")
        elif commands and (commands[-1].endswith("\\") or _in_document(commands[-1])):
            commands[-1] += "\n" + line
        else:
            wanted[-1] += line + "\n"
    return commands, wanted


_SYBIL = Sybil(parsers=[_sessions, CodeBlockParser("console", evaluator=_run_console)])


def _in_document(command: str) -> bool:
    """Whether lines that a command reads, between <<'END' and END, are still to come."""
    return _DOCUMENT in command.partition("\n")[0] and not command.endswith("\nEND")


def examples_of(page: Path) -> list[Example]:
    """The examples of a page, in order; they share their names."""
    return list(_SYBIL.parse(page).examples())


def _write_adapter(folder: Path, base: dict[str, np.ndarray]) -> None:
    """A LoRA adapter as PEFT writes it, for two projections of each layer."""
    rank = 4
    rng = np.random.default_rng(7)
    tensors = {}
    for name in base:
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            rows, columns = base[name].shape
            place = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{place}.lora_A.weight"] = rng.standard_normal((rank, columns), np.float32) * np.float32(0.02)
            tensors[f"{place}.lora_B.weight"] = rng.standard_normal((rows, rank), np.float32) * np.float32(0.02)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", durable=False)
    (folder / "adapter_config.json").write_text(json.dumps(config))


def failure_of(example: Example) -> str | None:
    """Runs an example; what is wrong with its output, None if nothing is."""
    try:
        example.evaluate()
    except SybilFailure as failure:
        return str(failure)
    return None


def make_files(folder: Path) -> None:
    """The files that examples use; docs/index.md says what they are."""
    os.symlink(ROOT / "tests", folder / "tests")
    data = ROOT / "tests" / "data"
    shutil.copy(data / "silero_vad_16k.safetensors", folder / "model.safetensors")
    shutil.copy(data / "torch" / "checkpoint.pt", folder / "checkpoint.pt")
    shutil.copytree(data / "quantized" / "fp8_block", folder / "tiny-fp8")
    shutil.copytree(data / "quantized" / "modelopt_nvfp4", folder / "tiny-nvfp4")
    config, tensors = small("llama-gqa")
    (folder / "tiny-llama").mkdir()
    write_folder(folder / "tiny-llama", config, tensors)
    training = Checkpoint()
    ranks = [f"__{rank}_0.distcp" for rank in range(4)]
    for name, array in tensors.items():
        rows = grid(array.shape, (4,) + (1,) * (array.ndim - 1))
        training.tensor(f"model.{name}", array, rows, files=ranks, path=("model", name))
    training.value("step", 1000).write(folder / "step-1000")
    shutil.copytree(data / "deepspeed" / "zero2_3", folder / "run")
    shutil.copytree(data / "fsdp" / "line_2", folder / "actor")
    orbax = OrbaxCheckpoint().string(("optimizer",), "adamw")
    for name, array in tensors.items():
        orbax.tensor(f"params.{name}", array, steps=("params", name))
    orbax.write(folder / "jax-run" / "3" / "state")
    for name in ("model.keras", "legacy.h5"):
        shutil.copy(data / "keras" / name, folder / name)
    with tarfile.open(folder / "model.nemo", "w") as archive:
        archive.add(data / "torch" / "checkpoint.pt", "model_weights.ckpt")
    shutil.copy(data / "flax" / "train_state.msgpack", folder / "train_state.msgpack")
    shutil.copy(data / "onnx" / "torch.onnx", folder / "decoder.onnx")
    tensors["model.layers.2.self_attn.k_proj.weight"] = np.full((64, 64), 0.5, ml_dtypes.bfloat16)
    tensors["model.layers.2.self_attn.k_proj.weight"][0] = 0
    tensors["model.layers.1.mlp.up_proj.weight"][...] = 0
    tensors["model.norm.weight"][63] = np.nan
    (folder / "broken-llama").mkdir()
    write_folder(folder / "broken-llama", config, tensors)
    _write_adapter(folder / "tiny-lora", tensors)
    lightning = {
        "state_dict": {"w": tensor(Storage("0", np.ones(4, np.float32)))},
        "by": Call(Ref("my.module", "Config")),
    }
    (folder / "lightning.ckpt").write_bytes(zip_file(lightning))
    save_file({"scores": np.float32([0.25, np.inf])}, folder / "inf.safetensors")
