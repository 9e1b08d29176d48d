"""The table of docs/guide/families.md, made of the files of the families: ``python -m builders.family_table``."""

from fnmatch import fnmatchcase

import safeload

from .inside import model_families
from .paths import ROOT

PAGE = ROOT / "docs" / "guide" / "families.md"
HEAD = ("family", "class", "GGUF", "GGUF back", "MLX", "MLX back", "engines", "mmproj", "changed on the way")


def changes_of(form):
    """What a form stores rounded, leaves out, or gives another class on the way back."""
    layouts = [layout for sources in form.layouts.values() for layout in sources.values()]
    known = {
        "norms + 1": any(layout.add for layout in layouts),
        "`A_log`": any(layout.function == "negative_exp" for layout in layouts),
        "factors": any(layout.times for layout in layouts),
        "no MTP": form.kept_layers is not None or any("multi-token" in reason for reason in form.left_out.values()),
        f"back as `{form.of_text.class_name}`": form.of_text is not form,
    }
    return [text for text, holds in known.items() if holds]


def lacks_tensors(form):
    """True if a form leaves out tensors that transformers needs."""
    needed = [entry.name for entry in form.published.entries if not entry.optional]
    return any(fnmatchcase(name, pattern) for name in needed for pattern in form.left_out)


def rows():
    """The rows of the table: each family with another form than that of transformers."""
    files = model_families.family_files()
    for family in safeload.families():
        file, name = files[family.name], next(iter(family.architectures), None)
        if name is None or not (family.gguf or family.mlx or family.engines):
            continue
        forms = {"GGUF": file.gguf} if "gguf" in file.own else {}
        forms |= {"MLX": file.mlx} if file.own.keys() >= {"mlx", "gguf"} else {}
        found = {kind: ", ".join(changes_of(form)) for kind, form in forms.items()}
        same = len({*found.values()}) == 1
        texts = [f"{kind}: {text}" for kind, text in found.items() if text]
        changed = next(iter(found.values())) if same else "; ".join(texts)
        back = "refused" if "MLX" in forms and lacks_tensors(forms["MLX"]) else "yes" if family.mlx else ""
        flags = ("yes" if flag else "" for flag in (family.engines, family.mmproj))
        both = ("yes" if family.way_back else "", "yes" if family.mlx else "", back)
        yield (family.name, f"`{name}`", family.gguf and f"`{family.gguf}`", *both, *flags, changed)


def table():
    """The table in Markdown."""
    lines = [HEAD, ("---",) * len(HEAD), *rows()]
    return "".join("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) + "\n" for cells in lines)


if __name__ == "__main__":
    before, _, after = PAGE.read_text(encoding="utf-8").partition("| family |")
    _, gap, after = after.partition("\n\n")
    PAGE.write_text(f"{before}{table()}{gap[1:]}{after}", encoding="utf-8")
