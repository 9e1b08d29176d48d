"""``safeload convert``: write another format, dtype or layout; and ``safeload extract``: write a LoRA adapter."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..conversion.destinations import is_folder, refuse_inputs, where
from ..core import packing, registry
from ..core.text import printable, show
from ..formats.mixtures import mixtures
from ..models.layout import TOOLS, Layout, built_in
from ..quant.families import presets
from ..remote.url import is_url
from . import common
from .files import against_of
from .parsers import (
    ADAPTER,
    CACHE,
    DASK,
    JSON,
    METADATA,
    OPENING,
    PATTERNS,
    POSITIVE,
    STORAGE_OPTION,
    THREADS,
    TRUSTED,
    argument,
    command,
    flag,
    path,
    repeated,
)

if TYPE_CHECKING:
    from ..conversion.decide import ConvertReport

_ALL = "*"  # the pattern of a scheme for all matrices


@command(
    "Write the tensors and metadata of files or folders in another format, dtype or layout, in the memory of the "
    f"largest tensor. The suffix of the destination selects the format: {', '.join(registry.SUFFIXES)}.",
    """examples:
  safeload convert model.pth model.safetensors --dtype bfloat16
  safeload convert training.ckpt model.safetensors --root state_dict
  safeload convert Llama-3.2-1B/ llama.gguf --quantize q4_k_m
  safeload convert Qwen2.5-VL-3B/ mmproj.gguf --part vision
  safeload convert Llama-3.2-1B/ llama.safetensors --quantize q4_0
  safeload convert Llama-3.2-1B/ mixed/ --quantize q4_k --quantize '*down*=q6_k'
  safeload convert Llama-3.2-1B/ shards/ --max-shard-size 500MB
  safeload convert flux1-dev.safetensors flux.gguf --quantize q4_k_m
  safeload convert f16.gguf q4.gguf --quantize q4_k_m --imatrix imatrix.gguf
  safeload convert model.safetensors text.safetensors --drop 'vision.*'
  safeload convert old.safetensors new.safetensors --rename '^model\\.' ''
  safeload convert moondream2/ moondream.bin --layout moondream2 --dtype float16
  safeload convert DeepSeek-V3/ bf16/ --dtype bf16 --resume
  safeload convert Llama-3.2-1B/ merged/ --adapter my-lora/
  safeload convert my-lora/ my-lora.gguf --base Llama-3.2-1B/
  safeload convert Llama-3.2-1B/ s3://bucket/llama/ --dtype float16

Options apply in this order: --only and --drop select tensors by their names in the source, --adapter changes them,
--dtype and --quantize convert them, --rename renames them.

A model of transformers becomes a .gguf file that llama.cpp runs, with its tokenizer, and a .gguf file becomes a folder
that transformers loads. The only weight file of a model stands for its folder. For a .gguf file, patterns of --quantize
match llama.cpp's names, such as '*ffn_down*', or names in the source. A diffusion model becomes a .gguf file for
ComfyUI, and such a file becomes a checkpoint again; flux, sd1 and sdxl can be quantized.

With --resume or --dask, a folder is written shard by shard, and its subfolder .safeload-resume/ has the complete shards
until the conversion is finished. If the conversion is interrupted, run the same command with --resume to
continue.""",
    argument(
        "source", "SOURCE", "a file, a folder, an index.json, a URL, or - for stdin; several are merged", nargs="+"
    ),
    argument(
        "destination",
        "DESTINATION",
        "a file, or a folder: a path or URL without suffix or with a final slash; or - for stdout",
    ),
    common.dtype('dtype for floating tensors, such as "float32" or "BF16"'),
    argument(
        "--quantize",
        "[PATTERN=]SCHEME",
        "quantize matrices, or only matrices with matching names; may be repeated, the first match wins: "
        f"{', '.join(packing.SCHEMES)}, or none. For a .gguf file also llama.cpp's mixtures: {', '.join(mixtures())}. "
        f"For a folder also the formats of engines: {', '.join(packing.ENGINE_FORMATS)}",
        suggested=lambda: (*packing.SCHEMES, *mixtures(), *presets()),
        action="append",
    ),
    argument(
        "--imatrix",
        "FILE",
        "llama.cpp importance matrix for --quantize, in GGUF or the older format; only for a single file",
    ),
    flag("--requantize", "round the codes of a quantized source again if the new format cannot hold them"),
    flag("--exact", "refuse a format that would change any value of a quantized source"),
    argument("--scale-dtype", None, "dtype of the scales of an engine's format", choices=["float32"]),
    repeated("--keep --ignore", "PATTERN", "leave these tensors or modules unquantized"),
    argument(
        "--part",
        None,
        "part of a model of text and images for a .gguf file: text (the default), or vision, for --mmproj of llama.cpp",
        choices=("text", "vision"),
    ),
    argument(
        "--layout",
        "NAME",
        f"stack layers: {', '.join(built_in())}, or a JSON file; with --base: names of kohya or diffusers",
        suggested=built_in,
    ),
    *PATTERNS,
    argument("--name", "TENSOR", argparse.SUPPRESS, action="append"),  # exact, superseded by --only
    ADAPTER,
    argument(
        "--base",
        "BASE",
        "write SOURCE, a LoRA of this model, for llama.cpp (.gguf), mlx-lm or PEFT (a folder), kohya or diffusers",
    ),
    repeated(
        "--rename", ("REGEX", "REPLACEMENT"), r"rename tensors like Python's re.sub: \1 is the first group", nargs=2
    ),
    argument("--verify", "FILE", "verify the sources against a manifest or signature while reading"),
    TRUSTED,
    METADATA,
    flag("--no-extras", "do not copy tokenizer, chat template and generation_config.json"),
    argument(
        "--format",
        "NAME",
        f"output format, whatever the suffix: {', '.join(registry.WRITTEN)}",
        type=str.lower,
        choices=registry.WrittenNames(registry.WRITTEN),
    ),
    argument(
        "--max-shard-size", "SIZE", 'write a folder of shards of at most this size, such as "500MB"; default: 5GB'
    ),
    flag(
        "--raw",
        "keep names and rows, instead of writing what llama.cpp, ComfyUI (.gguf) or transformers (a folder) "
        "loads; --quantize then names block types, not file types",
    ),
    flag("--overwrite", "replace an existing destination"),
    flag("--resume", "continue an interrupted conversion to a folder"),
    *OPENING,
    THREADS,
    CACHE,
    DASK,
    flag("--record", "write a record of origin beside the result: origin.json in a folder, NAME.origin.json"),
    flag("--check-result", "compare the result with the sources, and fail on anything lost or changed"),
    flag("--json", "print a summary as one JSON object"),
    status="0 success, 1 a file is bad or cannot be read or written, 2 wrong usage.",
)
def convert(options: argparse.Namespace) -> int:
    """Convert, and print what was written."""
    common.check_once(options.source)
    to_stdout = options.destination == common.STANDARD
    sharded = options.max_shard_size is not None or is_url(options.destination)
    passed = [name for name in ("resume", "dask", "max_shard_size") if getattr(options, name)]
    if passed and (to_stdout or not (sharded or is_folder(where(options.destination), options.format))):
        option = passed[0].replace("_", "-")
        raise ValueError(f"--{option} needs a folder as destination, got {show(options.destination)}")
    if options.check_result:
        _refuse_check(options)
    if to_stdout:
        if options.base is not None:
            raise ValueError("--base writes an adapter, which cannot go to stdout: pass a path")
        if options.record:
            raise ValueError("--record writes beside the destination, which is stdout: pass a path")
        if options.json:
            raise ValueError(f"{common.STANDARD} and --json both write to stdout; pass only one of them")
        with common.binary_stdout() as stdout:
            report = _convert(options, stdout)
        print(common.in_options(str(report._replace(destination="stdout", files=["stdout"]))), file=sys.stderr)
        return 0
    report = _convert(options, options.destination)
    if options.json:
        result = {"files": report.files, "format": report.format, "tensors": report.tensors, "nbytes": report.nbytes}
        if report.summary is not None:
            result.update({key: getattr(report.summary, key) for key in ("quantized", "kept", "codes")})
        common.print_json({**result, "seconds": round(report.seconds, 3)})
    else:
        print(common.in_options(str(report)))
    return _check_result(options) if options.check_result else 0


def _refuse_check(options: argparse.Namespace) -> None:
    """Refuse to check a result that other options make differ from its sources, or that cannot be read again."""
    names = ("only", "drop", "name", "rename", "layout", "root", "raw", "stored", "base")
    option = next((name for name in names if getattr(options, name) not in (None, False)), "")
    if option:
        raise ValueError(f"--check-result compares whole models; it cannot be combined with --{option}")
    if common.STANDARD in (options.destination, *options.source):
        raise ValueError("--check-result reads sources and destination again: pass paths")


def _check_result(options: argparse.Namespace) -> int:
    """Print the losses and changes of the result."""
    from ..checking.findings import CheckReport
    from .check import add_losses

    report = CheckReport(common.shown(options.destination))
    add_losses(report, options.destination, options)
    for finding in (*report.errors, *report.notes):
        print(printable(str(finding)), file=sys.stderr)
    print(f"compared with the source: {report.verdict}", file=sys.stderr)
    return 0 if report.ok else 1


def _convert(options: argparse.Namespace, destination: Any) -> ConvertReport:
    from .. import convert

    metadata = (text.partition("=") for text in options.metadata)  # a key without a value is removed
    layout = options.layout
    if layout is not None and layout not in TOOLS and options.base is None:
        refuse_inputs(destination, [layout])
        layout = built_in().get(layout) or Layout.from_json(layout)
    with ExitStack() as stack, common.running(options, "convert") as how:
        plain = (options.root, options.unknown_globals, options.stored) == (None, "refuse", False)
        if options.verify is None and (options.key is not None or options.certificate):
            raise ValueError("--key and --certificate need --verify SIGNATURE")
        verify = against_of(options.verify, options)
        if verify is not None and not plain:
            raise ValueError("--verify cannot be combined with --root, --unknown-globals and --stored")
        sources = map(common.source, options.source)
        return convert(
            list(sources) if plain else [stack.enter_context(common.open_path(path, options)) for path in sources],
            destination,
            quantize=_schemes(options.quantize),
            layout=layout,
            names=options.name,
            rename=None if options.rename is None else [tuple(pair) for pair in options.rename],
            metadata={key: value if sign else None for key, sign, value in metadata},
            extras=not options.no_extras,
            verify=verify,
            **common.given(
                options,
                "dtype imatrix requantize exact scale_dtype part only drop keep raw max_shard_size format overwrite "
                "adapters base resume storage_options record",
            ),
            **how,
        )


def _schemes(texts: list[str] | None) -> Any:
    """Return a scheme for all matrices, or schemes by pattern, with the scheme without a pattern as the last."""
    if not texts:
        return None
    schemes: dict[str, str | None] = {}
    for text in sorted(texts, key=lambda text: "=" not in text):
        pattern, sign, scheme = text.rpartition("=")
        if not scheme or (sign and not pattern):
            raise ValueError(f"--quantize {show(text)}: expected SCHEME or PATTERN=SCHEME")
        pattern = pattern if sign else _ALL
        if pattern in schemes:
            what = "a scheme for all matrices" if pattern == _ALL else f"pattern {show(pattern)}"
            raise ValueError(f"--quantize has {what} twice")
        schemes[pattern] = None if scheme.lower() == "none" else scheme
    alone = schemes.get(_ALL) if len(schemes) == 1 else None
    return schemes if alone is None else alone


# ---- extract ----


@command(
    "Extract a LoRA adapter from a fine-tuned model: factors of the difference of each matrix from the base, as a "
    "folder for PEFT. List the rank and error of each matrix, and changed tensors without factors.",
    """examples:
  safeload extract Llama-3.2-1B/ my-llama/ -o my-lora/ --rank 16
  safeload extract Llama-3.2-1B/ my-llama/ -o my-lora/ --rank 64 --with-rest --dtype bfloat16
  safeload extract Llama-3.2-1B/ my-llama.gguf -o my-lora/ --only '*_proj*'""",
    path("base"),
    path("fine"),
    argument("-o --output", "FOLDER", "folder to write: adapter_model.safetensors, adapter_config.json", required=True),
    argument("--rank", "N", "largest rank of the factors; default: 16", type=POSITIVE, default=16),
    argument(
        "--dtype",
        None,
        "dtype of the factors; default: float32",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
    ),
    flag("--with-rest", "store norms, biases, embeddings and tensors of another shape whole if they differ"),
    *PATTERNS,
    flag("--overwrite", "replace an adapter in the folder"),
    STORAGE_OPTION,
    THREADS,
    JSON,
)
def extract(options: argparse.Namespace) -> int:
    """Write the adapter, and print the report."""
    from .. import extract

    common.check_once([options.base, options.fine])
    common.refuse(options.output, "--output needs a folder")
    base, fine = common.source(options.base), common.source(options.fine)
    with common.bar("extract") as progress:
        same = common.given(options, "rank dtype with_rest only drop overwrite storage_options threads")
        report = extract(base, fine, options.output, progress=progress, **same)
    if options.json:
        common.print_json(report.to_dict())
    else:
        common.print_lines(report.lines(common.columns()))
    return 0
