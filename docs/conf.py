"""Configuration of Sphinx. `docs/build.sh` builds the site; the safeload that is installed gives the API reference."""

import re
from importlib.metadata import metadata
from typing import Any

from sphinx.domains.python import PyObject
from sphinx.pycode import ModuleAnalyzer

import safeload

project = "safeload"
author = "The safeload authors"
project_copyright = author
release = version = safeload.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"safeload {release}"
html_static_path = ["_static"]
html_css_files = ["safeload.css"]
html_copy_source = False
html_show_sourcelink = False

# "Edit this page", as soon as pyproject.toml has an address in place of the reserved name.
_ADDRESS = dict(row.split(", ", 1) for row in metadata("safeload").get_all("Project-URL") or []).get("Repository", "")
if ".example/" not in _ADDRESS:
    html_theme_options = {"source_repository": _ADDRESS, "source_branch": "main", "source_directory": "docs/"}

# The button copies what a reader types: no prompts, no output.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"

myst_heading_anchors = 3
exclude_patterns = ["_build"]

# A name in a docstring's backquotes is looked up, and one that is not found fails the build.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [
    (r"py:(class|exc)", r"(?!safeload).*"),  # annotations that are not ours: they have no pages here
    (r"py:obj", r"(concurrent\.futures|gzip|io)\..*"),
]

napoleon_use_ivar = True  # attributes as a list beside the parameters, not as members once more
napoleon_use_rtype = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
_ALIASES = (
    "Adapters",
    "Array",
    "PathLike",
    "Paths",
    "Progress",
    "Backend",
    "ConvertScheme",
    "FileTypeName",
    "Scheme",
    "EngineFormat",
    "Keep",
    "Patterns",
    "Renames",
    "Value",
    "Given",
)
_ALIASES += (
    "Executor",
    "CheckSource",
    "FormatName",
    "UnknownGlobals",
    "Rounding",
    "Located",
    "Destination",
    "SaveDestination",
    "Saved",
    "PatchSide",
    "Verify",
)
autodoc_type_aliases = {name: name for name in _ALIASES}
# Signatures wrap where the page ends: a parameter a line makes a screen of each.
python_maximum_signature_line_length = None
python_use_unqualified_type_names = True


def skip_member(app: Any, kind: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out fields of named tuples, which the class's docstring lists."""
    return True if (getattr(member, "__doc__", None) or "").startswith("Alias for field number") else None


def shorten_signature(
    app: Any, kind: str, name: str, thing: Any, options: Any, args: str | None, result: str | None
) -> Any:
    """Shows aliases within a type by their names, as those that stand alone are."""
    return tuple(
        None if text is None else re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in (args, result)
    )


# Where names are looked up that stand without their module.
_MODULES = ("safeload",)


def find_short_name(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Resolves a name without its module, as docstrings have them."""
    domain, target = env.get_domain("py"), node.get("reftarget", "")
    found = [name for name in domain.objects if name in {f"{module}.{target}" for module in _MODULES}]
    if node.get("reftype") != "obj" or not found:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found[0], node, content)


# Pages of the repository that the site includes, and what they are called there.
_INCLUDED = {
    "(benches/README.md)": "(measuring.md)",
    "(../BENCHMARKS.md)": "(benchmarks.md)",
    "(docs/moving.md)": "(moving.md)",
}


def link_included(app: Any, path: Any, docname: str, content: list[str]) -> None:
    """Links between included pages are those of the site."""
    for there, here in _INCLUDED.items():
        content[0] = content[0].replace(there, here)


# Modules with the classes of each door.
_SOURCES = {
    "safeload": dict.fromkeys(safeload._MODULE_OF.values()),
    "safeload.plugins": ("core.registry",),
    "safeload.remote": ("core.files",),
}


def analyzed(module: str) -> ModuleAnalyzer:
    """Sphinx's view of a module's source, which it keeps."""
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.analyze()
    return analyzer


def setup(app: Any) -> None:
    """Connects the above to Sphinx."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    # Overloads tell type checkers what an option decides; a reader wants all options in one signature.
    for name in ("load", "Checkpoint.load"):
        del analyzed("safeload.core.checkpoint").overloads[name]
    # Members follow their source, which is in other modules than the door that ``__module__`` of their class names.
    for door, modules in _SOURCES.items():
        for module in modules:
            analyzed(door).tagorder.update(analyzed(f"safeload.{module}").tagorder)
    app.connect("include-read", link_included)
    app.connect("missing-reference", find_short_name)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("autodoc-skip-member", skip_member)
