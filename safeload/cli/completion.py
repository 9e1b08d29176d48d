"""``safeload completion``: print a shell script that completes commands, options, values and paths."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from .parsers import COMMANDS, SUGGESTED, argument, command, command_parser, top_parser

# The options of each command, and the values of its only positional argument or "", which stands for paths. The key ""
# has the options before a command, and the commands.
_Tree: TypeAlias = Mapping[str, tuple[list[Any], str]]


def _tree() -> _Tree:
    tree = {}
    for name in ("", *COMMANDS):
        actions = (command_parser(name) if name else top_parser())._actions  # argparse has no public way to list them
        positional = [action for action in actions if not action.option_strings]
        words = " ".join(COMMANDS) if not name else _values(positional[0]) if len(positional) == 1 else ""
        tree[name] = [action for action in actions if action.option_strings], words
    return tree


def _values(action: Any) -> str:
    return " ".join(map(str, action.choices or vars(action).get(SUGGESTED, tuple)()))


def _names(options: list[Any]) -> str:
    return " ".join(name for option in options for name in option.option_strings)


# ---- bash ----


def _bash(tree: _Tree) -> Iterator[str]:
    """Yield the script for bash, which completes paths if COMPREPLY stays empty."""
    yield from (
        "# Completion of safeload in bash. Made by `safeload completion bash`.",
        "_safeload() {",
        "    local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} command= offered= k",
        "    COMPREPLY=()",
        "    [[ $word == '=' ]] && word= || { [[ $previous == '=' ]] && previous=${COMP_WORDS[COMP_CWORD - 2]}; }",
        "    for ((k = 1; k < COMP_CWORD; k++)); do",
        "        [[ ${COMP_WORDS[k]} == -* ]] || { command=${COMP_WORDS[k]}; break; }",
        "    done",
        '    case "$command" in',
    )
    for name, (options, words) in tree.items():
        yield f"    {name or chr(39) * 2})"
        yield '        case "$previous" in'
        for option in options:
            if option.nargs != 0:
                yield f'        {"|".join(option.option_strings)}) offered="{_values(option)}" ;;'
        yield f'        *) offered="{words}"'
        yield f'            [[ $word == -* ]] && offered="{_names(options)}" ;;'
        yield "        esac ;;"
    yield from (
        f'    *) [[ $word == -* ]] && offered="{_names(tree["info"][0])}" ;;',
        "    esac",
        '    COMPREPLY=($(compgen -W "$offered" -- "$word"))',
        "}",
        "complete -o bashdefault -o default -F _safeload safeload",
    )


# ---- zsh ----


def _zsh(tree: _Tree) -> Iterator[str]:
    yield from (
        "#compdef safeload",
        "# Completion of safeload in zsh. Made by `safeload completion zsh`.",
        "_safeload() {",
        "    local -a commands=(",
        *(f"        {_quoted(f'{name}:{text}')}" for name, (_, _, text) in COMMANDS.items()),
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        if [[ $words[2] == -* ]]; then",
        f"            _arguments {' '.join(_zsh_options(tree[''][0]))}",
        "        else",
        "            _describe -t commands command commands",
        "            _files",
        "        fi",
        "        return",
        "    fi",
        "    case $words[2] in",
    )
    for name in COMMANDS:
        options, words = tree[name]
        yield f"    {name})"
        yield "        shift words; (( CURRENT-- ))"
        yield "        _arguments \\"
        yield from (f"            {option} \\" for option in _zsh_options(options))
        yield f"            '*:{name}:{f'({words})' if words else '_files'}' ;;"
    yield from (
        "    *) _files ;;",
        "    esac",
        "}",
        'if [[ ${funcstack[1]} == _safeload ]]; then _safeload "$@"; else compdef _safeload safeload; fi',
    )


def _zsh_options(options: list[Any]) -> Iterator[str]:
    for option in options:
        values = _values(option)
        action = f"({values})" if values else "_files" if option.metavar == "FILE" else " "
        value = f":value:{action}"
        value = f":{value}" if option.nargs == "?" else value * (1 if option.nargs is None else option.nargs)
        before = "*" if isinstance(option, argparse._AppendAction) else f"({' '.join(option.option_strings)})"
        text = "".join(f"\\{c}" if c in "[]:\\" else c for c in option.help)
        for name in option.option_strings:
            yield _quoted(f"{before}{name}[{text}]{value}")


def _quoted(text: str) -> str:
    """Quote a word for zsh and fish."""
    return "'" + text.replace("'", "'\\''") + "'"


# ---- fish ----


def _fish(tree: _Tree) -> Iterator[str]:
    yield "# Completion of safeload in fish. Made by `safeload completion fish`."
    for name, (options, words) in tree.items():
        condition = f"-n '__fish_seen_subcommand_from {name}'" if name else "-n __fish_use_subcommand"
        if name:
            yield f"complete -c safeload -n __fish_use_subcommand -a {name} -d {_quoted(COMMANDS[name][2])}"
            if words:
                yield f"complete -c safeload {condition} -f -a '{words}'"
        for option in options:
            spelled = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.option_strings)
            values = _values(option)
            value = "" if option.nargs == 0 else f" -x -a '{values}'" if values else " -r"
            yield f"complete -c safeload {condition} {spelled}{value} -d {_quoted(option.help)}"


_SHELLS: dict[str, Callable[[_Tree], Iterator[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}


@command(
    "Print a script that makes bash, zsh or fish complete commands, options, values and paths.",
    """examples:
  safeload completion bash >> ~/.bashrc
  safeload completion zsh > ~/.zfunc/_safeload      # a folder in $fpath
  safeload completion fish > ~/.config/fish/completions/safeload.fish

The script is static and starts no program. Print it again after an update.""",
    argument("shell", "SHELL", f"one of {', '.join(_SHELLS)}", choices=tuple(_SHELLS)),
    status="0 success, 2 wrong usage.",
)
def completion(options: argparse.Namespace) -> int:
    """Print the script."""
    print("\n".join(_SHELLS[options.shell](_tree())))
    return 0
