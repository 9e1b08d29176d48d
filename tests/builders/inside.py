"""The only door of the tests into the inner modules of safeload: names, and seams that change how the inside behaves.

``from builders.inside import NAME`` imports the name's module on demand. If a module moves, no other test file changes.
Tests of the public API need no name of this list, and the list may only shrink (tests/test_layers.py).
"""

import importlib
import os

# Each name, with its module below safeload, or with ``module:attribute``.
NAMES = {
    "_core": "_core",
    "c_strides": "core.arrays:c_strides",
    "dtypes": "core.dtypes",
    "forking": "core.forking",
    "collected_young": "core.runtime:collected_young",
    "paused": "core.runtime:paused",
    "quantity": "core.showing:quantity",
    "shorten": "core.showing:shorten",
    "text_table": "core.showing:table",
    "ListedTable": "core.table:ListedTable",
    "Listing": "core.table:Listing",
    "name_families": "core.names:families",
    "NativeError": "core.native:Error",
    "available_tiers": "core.native:available_tiers",
    "check_status": "core.native:check",
    "ffi": "core.native:ffi",
    "lib": "core.native:lib",
    "tier_name": "core.native:tier_name",
    "native_path": "core.paths:native_path",
    "SCHEMES": "core.packing:SCHEMES",
    "ENGINE_FORMATS": "core.packing:ENGINE_FORMATS",
    "show": "core.text:show",
    "base_urls": "remote.url",
    "codes_of": "core.checkpoint:codes_of",
    "tensors_of": "core.checkpoint:tensors_of",
    "cli_common": "cli.common",
    "main": "cli:main",
    "Ring": "core.staging:Ring",
    "chunks_of": "core.staging:chunks_of",
    "staged": "core.staging:staged",
    "restore": "core.restore",
    "buffer_pool": "core.stream",
    "Lazy": "core.tensors:Lazy",
    "LazyParts": "core.tensors:LazyParts",
    "parse_target": "core.load:parse_target",
    "entries_of": "core.tensors:entries_of",
    "Tensors": "core.tensors:Tensors",
    "atomic_file": "core.atomic_file",
    "AtomicFile": "core.atomic_file:AtomicFile",
    "Digest": "core.atomic_file:Digest",
    "fetch": "remote.fetch",
    "overlapping": "core.memory:overlapping",
    "jobs": "core.jobs",
    "address_of": "core.native:address_of",
    "aligned_bytes": "core.memory:aligned_bytes",
    "progress": "core.progress",
    "available_cpus": "core.memory:available_cpus",
    "thread_count": "core.memory:thread_count",
    "open_without_table": "core.weight_file:open_without_table",
    "foreign": "core.foreign",
    "gguf_values": "formats.gguf",
    "mixtures": "formats.mixtures",
    "keras": "formats.keras",
    "npy": "core.npy",
    "npz": "core.npz",
    "onnx_model": "formats.onnx",
    "orbax_chunks": "formats.orbax",
    "ocdbt": "formats.ocdbt",
    "registry": "core.registry",
    "safetensors_file": "core.safetensors",
    "torch_globals": "formats.torch.globals",
    "torch_zip": "formats.torch.file",
    "unpickler": "formats.unpickle",
    "zips": "core.zip",
    "jax_arrays": "frameworks.jax_arrays",
    "torch_arrays": "frameworks.torch_arrays",
    "from_array": "frameworks.torch_arrays:from_array",
    "from_arrays": "frameworks.torch_arrays:from_arrays",
    "to_array": "frameworks.torch_arrays:to_array",
    "torch_devices": "frameworks.torch_devices",
    "merge": "adapters.merge",
    "choosing": "models.choosing",
    "diffusion_models": "models.diffusion:diffusion_models",
    "quantized_diffusion": "models.diffusion:quantized_models",
    "Config": "models.schema:Config",
    "ConfigError": "models.schema:ConfigError",
    "names_in": "models.schema:names_in",
    "model_families": "models.family",
    "settings": "conversion.llama_cpp.settings",
    "tokenizer": "conversion.llama_cpp.tokenizer",
    "destinations": "conversion.destinations",
    "diff_values": "checking.diff",
    "sizes": "checking.sizes:sizes",
    "rules": "conversion.rules",
    "quantizing": "conversion.quantize",
    "report_page": "checking.report",
    "Catalog": "conversion.catalog:Catalog",
    "executors": "conversion.executors",
    "validated_zeros": "checking.files",
    "manifest": "checking.manifest",
    "families": "quant.families:families",
    "family_modules": "quant.families:MODULES",
    "presets": "quant.families:presets",
    "Stored": "quant.families:Stored",
    "finder": "quant.finder",
    "Globs": "quant.patterns:Globs",
    "Pattern": "quant.patterns:Pattern",
    "quantization_of": "quant.quantization:quantization_of",
    "boxed": "formats.boxed",
    "LOCAL": "core.files:LOCAL",
    "http_client": "remote.http_client",
    "parse_json": "core.json_file:parse_json",
    "local": "core.store",
    "LocalStore": "core.store:LocalStore",
    "direct_of": "core.store:direct_of",
    "mapping_of": "core.store:mapping_of",
    "open_local": "core.store:open_local",
    "ollama": "remote.ollama",
    "RemoteStore": "remote.remote_store:RemoteStore",
    "RemoteFiles": "remote.remote_files:RemoteFiles",
    "Span": "core.store:Span",
    "read_at": "core.store:read_at",
    "thread_group": "core.thread_group",
    "digests": "trust.digests",
    "verified": "trust.verified",
}

# Seams: thresholds, limits and pauses that tests change, and steps that they watch or make fail, with the places where
# the inside looks each of them up.
SEAMS = {
    "copied_in_turn": ["core.staging:IN_TURN"],
    "copy_buffer_size": ["core.staging:buffer_size"],
    "staging_buffer": ["core.staging:BUFFER"],
    "smallest_staging_buffer": ["core.staging:SMALLEST_BUFFER"],
    "grid_bytes": ["core.restore:_GRID_BYTES"],
    "mask_step": ["core.restore:_STEP"],
    "pooled_below": ["core.load:POOLED_BELOW"],
    "pool_size": ["core.load:POOL_SIZE"],
    "short_of_memory": ["core.stream:short"],
    "mapping_of": ["core.load:mapping_of"],
    "write_file": ["core.atomic_file:AtomicFile.write"],
    "run_batch": ["core.jobs:Batch.run"],
    "job_slice_ms": ["core.jobs:SLICE_MS"],
    "tier": ["core.jobs:TIER", "conversion.quantize:TIER"],
    "direct_of": ["core.jobs:direct_of"],
    "scan_members": ["trust.scan:MAX_MEMBERS"],
    "scan_opcodes": ["trust.scan:MAX_OPCODES"],
    "scan_searched": ["trust.scan:MAX_SEARCHED"],
    "scan_total": ["trust.scan:MAX_TOTAL"],
    "scan_traced": ["trust.scan:MAX_TRACED"],
    "scan_unpacked": ["trust.scan:MAX_UNPACKED"],
    "moon_tensors": ["formats.moon:MAX_TENSORS"],
    "orbax_kept_frames": ["formats.zstd:_KEPT"],
    "copied_small": ["core.safetensors:_SMALL"],
    "copied_together": ["core.safetensors:_TOGETHER"],
    "scan_texts": ["trust.trace:MAX_TEXTS"],
    "zip_block": ["core.zip:_BLOCK"],
    "jax_group": ["frameworks.jax_arrays:GROUP"],
    "small_on_device": ["frameworks.torch_devices:_SMALL"],
    "staged_from": ["frameworks.torch_devices:_STAGED_FROM"],
    "merge_tile": ["adapters.merge:_TILE"],
    "kept_output": ["conversion.make:_KEPT_BYTES"],
    "small_tensor": ["conversion.make:_SMALL"],
    "spans_of": ["conversion.decide:spans_of", "conversion.make:spans_of"],
    "tensor_maker": ["conversion.make:Maker"],
    "patch_int32": ["editing.patch:_MAX_INT32"],
    "retry_pause": ["remote.foreign:PAUSE", "remote.http_client:_BACKOFF"],
    "map_file": ["core.store:LocalStore.map"],
    "read_into": ["core.store:LocalStore.read_into"],
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
