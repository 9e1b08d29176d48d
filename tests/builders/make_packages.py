"""Makes tests/data/torch/package-*.pt with torch.package, and what expected.json says of them.

usage: python tests/builders/make_packages.py        needs torch 2.13

What is expected is what PackageImporter loads; names are made here of what it gives, as docs/guide/loading.md says.
"""

import hashlib
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch.package import PackageExporter, PackageImporter, package_exporter

HERE = Path(__file__).resolve().parents[1] / "data"

SOURCE = """
import missing_helper
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2, bias=False))
        self.register_buffer("steps", torch.tensor(7))
        self.tied = self.body[0]
"""


class Scripted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 3)
        self.register_buffer("mean", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x - self.mean)


def make_module(path):
    """One module of an interned class; what that imports is mocked."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "packaged_net.py").write_text(SOURCE)
        (Path(folder) / "missing_helper.py").write_text("")
        sys.path.insert(0, folder)
        import packaged_net

        with PackageExporter(path) as exporter:
            exporter.intern("packaged_net")
            exporter.mock("missing_helper")
            exporter.extern("torch.**")
            exporter.save_pickle("model", "model.pkl", packaged_net.Net())
        sys.path.remove(folder)


def make_several(path):
    """State dicts in several packages over shared storages, beside text and bytes."""
    linear = torch.nn.Linear(3, 2)
    base = torch.arange(12, dtype=torch.float32)
    with PackageExporter(path) as exporter:
        exporter.extern("torch.**")
        exporter.save_pickle("models", "linear.pkl", linear.state_dict())
        exporter.save_pickle(
            "models.more", "half.pkl", {"w": torch.ones(2, dtype=torch.bfloat16), "tied": linear.weight}
        )
        exporter.save_pickle(
            "other", "parts", {"x": base[2:8].reshape(2, 3).t(), "bits": base.view(torch.int32), "lr": 0.5}
        )
        exporter.save_text("notes", "readme.txt", "text beside the weights")
        exporter.save_binary("notes", "blob.bin", b"\x80\x02 begins like a pickle")
        exporter.save_binary("notes", "empty.pkl", b"")


def make_script(path):
    """Scripts, one of them twice, beside a tensor that one of them has."""
    package_exporter._gate_torchscript_serialization = False
    script, other = torch.jit.script(Scripted()), torch.jit.script(torch.nn.Linear(2, 2))
    with PackageExporter(path) as exporter:
        exporter.extern("torch.**")
        value = {"script": script, "other": [other], "again": script, "w": script.inner.weight.detach()}
        exporter.save_pickle("net", "net.pkl", value)


def tensors_of(value, prefix=""):
    """Names and tensors of a loaded object, in the order of its pickle."""
    if isinstance(value, torch.Tensor):
        yield prefix[:-1], value
    elif isinstance(value, torch.nn.Module):
        for name, item in value.state_dict().items():
            yield f"{prefix}{name}", item
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from tensors_of(item, f"{prefix}{name}.")
    elif isinstance(value, list):
        for k, item in enumerate(value):
            yield from tensors_of(item, f"{prefix}{k}.")


def describe(tensor):
    flat = tensor.detach().contiguous().flatten()
    return {
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "sha256": hashlib.sha256(bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b"").hexdigest(),
    }


FILES = {
    "package-module.pt": (make_module, [("model", "model.pkl")], True),
    "package-several.pt": (
        make_several,
        [("models", "linear.pkl"), ("models.more", "half.pkl"), ("other", "parts")],
        False,
    ),
    "package-script.pt": (make_script, [("net", "net.pkl")], True),
}


def main():
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    table = json.loads((HERE / "expected.json").read_text())
    for name, (make, resources, inert) in FILES.items():
        path = HERE / "torch" / name
        make(str(path))
        importer = PackageImporter(str(path))
        found = {}
        for package, resource in resources:
            prefix = f"{package.replace('.', '/')}/{resource}." if len(resources) > 1 else ""
            found.update(tensors_of(importer.load_pickle(package, resource), prefix))
        key = "tensors_when_unknown_objects_are_kept_inert" if inert else "tensors"
        data = path.read_bytes()
        entry = {key: {tensor: describe(value) for tensor, value in found.items()}}
        table[f"torch/{name}"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), **entry}
        print(f"{name}: {hashlib.sha256(data).hexdigest()}")
    (HERE / "expected.json").write_text(json.dumps(table, indent=1, sort_keys=False) + "\n")


if __name__ == "__main__":
    main()
