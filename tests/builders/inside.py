"""The only door of the tests into the inner modules of safeload: names, and seams that change how the inside behaves.

``from builders.inside import NAME`` imports the name's module on demand. If a module moves, no other test file changes.
Tests of the public API need no name of this list, and the list may only shrink (tests/test_layers.py).
"""

import importlib
import os

# Each name, with its module below safeload, or with ``module:attribute``.
NAMES = {
    "dtypes": "core.dtypes",
    "forking": "core.forking",
    "ffi": "core.native:ffi",
    "lib": "core.native:lib",
    "available_tiers": "core.native:available_tiers",
    "tier_name": "core.native:tier_name",
    "SCHEMES": "core.packing:SCHEMES",
    "base_urls": "remote.url",
    "tensors_of": "core.checkpoint:tensors_of",
    "cli_common": "cli.common",
    "main": "cli:main",
    "Ring": "core.staging:Ring",
    "staged": "core.staging:staged",
    "restore": "core.restore",
    "buffer_pool": "core.stream",
    "entries_of": "core.tensors:entries_of",
    "Tensors": "core.tensors:Tensors",
    "atomic_file": "core.atomic_file",
    "fetch": "remote.fetch",
    "jobs": "core.jobs",
    "progress": "core.progress",
    "thread_count": "core.memory:thread_count",
    "open_without_table": "core.weight_file:open_without_table",
    "gguf_values": "formats.gguf",
    "mixtures": "formats.mixtures",
    "keras": "formats.keras",
    "npy": "core.npy",
    "onnx_model": "formats.onnx",
    "orbax_chunks": "formats.orbax",
    "ocdbt": "formats.ocdbt",
    "registry": "core.registry",
    "torch_globals": "formats.torch.globals",
    "torch_zip": "formats.torch.file",
    "unpickler": "formats.unpickle",
    "zips": "core.zip",
    "jax_arrays": "frameworks.jax_arrays",
    "torch_arrays": "frameworks.torch_arrays",
    "torch_devices": "frameworks.torch_devices",
    "choosing": "models.choosing",
    "Config": "models.schema:Config",
    "names_in": "models.schema:names_in",
    "model_families": "models.family",
    "settings": "conversion.llama_cpp.settings",
    "tokenizer": "conversion.llama_cpp.tokenizer",
    "sentencepiece": "conversion.llama_cpp.sentencepiece",
    "destinations": "conversion.destinations",
    "diff_values": "checking.diff",
    "sizes": "checking.sizes:sizes",
    "quantizing": "conversion.quantize",
    "Catalog": "conversion.catalog:Catalog",
    "executors": "conversion.executors",
    "validated_zeros": "checking.files",
    "manifest": "trust.verify",
    "families": "quant.families:families",
    "presets": "quant.families:presets",
    "Globs": "quant.patterns:Globs",
    "Pattern": "quant.patterns:Pattern",
    "quantization_of": "quant.quantization:quantization_of",
    "LOCAL": "core.files:LOCAL",
    "http_client": "remote.http",
    "parse_json": "core.files:parse_json",
    "local": "core.files",
    "ollama": "remote.ollama",
    "RemoteStore": "remote.remote_store:RemoteStore",
    "RemoteFiles": "remote.remote_files:RemoteFiles",
    "thread_group": "core.thread_group",
    "verified": "trust.verified",
    "rules": "conversion.rules",
    "report_page": "checking.report",
    "boxed": "formats.boxed",
    "digests": "trust.digests",
}

# Seams: thresholds, limits and pauses that tests change, and steps that they watch or make fail, with the places where
# the inside looks each of them up.
SEAMS = {
    "staging_buffer": ["core.staging:BUFFER"],
    "smallest_staging_buffer": ["core.staging:SMALLEST_BUFFER"],
    "grid_bytes": ["core.restore:_GRID_BYTES"],
    "job_slice_ms": ["core.jobs:SLICE_MS"],
    "tier": ["core.jobs:TIER", "conversion.quantize:TIER"],
    "scan_members": ["trust.scan:MAX_MEMBERS"],
    "scan_opcodes": ["trust.scan:MAX_OPCODES"],
    "scan_searched": ["trust.scan:MAX_SEARCHED"],
    "scan_total": ["trust.scan:MAX_TOTAL"],
    "scan_traced": ["trust.scan:MAX_TRACED"],
    "scan_unpacked": ["trust.scan:MAX_UNPACKED"],
    "moon_tensors": ["formats.moon:MAX_TENSORS"],
    "orbax_kept_frames": ["formats.zstd:_KEPT"],
    "scan_texts": ["trust.trace:MAX_TEXTS"],
    "kept_output": ["conversion.make:_KEPT_BYTES"],
    "small_tensor": ["conversion.make:_SMALL"],
    "spans_of": ["conversion.decide:spans_of", "conversion.make:spans_of"],
    "tensor_maker": ["conversion.make:Maker"],
    "patch_int32": ["editing.patch:_MAX_INT32"],
    "retry_pause": ["remote.foreign:PAUSE", "remote.http:_BACKOFF"],
    "interrupt_grace": ["core.thread_group:_GRACE"],
}


def __getattr__(name):
    """Import a name of the list anew each time, so that a patched attribute never outlives its test."""
    try:
        place = NAMES[name]
    except KeyError:
        raise AttributeError(f"builders/inside.py lists no name {name!r}") from None
    module, _, attribute = place.partition(":")
    found = importlib.import_module(f"safeload.{module}")
    return getattr(found, attribute) if attribute else found


def path(name):
    """The dotted path of a name: ``safeload.formats.zip``."""
    return f"safeload.{NAMES[name].replace(':', '.')}"


def tune(monkeypatch, **values):
    """Change seams until the end of a test: ``inside.tune(monkeypatch, retry_pause=0.001)``."""
    for seam, value in values.items():
        for place in SEAMS[seam]:
            module, _, attributes = place.partition(":")
            *owners, attribute = attributes.split(".")
            owner = importlib.import_module(f"safeload.{module}")
            for name in owners:
                owner = getattr(owner, name)
            monkeypatch.setattr(owner, attribute, value)


def preload(*names):
    """Import modules that would otherwise be imported when they are first needed."""
    for name in names:
        importlib.import_module(path(name))


def program(text):
    """A program for another process, which can import `builders` wherever it runs, even with ``-I``."""
    import textwrap

    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return f"import sys; sys.path.append({tests!r})\n{textwrap.dedent(text)}"
