"""Compares models under published names and under those in memory: ``compare_names.py FOLDER [CLASS ...]``.

Needs torch, transformers 5.24.0 and safeload. Of each class, a tiny random model is written as `save_pretrained` does,
and under the names of its modules. `safeload.check` must judge both alike, and `safeload.diff` must find no difference.
"""

import shutil
import sys
import warnings
from pathlib import Path

import torch
import transformers
from compare import shrunk
from make import auto_classes
from safetensors.torch import save_file

import safeload

#: transformers computes a tensor of these from several or in another order, without a counterpart of its own.
COMPUTED = (
    *("Inkling2TextModel", "Inkling2LoopTextModel", "Kimi_K25", "LaraMini", "MistralLarge4", "Molmo2TextModel"),
    *("Nemotron3_5Transcribe", "Step3p7"),
)
#: It writes these with names that it does not read, or without buffers that modules hold.
OTHERWISE = ("RfDetrFor", "MarianMTModel", "Cosmos3Omni", "CohereAsr")


def write(model, folder):
    """Write a model under both names."""
    model.save_pretrained(folder / "older")
    tensors, seen = {}, set()
    for name, value in model.state_dict().items():
        key = value.data_ptr(), value.shape, value.stride()
        if name not in (getattr(model, "all_tied_weights_keys", None) or ()) and (not value.numel() or key not in seen):
            seen.add(key)
            tensors[name] = value.contiguous().clone()
    (folder / "newer").mkdir()
    save_file(tensors, folder / "newer" / "model.safetensors", {"format": "pt"})
    shutil.copy(folder / "older" / "config.json", folder / "newer")


def compare(name, folder):
    """What became of a class: "equal", or why not."""
    model_class = getattr(transformers, name)
    try:
        config = shrunk(model_class.config_class())
        with torch.device("meta"):
            if sum(value.numel() for value in model_class(config).parameters()) > 30e6:
                return "not built: too large"
        torch.manual_seed(0)
        model = model_class(config).to(torch.bfloat16)
        with torch.no_grad():
            for value in model.parameters():
                value.normal_(std=0.5)
        write(model, folder)
    except Exception as error:
        return f"not built: {error}"
    older, newer = folder / "older", folder / "newer"
    verdicts = []
    for source in (older, newer):
        report = safeload.check(source, values=False)
        verdicts.append((report.schema, sorted({finding.code for finding in report.errors})))
    if verdicts[0] != verdicts[1]:
        return f"other verdicts: {verdicts}"
    for a, b in ((older, newer), (newer, older)):
        report = safeload.diff(a, b)
        if not report.same:
            unequal = [key for key, difference in report.tensors.items() if difference.unequal]
            return f"different: {report.only_a[:3]} {report.only_b[:3]} {unequal[:3]}"
    with safeload.open(older) as first, safeload.open(newer) as second:
        return "equal" if {*first} == {*second} else "equal: under other names"


def main():
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kept = Path(sys.argv[1])
    results = {}
    for name in sys.argv[2:] or auto_classes():
        folder = kept / name
        shutil.rmtree(folder, ignore_errors=True)
        results[name] = compare(name, folder)
        if results[name] != "equal":
            print(f"{name}: {results[name][:600]}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    wrong = [name for name, result in results.items() if not result.startswith(("equal", "not built"))]
    wrong = [name for name in wrong if not name.startswith((*COMPUTED, *OTHERWISE))]
    kinds = ("equal", "equal:", "not built")
    equal, other, absent = (sum(result.startswith(kind) for result in results.values()) for kind in kinds)
    print(f"{equal} equal, {other} of them under other names, {absent} not built, wrong: {wrong}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
