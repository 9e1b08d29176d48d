"""Writes what transformers calls the tensors of its models, `safeload/models/renamed.json`.

Needs torch and transformers 5.24.0, and takes some minutes: ``python tests/data/renamed/make.py``. It builds each
class of transformers' auto classes without memory for weights, and looks which of its modules have rules of their own.
"""

import json
import re
from pathlib import Path

import torch
import transformers
from transformers import conversion_mapping, core_model_loading
from transformers.models.auto import modeling_auto

TARGET = Path(__file__).parents[3] / "safeload" / "models" / "renamed.json"
#: Operations that join whole rows of stored tensors, or divide them equally: their order of rows is that of the names.
SIMPLE = {
    "MergeModulelist": ("stack",),
    "MergeModulelist Concatenate": ("stack",),
    "Concatenate": ("join",),
    "Chunk": ("divide",),
    "Transpose": ("turn",),
}


def pattern(source):
    """A pattern as `core_model_loading.WeightTransform` compiles it."""
    source = source.replace("*.", r".*\.")
    return source + (r"(?!\w)" if re.search(r"[a-zA-Z0-9]$", source) else "")


def rule(transform):
    """A transform as `safeload/models/renamed.py` describes it."""
    sources, targets = [*map(pattern, transform.source_patterns)], transform.target_patterns
    if isinstance(transform, core_model_loading.WeightConverter):
        names = " ".join(type(operation).__name__ for operation in transform.operations)
        rows = all(getattr(operation, "dim", 0) == 0 for operation in transform.operations[:1])
        operation = SIMPLE.get(names, (names,))[0] if rows else names
        return {"from": sources, "to": targets, "as": operation}
    if isinstance(transform, core_model_loading.GroupWeightRename):
        return {"from": sources, "to": targets, "as": "if the first is there"}
    if isinstance(transform, core_model_loading.LayerPairCollapse):
        return {"from": sources, "to": targets, "as": "LayerPairCollapse"}
    return [sources[0], targets[0], *([transform.offset] if hasattr(transform, "offset") else [])]


def configs_in(config, path=""):
    """Yield nested configs with their keys."""
    for key in getattr(config, "sub_configs", {}):
        if isinstance(inner := getattr(config, key, None), transformers.PreTrainedConfig):
            yield f"{path}{key}", inner
            yield from configs_in(inner, f"{path}{key}.")


def parts_of(model, keys):
    """The modules with rules, or whose class a nested config chooses."""
    nested = {id(inner): key for key, inner in reversed([*configs_in(model.config)])}
    claimed, parts = {}, []
    for place, module in model.named_modules():
        if not isinstance(module, transformers.PreTrainedModel):
            continue
        name, kind = type(module).__name__, module.config.model_type

        def taken(text, place=place):
            return any(before == "" or place.startswith(before + ".") for before in claimed.get(text, ()))

        key = None if taken(name) else name if name in keys else None if taken(kind) else kind if kind in keys else None
        if key is not None:
            claimed.setdefault(name, []).append(place)
            if key == kind:
                claimed.setdefault(kind, []).append(place)
        config = nested.get(id(module.config), "")
        if key is not None or config:
            scope = place.removeprefix(model.base_model_prefix).removeprefix(".")
            parts.append([scope if place else None, key, config, kind if config else ""])
    return parts if any(part[1] for part in parts) or len(parts) > 1 else []


def auto_classes():
    """The classes of transformers' auto classes, in order."""
    names = {}
    for table in (getattr(modeling_auto, name) for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES")):
        for classes in table.values():
            names.update(dict.fromkeys([classes] if isinstance(classes, str) else classes))
    return sorted(name for name in names if not name.endswith("Config"))


def main():
    transformers.logging.set_verbosity_error()
    mapping = conversion_mapping._build_checkpoint_conversion_mapping()
    aliases = conversion_mapping._MODEL_TO_CONVERSION_PATTERN
    rules = {key: [rule(transform) for transform in transforms] for key, transforms in mapping.items()}
    copies = {key: same for key, same in aliases.items() if rules[key] == rules[same]}
    rules.update({key: same for key, same in copies.items() if same not in copies})
    classes, prefixes, failed, auto = {}, {}, [], auto_classes()
    for name in auto:
        try:
            model_class = getattr(transformers, name)
            with torch.device("meta"):
                model = model_class(model_class.config_class())
        except Exception as error:  # most need packages, such as timm
            failed.append(f"{name}: {error}"[:100])
            continue
        if parts := parts_of(model, mapping):
            classes[name] = parts
        prefixes.setdefault(model.base_model_prefix, set()).add(model.config.model_type)
    types = {}
    for kind, names in modeling_auto.MODEL_MAPPING_NAMES.items():
        name = names if isinstance(names, str) else names[0]
        if name in mapping:
            types[kind] = name
    print(*failed, f"{len(auto)} classes, {len(failed)} not built, {len(classes)} with rules", sep="\n")
    shared = {}
    for name, parts in classes.items():
        shared.setdefault(json.dumps(parts), []).append(name)
    prefixes = {prefix: sorted(kinds) for prefix, kinds in sorted(prefixes.items()) if prefix not in ("", "model")}
    write(rules, shared, types, prefixes)


def write(rules, shared, types, prefixes):
    lines = ['{"transformers": ' + json.dumps(transformers.__version__) + ",", '"rules": {']
    groups = []
    for key, value in sorted(rules.items()):
        if isinstance(value, str):
            groups.append(f"{json.dumps(key)}: {json.dumps(value)}")
        else:
            groups.append(f"{json.dumps(key)}: [\n" + ",\n".join(json.dumps(row) for row in value) + "]")
    lines += [",\n".join(groups) + "},", '"classes": [']
    lines += [",\n".join(f"[{json.dumps(sorted(names))}, {parts}]" for parts, names in sorted(shared.items())) + "],"]
    lines += ['"types": {', ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(types.items())) + "},"]
    lines += ['"prefixes": {', ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in prefixes.items()) + "}}"]
    text = "\n".join(lines) + "\n"
    json.loads(text)
    TARGET.write_text(text)


if __name__ == "__main__":
    main()
