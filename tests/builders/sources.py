"""The syntax of safeload's modules: each is parsed once for all tests of a process that look at all of them."""

import ast
import functools
from typing import NamedTuple

BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)


class Source(NamedTuple):
    """What tests ask of a module."""

    imports: list  # its import statements, at any depth
    positional: list  # name and number of positional parameters, without self, of each function
    classes: list  # name and line of each class
    methods: list  # names of class and method, for each method without a decorator
    docstrings: list  # of the module, its classes and functions; None for those without
    body: int  # top-level statements


def statements(tree):
    """Yield the parent and each statement of a tree, without looking at expressions, where none stands."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, BLOCKS):
            yield tree, node
            yield from statements(node)


def source(path):
    return parsed(path.read_text(encoding="utf-8"))


@functools.cache
def parsed(text):
    tree = ast.parse(text)
    result = Source([], [], [], [], [ast.get_docstring(tree, clean=False)], len(tree.body))
    for parent, node in statements(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            result.imports.append(node)
        elif isinstance(node, ast.ClassDef):
            result.classes.append((node.name, node.lineno))
            result.docstrings.append(ast.get_docstring(node, clean=False))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
            own = names[names[:1] in (["self"], ["cls"]) and isinstance(parent, ast.ClassDef) :]
            result.positional.append((node.name, len(own)))
            if isinstance(parent, ast.ClassDef) and not node.decorator_list:
                result.methods.append((parent.name, node.name))
            result.docstrings.append(ast.get_docstring(node, clean=False))
    return result
