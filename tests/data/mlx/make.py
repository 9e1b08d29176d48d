"""Record what mlx-lm writes of the models of tests/builders/mlx_models.py.

PYTHONPATH=tests python tests/data/mlx/make.py FOLDER          # all, in an environment with mlx-lm; README.md
PYTHONPATH=tests python tests/data/mlx/make.py FOLDER qwen3    # some models
"""

import dataclasses
import importlib
import json
import shutil
import sys
from pathlib import Path

from builders import mlx_models
from builders.engine_models import described

FORMATS = {"mlx": None, "mlx4": (4, 64, "affine"), "mlx-mxfp4": (4, 32, "mxfp4")}


def save(source, out, settings):
    """Write a folder as mlx_lm.convert does, without its tokenizer."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    model, config = load_model(source, lazy=True)
    dtype = config.get("torch_dtype") or (config.get("text_config") or {}).get("dtype")
    if dtype is not None:
        cast = getattr(model, "cast_predicate", lambda _: True)

        def changed(key, x):
            return x.astype(getattr(mx, dtype)) if cast(key) and mx.issubdtype(x.dtype, mx.floating) else x

        model.update(tree_map_with_path(changed, model.parameters()))
    if settings is not None:
        bits, group, mode = settings
        model, config = quantize_model(model, config, group, bits, mode=mode)
    save_model(out, model)
    save_config(config, out / "config.json")


def record(out, format):
    """What mlx-lm has written: all of a plain folder, and a digest and the settings of codes."""
    tensors, config = described(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    metadata = json.loads((out / "model.safetensors.index.json").read_text())["metadata"]
    if format == "mlx":
        return {"tensors": tensors, "config": config, "index": metadata}
    return {"tensors": mlx_models.digest_of(tensors), "quantization": config["quantization"], "index": metadata}


#: Where mlx-lm has the arguments of the language model inside a model.
TEXT = {
    "gemma3": ("gemma3_text", "ModelArgs"),
    "gemma4": ("gemma4_text", "ModelArgs"),
    "gemma4_unified": ("gemma4_text", "ModelArgs"),
    "llama4": ("llama4", "TextArgs"),
    "llava": ("llama", "ModelArgs"),
    "mistral3": ("llama", "ModelArgs"),
    "qwen2_5_vl": ("qwen2", "ModelArgs"),
    "qwen2_vl": ("qwen2", "ModelArgs"),
    "qwen3_5": ("qwen3_5", "TextModelArgs"),
    "qwen3_5_moe": ("qwen3_5", "TextModelArgs"),
    "qwen3_vl": ("qwen3", "ModelArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
}


def arguments():
    """The arguments without a default of each type of model, and of the language model inside."""
    from mlx_lm.utils import _get_classes

    missing = dataclasses.MISSING
    result = {}
    for name in sorted({model["config"]["model_type"] for model in mlx_models.listed().values()}):
        try:
            classes = [_get_classes({"model_type": name})[1]]
        except (ValueError, SystemExit):  # mlx-lm does not have it
            continue
        if name in TEXT:
            module, inner = TEXT[name]
            classes.append(getattr(importlib.import_module(f"mlx_lm.models.{module}"), inner))
        fields = [[field for field in dataclasses.fields(each) if field.default is missing] for each in classes]
        result[name] = [[field.name for field in each if field.default_factory is missing] for each in fields]
    return result


def main(folder, names):
    lines = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in arguments().items()]
    mlx_models.ARGUMENTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    result = dict(mlx_models.expected()) if names and mlx_models.DATA.exists() else {}
    for name in mlx_models.listed():
        if name.startswith("falcon_h1") or (names and name not in names):  # safeload does not write these
            continue
        shutil.rmtree(folder / name, ignore_errors=True)
        source = mlx_models.write(folder / name / "source", name)
        result.pop(name, None)
        for format, settings in FORMATS.items():
            try:
                save(source, folder / name / format, settings)
            except (Exception, SystemExit) as error:  # a model that mlx-lm does not have
                print(name, format, type(error).__name__, str(error)[:300].replace("\n", " "))
                break
            result.setdefault(name, {})[format] = record(folder / name / format, format)
    mlx_models.DATA.write_text(
        "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in result.items()) + "\n}\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
