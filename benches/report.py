"""Runs every bench and writes BENCHMARKS.md with its pictures.

    python benches/report.py                       # everything: three quarters of an hour of a quiet machine
    python benches/report.py bench_open bench_gguf # these again, the rest from the last run
    python benches/report.py --only-write          # the page from the results that are there
    python benches/report.py --section bench_open  # one again; the rest of the page stays as it is

Each file of benches runs in a process of its own, so that none lives on another's memory or imports. Results are kept
in `safeload-bench/report/` in the temporary folder. A missed target is no failure; a wrong result is one, and stops it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import files
import matplotlib

HERE = Path(__file__).resolve().parent
RESULTS = files.CACHE / "report"
PAGE = HERE.parent / "BENCHMARKS.md"
PLOTS = HERE / "plots"

# Sections of the page, in this order: file of benches, title.
SECTIONS = {
    "bench_open": "Opening and listing",
    "bench_small": "Small files",
    "bench_load": "Loading",
    "bench_cold": "Files that are not in the page cache",
    "bench_streamer": "Reading, beside runai-model-streamer",
    "bench_convert": "Converting while loading, and the kernels",
    "bench_quantize": "Quantizing while loading",
    "bench_quantize_kernels": "Quantization kernels",
    "bench_statistics": "Statistics",
    "bench_validate": "Validating, hashing",
    "bench_diff": "Comparing",
    "bench_save": "Saving",
    "bench_gguf": "GGUF",
    "bench_dequantize": "Restoring ggml's blocks",
    "bench_restore": "Restoring packed tensors",
    "bench_adapters": "Merging LoRA adapters",
    "bench_torch": "Torch checkpoints",
    "bench_frameworks": "Tensors of torch",
    "bench_jax": "Arrays of JAX",
    "bench_stream": "Tensors one after the other",
    "bench_devices": "To a GPU",
    "bench_stack": "Stacking and converting files",
    "bench_pieces": "In pieces, on several processes",
    "bench_remote": "By URL",
    "bench_import": "Importing",
    "bench_scaling": "How cost grows",
}

# Pictures of the page, in this order: title, axis, unit of what is measured.
PICTURES = {
    "load_by_size": ("Seconds to load a file by its size in bytes", "bytes of the file", "s"),
    "open_by_tensors": ("Seconds by the number of tensors (4 KiB each, sparse)", "tensors", "s"),
    "operations_by_tensors": ("Seconds by the number of tensors (32 bytes each)", "tensors", "s"),
    "by_threads": ("Seconds for 2.5 GB by the number of threads, up to that of the processors", "threads", "s"),
    "memory_by_tensors": ("Growth of peak memory by the number of tensors (32 bytes each)", "tensors", "B"),
    "memory_by_size": ("Growth of peak memory by the size of a file in bytes", "bytes of the file", "B"),
}

# Why a target may be missed: words of the job, and the measured limit.
REASONS = {
    "n100k_by_layer": "names that are not in order have to be sorted for `keys()`: 4 ms of the 17.",
    "dtype and shape of all": (
        "while the caller builds a dict of 100,000 descriptions, Python's garbage collector visits them again and "
        "again. With `gc.disable()` the ratio is 2.3."
    ),
    "load(bytes), 1 x": (
        "two dozen steps of Python and cffi around one parse; the peer is one call of an extension module."
    ),
    "safeload.torch.load(bytes), 1 x": "2.7 µs more than the peer, as above.",
    "safeload.torch.save, 1 x": (
        "5 µs more than the peer, which hands a dict to one call of an extension module; ours checks for shared memory "
        "and writes the header from columns. A file takes 50 µs and more to write."
    ),
    "every page read once": "page faults: see the limit, which maps the file, touches its pages and does nothing else.",
    "2.5 GB, mmap": (
        "0.22 ms in a loop. A sample here is the first call after gigabytes "
        "were taken and given back, and pays for pages of Python's heap that the host hands out again: 0.6 to "
        "7 ms."
    ),
    'backend="pread"': (
        "where the host has memory at hand for both sides, this is as fast as bare preadv into one fresh "
        "array, and as memcpy: see the limits beside it."
    ),
    "page cache cold": (
        "bound by the disk, whose own rate varies threefold from minute to minute, and through the page cache by "
        "the processor time of its pages: 0.31 s for 2 GiB against 0.13 past it. Where the result is written to the "
        "same disk, that is the longer part: stats of 1.4 GB took 0.54 s past the cache and 0.56 through it, validate "
        "0.49 and 0.54, so neither goes past it unasked. Other ways to read through the cache (readahead, WILLNEED, "
        "windows, more threads) were not faster than two plain readers: numbers in csrc/jobs/direct.c and op_copy.c."
    ),
    "bf16 as f32": (
        "see the limit: reading the file and storing its bytes twice in fresh memory, without any conversion, "
        "takes nearly as long. The peer's time is 1.5 to 4.5 s, as the host has memory at hand for its copies "
        "or not."
    ),
    "int8": (
        "the scale must be known before the first code is written, so the source is read twice: see the limit, which "
        "does no more, and is itself 6.3 times numpy here. numpy's time depends on whether its temporaries find memory "
        "at hand."
    ),
    "nvfp4 to f32": (
        "16 values share a scale, so the table of 16 numbers is scaled as often as a value is looked up 16 times: half "
        "as much again as the work of mxfp4, where 32 do."
    ),
    "f16 to float16": "the peer maps the file and copies it once, as ours does: see the limit beside it.",
    "summing each tensor": (
        "0.88 of the ceiling, where the target is 0.9: reading takes both processors, and one of them sums."
    ),
    "import safeload": ("the core's module, its ctypes signatures and a dozen small modules: 5 to 7 ms."),
    "default against default": ("ours waits for the disk (fsync), the peer's does not."),
    "elements in memory, one thread": (
        "memory is the limit of both sides: see the limits beside it. With the result in cache our kernels take a "
        "third of the time of ggml's C, or less. Non-temporal stores would take 0.8 to 0.9 of the time where the "
        "result goes to memory that was touched before, but 1.1 to 1.2 of it in fresh memory, where most results go."
    ),
    "transposed to f32": (
        "values change places on the way: one thread restores 2.5 to 3 billion a second, 10 to 12 GB/s of f32, and two "
        "do not reach half of what memcpy does with both."
    ),
    "gptq4 g128": "transposed, as above.",
    "awq4 g128": "transposed, as above.",
    "to f32, 86 Mi elements": (
        "the others are bound by memory, and what memcpy takes beside them varies from run to run between 8 and 15 ms. "
        "An hour before, all of them but those transposed reached their share of it; memcpy itself would be 13 times "
        "numpy."
    ),
    "merging an adapter": (
        "the products and sums of both sides are numpy's, ours tile by tile while the base is read: the peer holds "
        "base, product and result whole."
    ),
    "load 0.6 GB, 1 Gbit/s, 50 ms": (
        "the link is idle while connections are opened and the header is read: several waits of 50 ms each."
    ),
    "load 0.6 GB of BF16 as F32": "the same waits, and the last bytes are converted when the link has ended.",
    "into a local folder": "both wait for the link; ours then waits for the disk (fsync), the peer's does not.",
    "by the URL of its index": (
        "where answers come after 5 ms the processor's time counts: 8 ms of ours and 5 to 6 of the peer's. Where they "
        "come after 50 ms, ours waits for two of them and the peer for three."
    ),
    "model of 5 shards on the Hub": (
        "ours waits for five answers one after the other: the commit, and a redirect and what it leads to, for the "
        "index and then for all shards at once. 20 times as long as that, at 50 ms, is a download of 0.6 GB."
    ),
    "processor's time": (
        "on a link of 1 Gbit/s three quarters of ours is the system's. Fewer connections, and a receive of at least "
        "64 or 256 KiB (SO_RCVLOWAT), made no difference. It varies twofold with what else the machine does. Over "
        "TLS strace counts 153,000 reads and 453,000 calls of futex for 0.6 GB on 16 threads, and 2,400 and 49 of the "
        "peer, which has one: it makes waiting longer itself, so that the second number is an upper bound."
    ),
}

_HEAD = """# Benchmarks

Written by `python benches/report.py`; do not edit. What each job is, and what its numbers depend on, is told in
[benches/README.md](benches/README.md). Every row: both sides in one process and one run, the same file in the same
page-cache state, order shuffled in every round, results compared for equality beside the time (a difference fails the
bench and there would be no row). Times are medians. A ratio is theirs by ours, so above 1 we are faster; the quartiles
are of the ratios of single rounds, which on a noisy machine lie far apart. A peer called "limit" is what the machine
gives to plain code that does only the unavoidable part. Before each sample of a row of gigabytes, of either side, 9 GB
of memory are touched and given back: a host that takes free memory away within seconds would charge whoever comes next.
"""


def run(names: list[str]) -> None:
    """Runs files of benches, one process each."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in names:
        results = RESULTS / f"{name}.json"
        results.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", f"{name}.py", "--benchmark-enable", "-q", "-rs"]
        subprocess.run([*command, "--results", str(results)], cwd=HERE, check=True)


def read() -> dict[str, dict[str, Any]]:
    """Results by file of benches, those that are there."""
    return {
        name: json.loads((RESULTS / f"{name}.json").read_text())
        for name in SECTIONS
        if (RESULTS / f"{name}.json").exists()
    }


# ---- the page ----


def seconds(value: float, unit: str) -> str:
    """A quantity for people."""
    if unit == "B":
        return f"{value / (1 << 20):.1f} MiB"
    for scale, name in ((1, "s"), (1e-3, "ms")):
        if value >= scale:
            return f"{value / scale:.3g} {name}"
    return f"{value * 1e6:.3g} µs"


def number(ratio: float) -> str:
    """A ratio for people."""
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One row of a table."""
    job = row["job"] + (" (mean)" if row["by"] == "mean" else "")
    quantities = seconds(row["ours"], row["unit"]), seconds(row["theirs"], row["unit"])
    ratio = "" if row["unit"] == "B" else f"{number(row['ratio'])} ({' to '.join(map(number, row['spread']))})"
    if row["at_most"] and ratio:
        ratio = f"ours by theirs {ratio}"
    target = "" if row["target"] is None else f"{'at most ' if row['at_most'] else ''}{row['target']:g}"
    if row.get("within"):
        target += f", or {seconds(row['within'], 's')} more"
    reached = {True: "yes", False: "**no**", None: ""}[row["reached"]]
    return job, quantities[0], row["peer"], quantities[1], ratio, target, reached


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a Markdown table with a heading."""
    head = ("job", "safeload", "peer", "its time", "ratio (quartiles)", "target", "reached")
    return ["| " + " | ".join(line) + " |" for line in (head, ("---",) * len(head), *rows)]


def machine(found: dict[str, dict[str, Any]]) -> list[str]:
    """What it ran on; what was not the same for all files of benches is told for each."""
    said: dict[str, dict[str, list[str]]] = {}
    for name, result in found.items():
        for key, value in result["machine"].items():
            said.setdefault(key, {}).setdefault(value, []).append(name)
    lines = []
    for key, values in said.items():
        if key == "load average":
            loads = [float(value) for value in values]
            lines.append(f"- load average at the end of a file: {min(loads):g} to {max(loads):g}")
        else:
            usual, *others = sorted(values, key=lambda value: -len(values[value]))
            lines.append("; ".join([f"- {key}: {usual}", *(f"{v} ({', '.join(values[v])})" for v in others)]))
    return lines


def losses(rows: list[tuple[str, ...]]) -> list[str]:
    """Of rows as the page shows them: targets that were not reached, and peers that are faster where none is set."""
    behind = [row for row in rows if row[6] == "**no**"]
    slower = [
        row
        for row in rows
        if not row[5] and row[4][:1].isdigit() and _ratio(row) < 1 and not row[2].startswith("limit")
    ]
    targets = sum(bool(row[6]) for row in rows)
    lines = ["", f"{targets - len(behind)} of {targets} targets are reached."]
    for title, some in (("Targets that are not", behind), ("Rows without a target where the peer is faster", slower)):
        lines += ["", f"**{title}:**" if some else f"**{title}:** none."]
        if some:
            lines += ["", *table(some)]
    reasons = [
        f"- *{words}*: {why}" for words, why in REASONS.items() if any(words in row[0] for row in behind + slower)
    ]
    return [*lines, "", "Why, by words of the job:", "", *reasons] if reasons else lines


def _ratio(row: tuple[str, ...]) -> float:
    return float(row[4].partition(" ")[0].replace(",", ""))


def write(found: dict[str, dict[str, Any]]) -> None:
    """The page and its pictures. Sections of files that have no results here stay as they are on the page."""
    page = PAGE.read_text()
    lines = [_HEAD, "## Machine and versions", "", *machine(found), "", "## Where we lose"]
    points = [point for result in found.values() for point in result["points"]]
    for picture, (title, axis, unit) in PICTURES.items():
        some = [point for point in points if point["picture"] == picture]
        if some:
            draw(picture, title, axis, unit, some)
            lines += ["", f"## {title}", "", f"![{title}](benches/plots/{picture}.svg)", "", *grid(some, axis, unit)]
    for name, title in SECTIONS.items():
        lines += section(name, found[name]["rows"]) if name in found else kept(page, title)
    PAGE.write_text(with_losses("\n".join(lines) + "\n"))
    print(f"written: {PAGE}")


def kept(page: str, title: str) -> list[str]:
    """The lines of a section of the page; none where it has none of this title."""
    _, heading, behind = page.partition(f"\n## {title}\n")
    return ["", heading.strip(), *behind.partition("\n## ")[0].rstrip("\n").splitlines()] if heading else []


def section(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """The rows of a file of benches; none where it has none."""
    if not rows:
        return []
    rounds = sorted({row["rounds"] for row in rows})
    return [
        "", f"## {SECTIONS[name]}", "", *table([cells(row) for row in rows]),
        "", f"[{name}.py](benches/{name}.py), rounds: {', '.join(map(str, rounds))}",
    ]  # fmt: skip


def write_section(name: str) -> None:
    """Replaces one section of the page, with what it ran on; a new one comes last. The list of losses is made again."""
    found = {name: read()[name]}
    lines = [*section(name, found[name]["rows"]), "", *machine(found)]
    before, title, behind = PAGE.read_text().partition(f"\n## {SECTIONS[name]}\n")
    _, heading, rest = behind.partition("\n## ")
    PAGE.write_text("\n".join([before.rstrip("\n"), *lines]) + "\n" + (f"{heading}{rest}" if title else ""))
    PAGE.write_text(with_losses(PAGE.read_text()))
    print(f"written: section {SECTIONS[name]} of {PAGE}")


def with_losses(page: str) -> str:
    """A page whose list of losses is made again from the rows of its sections."""
    begin = page.index("## Where we lose")
    end = page.index("\n## ", begin)
    lines = [line for line in (page[:begin] + page[end:]).splitlines() if line.startswith("| ")]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    rows = [row for row in rows if len(row) == 7 and row[0] not in ("job", "---")]
    return page[:begin] + "\n".join(["## Where we lose", *losses(rows)]) + "\n" + page[end:]


# ---- pictures ----


def by_side(points: list[dict[str, Any]]) -> dict[str, list[tuple[float, list[float]]]]:
    """Side to (x, samples), in the order of x."""
    sides: dict[str, list[tuple[float, list[float]]]] = {}
    for point in points:
        sides.setdefault(point["side"], []).append((point["x"], point["samples"]))
    return {side: sorted(values) for side, values in sides.items()}


def grid(points: list[dict[str, Any]], axis: str, unit: str) -> list[str]:
    """The numbers of a picture as a table."""
    sides = by_side(points)
    places = sorted({point["x"] for point in points})
    rows = []
    for x in places:
        medians = [dict(values).get(x) for values in sides.values()]
        rows.append([f"{x:,.0f}", *("" if s is None else seconds(statistics.median(s), unit) for s in medians)])
    head = [axis, *sides]
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]


def draw(picture: str, title: str, axis: str, unit: str, points: list[dict[str, Any]]) -> None:
    """Lines of medians with a band from the first to the third quartile, both axes logarithmic."""
    from matplotlib.figure import Figure

    settings = {"svg.hashsalt": "safeload", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False}
    with matplotlib.rc_context({**settings, "axes.spines.right": False}):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        axes = figure.subplots()
        for side, values in by_side(points).items():
            ours = side.startswith("safeload")
            x = [place for place, _ in values]
            (line,) = axes.plot(
                x,
                [statistics.median(s) for _, s in values],
                marker="o",
                markersize=3,
                label=side,
                ls="-" if ours else "--",
            )
            quartiles = [statistics.quantiles(s if len(s) > 1 else 2 * s, n=4, method="inclusive") for _, s in values]
            axes.fill_between(
                x, [q[0] for q in quartiles], [q[2] for q in quartiles], color=line.get_color(), alpha=0.15
            )
        axes.set(xscale="log", yscale="log", xlabel=axis, ylabel={"s": "seconds", "B": "bytes"}[unit], title=title)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(frameon=False)
        PLOTS.mkdir(exist_ok=True)
        figure.savefig(PLOTS / f"{picture}.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benches", nargs="*", metavar="NAME", help="files of benches to run; all by default")
    parser.add_argument("--only-write", action="store_true", help="run none")
    parser.add_argument(
        "--section", choices=list(SECTIONS), metavar="NAME", help="run one, and replace its section only"
    )
    options = parser.parse_args()
    if options.section:
        if not options.only_write:
            run([options.section])
        write_section(options.section)
        return
    unknown = sorted(set(options.benches) - set(SECTIONS))
    if unknown:
        parser.error(f"there is no {unknown[0]}; there are {', '.join(SECTIONS)}")
    if not options.only_write:
        run(options.benches or list(SECTIONS))
    write(read())


if __name__ == "__main__":
    main()
