"""``safeload completion``: print a shell script that completes commands, options, values and paths."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from .common import SUGGESTED
from .parsers import COMMANDS, Parsers

_EPILOG = """examples:
  safeload completion bash >> ~/.bashrc
  safeload completion zsh > ~/.zfunc/_safeload      # a folder in $fpath
  safeload completion fish > ~/.config/fish/completions/safeload.fish

The script is static and starts no program. Print it again after an update.

Exit status: 0 success, 2 wrong usage."""

# Placeholders of file values.
_FILES = ("FILE",)


class _Option(NamedTuple):
    """An option of a command."""

    names: tuple[str, ...]  # such as "-o" and "--output"
    help: str
    flag: bool  # takes no value
    values: tuple[str, ...]  # possible values, if known
    files: bool  # takes a file
    arity: int  # number of values
    repeated: bool


class _Command(NamedTuple):
    """A command."""

    help: str
    options: tuple[_Option, ...]
    words: tuple[str, ...]  # values of its only positional argument; if empty, it takes paths


def register(parser: Any) -> None:
    """Add the arguments to the parser of the command."""
    parser.description = "Print a script that makes bash, zsh or fish complete commands, options, values and paths."
    parser.epilog = _EPILOG
    parser.add_argument("shell", metavar="SHELL", choices=tuple(_SHELLS), help=f"one of {', '.join(_SHELLS)}")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the script and return the exit status."""
    print("\n".join(_SHELLS[options.shell](_tree(Parsers()))))
    return 0


def _tree(parsers: Parsers) -> dict[str, _Command]:
    """Return the commands by name; "" holds the options before a command."""
    # argparse has no public way to list the arguments of a parser.
    tree = {"": _Command("", tuple(_options(parsers.top)), ())}
    for name, text in COMMANDS.items():
        parser = parsers.command(name)
        positional = [action for action in parser._actions if not action.option_strings]
        words = tuple(positional[0].choices or ()) if len(positional) == 1 else ()
        tree[name] = _Command(text, tuple(_options(parser)), words)
    return tree


def _options(parser: Any) -> Iterator[_Option]:
    for action in parser._actions:
        if action.option_strings:
            repeated = isinstance(action, argparse._AppendAction)
            suggested = vars(action).get(SUGGESTED, tuple)()
            values, files = tuple(map(str, action.choices or suggested)), action.metavar in _FILES
            flag, arity = action.nargs == 0, action.nargs if isinstance(action.nargs, int) else 1
            yield _Option(tuple(action.option_strings), action.help, flag, values, files, arity, repeated)


# ---- bash ----


def _bash(tree: Mapping[str, _Command]) -> Iterator[str]:
    """Yield the script for bash, which completes paths if COMPREPLY stays empty."""
    names = " ".join(filter(None, tree))
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
    for name, command in tree.items():
        first = names if not name else " ".join(command.words)
        yield f"    {name or chr(39) * 2})"
        yield '        case "$previous" in'
        for option in command.options:
            if not option.flag:
                yield f'        {"|".join(option.names)}) offered="{" ".join(option.values)}" ;;'
        yield f'        *) offered="{first}"'
        yield f'            [[ $word == -* ]] && offered="{_names(command)}" ;;'
        yield "        esac ;;"
    yield from (
        f'    *) [[ $word == -* ]] && offered="{_names(tree["info"])}" ;;',
        "    esac",
        '    COMPREPLY=($(compgen -W "$offered" -- "$word"))',
        "}",
        "complete -o bashdefault -o default -F _safeload safeload",
    )


def _names(command: _Command) -> str:
    return " ".join(name for option in command.options for name in option.names)


# ---- zsh ----


def _zsh(tree: Mapping[str, _Command]) -> Iterator[str]:
    yield from (
        "#compdef safeload",
        "# Completion of safeload in zsh. Made by `safeload completion zsh`.",
        "_safeload() {",
        "    local -a commands=(",
        *(f"        {_quoted(f'{name}:{command.help}')}" for name, command in tree.items() if name),
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        if [[ $words[2] == -* ]]; then",
        f"            _arguments {' '.join(_zsh_options(tree['']))}",
        "        else",
        "            _describe -t commands command commands",
        "            _files",
        "        fi",
        "        return",
        "    fi",
        "    case $words[2] in",
    )
    for name, command in tree.items():
        words = f"({' '.join(command.words)})" if command.words else "_files"
        if name:
            yield f"    {name})"
            yield "        shift words; (( CURRENT-- ))"
            yield "        _arguments \\"
            yield from (f"            {option} \\" for option in _zsh_options(command))
            yield f"            '*:{name}:{words}' ;;"
    yield from (
        "    *) _files ;;",
        "    esac",
        "}",
        'if [[ ${funcstack[1]} == _safeload ]]; then _safeload "$@"; else compdef _safeload safeload; fi',
    )


def _zsh_options(command: _Command) -> Iterator[str]:
    for option in command.options:
        action = f"({' '.join(option.values)})" if option.values else "_files" if option.files else " "
        value = "" if option.flag else f":value:{action}" * option.arity
        excluded = "" if option.repeated else f"({' '.join(option.names)})"
        text = "".join(f"\\{c}" if c in "[]:\\" else c for c in option.help)
        for name in option.names:
            yield _quoted(f"{'*' if option.repeated else excluded}{name}[{text}]{value}")


def _quoted(text: str) -> str:
    """Quote a word for zsh and fish."""
    return "'" + text.replace("'", "'\\''") + "'"


# ---- fish ----


def _fish(tree: Mapping[str, _Command]) -> Iterator[str]:
    yield "# Completion of safeload in fish. Made by `safeload completion fish`."
    for name, command in tree.items():
        condition = f"-n '__fish_seen_subcommand_from {name}'" if name else "-n __fish_use_subcommand"
        if name:
            yield f"complete -c safeload -n __fish_use_subcommand -a {name} -d {_quoted(command.help)}"
        if command.words:
            yield f"complete -c safeload {condition} -f -a '{' '.join(command.words)}'"
        for option in command.options:
            spelled = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names)
            value = "" if option.flag else f" -x -a '{' '.join(option.values)}'" if option.values else " -r"
            yield f"complete -c safeload {condition} {spelled}{value} -d {_quoted(option.help)}"


_SHELLS: dict[str, Callable[[Mapping[str, _Command]], Iterator[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
