"""Run the benches; write BENCHMARKS.md, its pictures and the measured table of README.md.

    python benches/report.py                        # run everything: an hour on a quiet machine
    python benches/report.py bench_open bench_gguf  # run two files, keep the results of all others
    python benches/report.py --only-write           # run nothing, write the pages from benches/results/

Each bench file runs in a process of its own, so no bench inherits another's memory or imports. Every result goes to
benches/results/; the pages show a selection. A missed target does not fail the run. A wrong result does, after all
files have run.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
PLOTS = HERE / "plots"
PAGE = ROOT / "BENCHMARKS.md"
README = ROOT / "README.md"
CHART = ROOT / "docs" / "pictures"
SKIPPED = 5  # pytest's exit status if a whole file is skipped, as bench_devices without a GPU

BENCHES = (
    "bench_open", "bench_small", "bench_load", "bench_cold", "bench_streamer", "bench_convert", "bench_quantize",
    "bench_quantize_kernels", "bench_engines", "bench_statistics", "bench_validate", "bench_verify", "bench_diff",
    "bench_save", "bench_saving", "bench_gguf", "bench_llama_quantize", "bench_dequantize", "bench_restore",
    "bench_adapters", "bench_torch", "bench_frameworks", "bench_jax", "bench_stream", "bench_devices", "bench_stack",
    "bench_pieces", "bench_training", "bench_distributed", "bench_remote", "bench_import", "bench_scaling",
    "bench_memory", "bench_moved_codes",
)  # fmt: skip

# Pictures: title, x axis, unit of the samples.
PICTURES = {
    "load_by_size": ("Time to load a file, by file size", "file size in bytes", "s"),
    "open_by_tensors": ("Time by number of tensors (4 KiB each, sparse)", "tensors", "s"),
    "operations_by_tensors": ("Time by number of tensors (32 bytes each)", "tensors", "s"),
    "by_threads": ("Time for 2.5 GB by number of threads", "threads", "s"),
    "memory_by_tensors": ("Peak memory growth by number of tensors (32 bytes each)", "tensors", "B"),
    "memory_by_size": ("Peak memory growth by file size", "file size in bytes", "B"),
}


class Row(NamedTuple):
    """A row of the page: a measured job against a peer."""

    bench: str
    job: str  # as the bench calls it; a shell pattern selects the row with the lowest ratio
    peer: str
    label: str  # for readers
    versus: str = ""  # the peer's name for readers, if `peer` is too long
    reason: str = ""  # why the peer is faster


_CALLS = "Equal within the noise: a 64-byte file costs only calls, and the peer is one extension function."

# Rows where a peer may be faster. `write` fails if the results hold a loss that no row here covers.
LOSSES = (
    Row("bench_save", "save_file 1 GiB, default against default", "safetensors.numpy.save_file",
        "save 1 GiB, defaults", "safetensors",
        "Our default waits for the disk (fsync) so that a crash cannot leave half a file; the peer's does not. "
        "With `durable=False` we are 1.6 times as fast."),
    Row("bench_saving", "save of a generator, 1 GiB, durable=False", "safetensors.numpy.save_file of a dict",
        "save 1 GiB from a generator", "safetensors, a dict",
        "The writes dominate, and vary from run to run. The generator takes the memory of one tensor."),
    Row("bench_small", "save, 1 x *", "safetensors", "save(bytes), one small tensor", "",
        "1.5 to 2 µs more, for the steps in Python; the peer is one extension function."),
    Row("bench_small", "save_file, durable=False, 1* x *", "safetensors", "save_file of a small file, not durable", "",
        "30 µs more for what keeps the old file whole: space is reserved, owner and mode are kept, the new file is "
        "locked."),
    Row("bench_small", "load(bytes), 1 x 64 B", "safetensors", "load(bytes), one 64-byte tensor", "", _CALLS),
    Row("bench_small", "*safe_open and each tensor, mmap, 10 x *", "safetensors",
        "safe_open, 10 small tensors one by one", "", "2 µs of 40: each read says that it uses the descriptor."),
    Row("bench_frameworks", "safeload.torch.load(bytes), 1 x *", "safetensors.torch",
        "torch: load(bytes), one tensor [32, 32]", "", _CALLS),
    Row("bench_jax", "*1 small tensor *JAX", "safetensors.flax*",
        "JAX: load(bytes) and save, one small tensor", "safetensors.flax",
        "4 µs more: loading waits for the values, because the caller may change the bytes; saving, as with NumPy. "
        "300 tensors are faster."),
    Row("bench_open", "open and list, n*, in 8 threads", "safeload.open in one thread",
        "open and list 300 or 100,000 tensors in 8 threads", "ours in one thread",
        "With the GIL, threads add switches. Without it (3.13t, two processors) 8 threads are 1.5 to 1.8 times as "
        "fast as one."),
    Row("bench_devices", "safeload.torch.load_file * tensors of 32 bytes to a GPU", "safetensors.torch",
        "torch: 300 or 100,000 tensors of 32 bytes to a GPU", "",
        "Measured before the garbage collector was paused, which took 1.4 of the 3.8 s; without it ours took 2.25 s."),
    Row("bench_devices", "safe_open.prefetch 2.5 GB, * threads", "safetensors",
        "torch: `prefetch` 2.5 GB to a GPU, 8 or 16 threads", "",
        "Our threads wait for each other in Python, theirs do not. `load_file` with as many threads takes 67 ms."),
    Row("bench_stack", "stack 24 layers of 6144 x 2048 f16 to float16",
        "safeload.numpy, np.stack, ascontiguousarray", "stack 24 layers, no conversion", "safeload.numpy, np.stack",
        "Bound by memory, as is the peer; converted or transposed stacks are 6 to 25 times as fast."),
    Row("bench_remote", "convert 0.6 GB into a local folder, 1 Gbit/s, 5 ms", "huggingface_hub.snapshot_download",
        "convert 0.6 GB from the Hub into a folder", "snapshot_download, no conversion",
        "Both wait for the link; ours then waits for the disk (fsync)."),
)  # fmt: skip

WINS = (
    Row("bench_load", "load_file 2.5 GB, mmap, every page read once", "safetensors.numpy.load_file",
        "load 2.5 GB and touch every page", "safetensors"),
    Row("bench_cold", 'load_file 2.5 GB, page cache cold, backend="direct"',
        'safetensors.numpy.load_file(backend="pread")', 'load 2.5 GB from disk, backend="direct"',
        "safetensors, pread"),
    Row("bench_streamer", 'load_file 2.5 GB, backend="pread"', "runai-model-streamer, sync_buffered",
        'load 2.5 GB, backend="pread"', "runai-model-streamer"),
    Row("bench_load", "load_file of 100,000 tensors, mmap", "safetensors.numpy.load_file",
        "load 100,000 tensors", "safetensors"),
    Row("bench_frameworks", "safeload.torch.save, 1 x *", "safetensors.torch",
        "torch: save(bytes), one tensor [32, 32]"),
    Row("bench_open", "open, dtype and shape of all, n100k", "safetensors.safe_open, get_slice",
        "dtype and shape of 100,000 tensors", "safetensors"),
    Row("bench_convert", "load 2.5 GB bf16 as f32", "safetensors.numpy.load_file, astype",
        "load 2.5 GB of bf16 as f32", "safetensors, astype"),
    Row("bench_frameworks", "safeload.torch.load_file 2.5 GB of BF16 as F32, against .float()", "safetensors.torch",
        "torch: load 2.5 GB of bf16 as f32", "safetensors.torch, float()"),
    Row("bench_torch", "load a torch zip of 2.5 GB bf16 as f32", "torch.load*",
        "load a 2.5 GB .pt file as f32", "torch.load"),
    Row("bench_jax", "load 1 GiB of bf16 in 64 tensors into JAX", "safetensors.flax.load_file",
        "JAX: load 1 GiB", "safetensors.flax"),
    Row("bench_devices", "safeload.torch.load_file 2.5 GB to a GPU", "safetensors prefetch",
        "torch: 2.5 GB to a GPU (H100, 16 CPUs)", "safetensors, prefetch, 8 threads"),
    Row("bench_devices", "safeload.jax.load_file 2.5 GB to a GPU", "safetensors.flax",
        "JAX: 2.5 GB to a GPU (H100, 16 CPUs)", "safetensors.flax"),
    Row("bench_restore", "1 GB of an fp8 folder as f32", "numpy.memmap, astype, times the scales",
        "1 GB of fp8 with block scales as f32", "numpy"),
    Row("bench_restore", "gptq4 g128 to f32, 86 Mi elements in memory", "the numpy expression of the format",
        "dequantize GPTQ int4", "numpy"),
    Row("bench_dequantize", "load a Q4_0 model of 1.1 GB as f32", "gguf-py", "1.1 GB of Q4_0 as f32"),
    Row("bench_quantize", "2.5 GB bf16 folder to q4_0", "safetensors.numpy, astype, gguf-py quantize",
        "2.5 GB of bf16 to Q4_0", "safetensors, gguf-py"),
    Row("bench_llama_quantize", "folder of 9.1 GB of BF16 to q4_k_m, two threads", "llama-quantize from F16",
        "9.1 GB of bf16 to a Q4_K_M GGUF", "llama-quantize, from GGUF"),
    Row("bench_engines", "32 MiB of bf16 to w4a16", "llm-compressor", "a matrix of bf16 to w4a16, two threads"),
    Row("bench_engines", "1 GB folder of bf16 to mlx4", "mlx-lm", "1 GB of bf16 to MLX's 4 bits, with fsync",
        "mlx-lm, without"),
    Row("bench_adapters", "0.97 GB of bf16, merging an adapter of rank 16",
        "safetensors.torch, PEFT merge_and_unload", "merge a rank-16 LoRA adapter into 1 GB", "PEFT"),
    Row("bench_gguf", "open and list, 250,000 tokens", "gguf-py GGUFReader",
        "open a GGUF file with 250,000 tokens", "gguf-py"),
    Row("bench_validate", "validate the 2.5 GB bf16 folder", "numpy loop", "check 2.5 GB", "NumPy loop"),
    Row("bench_diff", "diff: two files of 1 GB bf16, all values differ", "safetensors.numpy, np.abs(x - y).max()",
        "diff two files of 1 GB", "safetensors, NumPy"),
    Row("bench_convert", "convert 100,000 tiny tensors by name, f32 to bfloat16",
        "safetensors.numpy load_file, save_file, fsync of file and folder",
        "convert 100,000 tensors to bf16", "safetensors, astype"),
    Row("bench_save", "save_file 1 GiB", "safetensors.numpy.save_file, fsync of file and folder",
        "save 1 GiB, both with fsync", "safetensors"),
    Row("bench_remote", "list a model of 5 shards on the Hub, 1 Gbit/s, 5 ms",
        "huggingface_hub.get_safetensors_metadata", "list a Hub model of 5 shards, 5 ms latency",
        "huggingface_hub, metadata only"),
    Row("bench_remote", "processor's time of the client for 1 GB, TLS, no limit, 5 ms", "fsspec.cat, np.frombuffer",
        "CPU time for 1 GB over HTTPS", "fsspec"),
    Row("bench_remote", "load 0.6 GB from the Hub, 1 Gbit/s, 5 ms",
        "huggingface_hub.snapshot_download, load_file", "load 0.6 GB from the Hub, 1 Gbit/s",
        "huggingface_hub, safetensors"),
    Row("bench_distributed", "a torch.distributed checkpoint of 4.3 GB, 4 processes, to one safetensors file",
        "dcp_to_torch_save, torch.load, save_file", "convert a torch.distributed checkpoint of 4.3 GB",
        "dcp_to_torch_save, save_file"),
    Row("bench_training", "Orbax checkpoint of 1 GiB to safetensors, in memory", "orbax, safetensors.numpy",
        "convert an Orbax checkpoint of 1 GiB", "orbax, safetensors"),
    Row("bench_verify", "load the 2.5 GB bf16 folder, signed", "model-signing, then safetensors.numpy",
        "load 2.5 GB with a signature", "model-signing, safetensors"),
)  # fmt: skip

# Rows of README.md, by their labels above.
FRONT_PAGE = (
    "load 2.5 GB of bf16 as f32",
    "1 GB of fp8 with block scales as f32",
    "2.5 GB of bf16 to Q4_0",
    "load 100,000 tensors",
    "save(bytes), one small tensor",
)
BEGIN, END = "<!-- measured: benches/report.py -->", "<!-- end -->"

_HEAD = """# Benchmarks

Both sides of a row run in one process, on the same file in the same page-cache state, in an order shuffled every
round. Results are compared for equality, and a difference fails the bench. Times are medians. If a ratio is above 1,
safeload is faster; in parentheses are the quartiles of the ratios of single rounds.

This page is written by `python benches/report.py` and shows {shown} of {total} measured rows. The folder
`benches/results` has all of them, including comparisons with machine limits (memcpy, plain reads and writes).
{reached} of {targets} targets are reached. [benches/README.md](benches/README.md) describes each job, what its numbers
depend on, and why targets are missed.
"""


# ---- results ----


def run(names: list[str]) -> list[str]:
    """Run bench files, one process each, and store their results. Return those that failed, whose old results stay."""
    failed = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "results.json"
            command = [sys.executable, "-m", "pytest", f"{name}.py", "--benchmark-enable", "-q", "-rs"]
            begin = time.monotonic()
            status = subprocess.run([*command, "--results", str(path)], cwd=HERE, check=False).returncode
            print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
            if status not in (0, SKIPPED):
                failed.append(name)
            elif path.exists():
                store(name, json.loads(path.read_text()))
    return failed


def store(name: str, measured: dict[str, Any]) -> None:
    """Write the results of a bench file, one row a line, and draw its pictures. Samples are not kept."""
    pictures = defaultdict(list)
    for point in measured["points"]:
        pictures[point["picture"]].append(point)
    for picture, points in pictures.items():
        draw(picture, points)
    rows = [{key: value for key, value in row.items() if key != "samples"} for row in measured["rows"]]
    points = [
        {**{key: point[key] for key in ("picture", "side", "x")}, "median": statistics.median(point["samples"])}
        for point in measured["points"]
    ]
    machine, *tables = (json.dumps(measured["machine"], ensure_ascii=False), lines(rows), lines(points))
    text = '{{"machine": {},\n"rows": [\n{}\n],\n"points": [\n{}\n]}}\n'.format(machine, *tables)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")


def lines(values: list[dict[str, Any]]) -> str:
    """JSON objects, one a line."""
    return ",\n".join(json.dumps(value, ensure_ascii=False) for value in values)


def read() -> dict[str, dict[str, Any]]:
    """Return the stored results by bench file."""
    paths = {name: RESULTS / f"{name}.json" for name in BENCHES}
    return {name: json.loads(path.read_text("utf-8")) for name, path in paths.items() if path.exists()}


def matches(row: Row, bench: str, measured: dict[str, Any]) -> bool:
    """True if a row of the page selects a measured row."""
    return (
        row.bench == bench
        and measured["by"] == "median"
        and fnmatchcase(measured["job"], row.job)
        and fnmatchcase(measured["peer"], row.peer)
    )


def select(row: Row, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the measured row with the lowest ratio that a row of the page selects.

    Raises:
        LookupError: no measured row matches.
    """
    rows = [measured for measured in results[row.bench]["rows"] if matches(row, row.bench, measured)]
    if not rows:
        raise LookupError(f"{row.bench} has no row {row.job!r} against {row.peer!r}")
    return min(rows, key=lambda measured: measured["ratio"])


def unlisted_losses(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Rows in which a peer is faster by more than 3 % and that `LOSSES` does not cover."""
    for bench, result in results.items():
        for measured in result["rows"]:
            if measured["at_most"] or measured["unit"] == "B" or measured["peer"].startswith("limit"):
                continue
            if measured["ratio"] < 0.97 and not any(matches(row, bench, measured) for row in LOSSES):
                yield f"{bench}: {measured['job']} against {measured['peer']}: {measured['ratio']:.3g}"


# ---- the pages ----


def quantity(value: float, unit: str = "s") -> str:
    """Format seconds or bytes."""
    if unit == "B":
        return f"{value / (1 << 20):.1f} MiB"
    for scale, name in ((1, "s"), (1e-3, "ms")):
        if value >= scale:
            return f"{value / scale:.3g} {name}"
    return f"{value * 1e6:.3g} µs"


def number(ratio: float) -> str:
    """Format a ratio."""
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Return a Markdown table whose first row is the heading."""
    heading, *body = rows
    return ["| " + " | ".join(row) + " |" for row in (heading, ("---",) * len(heading), *body)]


def cells(row: Row, measured: dict[str, Any]) -> tuple[str, ...]:
    """Return the job, both times, the peer and the ratio of a row."""
    low, high = map(number, measured["spread"])
    ratio = f"{number(measured['ratio'])} ({low} to {high})"
    return row.label, quantity(measured["ours"]), row.versus or row.peer, quantity(measured["theirs"]), ratio


def machine(results: dict[str, dict[str, Any]]) -> list[str]:
    """List the machine and the versions; a value that only some benches saw names these benches."""
    values: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, result in results.items():
        for key, value in result["machine"].items():
            if key != "load average":
                values[key][value].append(name)
    items = []
    for key, benches in values.items():
        usual, *rest = sorted(benches, key=lambda value: -len(benches[value]))
        items.append("; ".join([f"- {key}: {usual}", *(f"{value} ({', '.join(benches[value])})" for value in rest)]))
    return items


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return BENCHMARKS.md: losses with reasons, other rows, pictures, the machine.

    Raises:
        LookupError: a selected row was not measured, or a loss is not selected.
    """
    if unlisted := list(unlisted_losses(results)):
        raise LookupError("losses that the page does not show:\n" + "\n".join(unlisted))
    measured = [row for result in results.values() for row in result["rows"]]
    judged = [row["reached"] for row in measured if row["reached"] is not None]
    chosen = [(row, select(row, results)) for row in (*LOSSES, *WINS)]
    slower = [(row, found) for row, found in chosen if found["ratio"] < 1]
    faster = [(row, found) for row, found in chosen if found["ratio"] >= 1]
    heading = ("job", "safeload", "peer", "peer's time", "ratio (quartiles)")
    head = _HEAD.format(shown=len(chosen), total=len(measured), reached=sum(judged), targets=len(judged))
    text = [head, "## Where safeload is slower", ""]
    text += table([(*heading, "why"), *((*cells(*pair), pair[0].reason) for pair in slower)])
    text += ["", "## Where safeload is faster", "", *table([heading, *(cells(*pair) for pair in faster)])]
    text += ["", "## How cost grows", ""]
    text += [f"![{title}](benches/plots/{picture}.svg)\n" for picture, (title, _, _) in PICTURES.items()]
    text += ["## Machine and versions", "", *machine(results), ""]
    return "\n".join(text)


def with_measured_rows(readme: str, results: dict[str, dict[str, Any]]) -> str:
    """Return README.md with its measured table written anew."""
    rows = {row.label: row for row in (*LOSSES, *WINS)}
    body = []
    for label in FRONT_PAGE:
        measured = select(rows[label], results)
        versus = rows[label].versus or rows[label].peer
        times = quantity(measured["ours"]), versus, quantity(measured["theirs"])
        body.append((label, *times, f"{number(measured['ratio'])}x"))
    text = "\n".join(table([("job", "safeload", "peer", "peer's time", "speedup"), *body]))
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", readme)


def write() -> None:
    """Write BENCHMARKS.md, the measured table of README.md and its chart from the stored results."""
    results = read()
    PAGE.write_text(page(results), "utf-8")
    README.write_text(with_measured_rows(README.read_text("utf-8"), results), "utf-8")
    for mode in ("light", "dark"):
        chart(results, mode)
    print(f"written: {PAGE}, {README}")


# ---- pictures ----


def by_side(points: list[dict[str, Any]]) -> dict[str, list[tuple[float, list[float]]]]:
    """Map each side to its (x, samples), sorted by x."""
    sides: dict[str, list[tuple[float, list[float]]]] = defaultdict(list)
    for point in points:
        sides[point["side"]].append((point["x"], point["samples"]))
    return {side: sorted(values) for side, values in sides.items()}


def draw(picture: str, points: list[dict[str, Any]]) -> None:
    """Plot medians as lines and the quartiles as bands, on logarithmic axes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    title, axis, unit = PICTURES[picture]
    settings = {"svg.hashsalt": "safeload", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False}
    with mpl.rc_context({**settings, "axes.spines.right": False}):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        axes = figure.subplots()
        for side, values in by_side(points).items():
            x = [place for place, _ in values]
            medians = [statistics.median(samples) for _, samples in values]
            style = "-" if side.startswith("safeload") else "--"
            (line,) = axes.plot(x, medians, marker="o", markersize=3, label=side, ls=style)
            quartiles = [
                statistics.quantiles(samples if len(samples) > 1 else 2 * samples, n=4, method="inclusive")
                for _, samples in values
            ]
            low, _, high = zip(*quartiles, strict=True)
            axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15)
        axes.set(xscale="log", yscale="log", xlabel=axis, ylabel={"s": "seconds", "B": "bytes"}[unit], title=title)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(frameon=False)
        PLOTS.mkdir(exist_ok=True)
        figure.savefig(PLOTS / f"{picture}.svg", metadata={"Date": None})


def chart(results: dict[str, dict[str, Any]], mode: str) -> None:
    """Draw README.md's bars: the times of both sides for the first three rows of `FRONT_PAGE`."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    text, ours, theirs = {"light": ("#17202b", "#2458a6", "#b9c2cc"), "dark": ("#e5ebf2", "#8ab8f5", "#566373")}[mode]
    rows = {row.label: row for row in WINS}
    with mpl.rc_context({"svg.hashsalt": "safeload", "svg.fonttype": "none", "font.size": 10, "text.color": text}):
        figure = Figure(figsize=(7.6, 2.5), layout="constrained")
        axes = figure.subplots()
        for place, label in enumerate(reversed(FRONT_PAGE[:3])):
            measured = select(rows[label], results)
            for offset, color, seconds, side in (
                (0.2, ours, measured["ours"], f"safeload, {number(measured['ratio'])}x as fast"),
                (-0.2, theirs, measured["theirs"], rows[label].versus),
            ):
                axes.barh(place + offset, seconds, 0.36, color=color)
                axes.text(seconds + 0.05, place + offset, f"{quantity(seconds)}  {side}", va="center")
        axes.set_yticks(range(3), list(reversed(FRONT_PAGE[:3])))
        axes.set_xlim(0, 8.5)
        axes.xaxis.set_visible(False)
        axes.tick_params(length=0, colors=text)
        for spine in axes.spines.values():
            spine.set_visible(False)
        figure.savefig(CHART / f"speed-{mode}.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benches", nargs="*", metavar="NAME", help="bench files to run; default: all")
    parser.add_argument("--only-write", action="store_true", help="write the pages from stored results")
    options = parser.parse_args()
    if unknown := sorted(set(options.benches) - set(BENCHES)):
        parser.error(f"unknown bench {unknown[0]}; expected one of {', '.join(BENCHES)}")
    failed = [] if options.only_write else run(options.benches or list(BENCHES))
    write()
    if failed:
        sys.exit(f"failed, so their old results stay: {', '.join(failed)}")


if __name__ == "__main__":
    main()
