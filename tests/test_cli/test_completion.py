"""safeload completion: what real shells offer, commands, options, their values, paths."""

import os
import shutil
import subprocess

import pytest
from builders.inside import main
from builders.terminal import on_terminal

COMMANDS = {"info", "check", "stats", "convert", "diff", "report", "completion"}

# Words of a line, the last of which is completed, and some of what is offered.
CASES = [
    (["in"], {"info"}),
    (["c"], {"check", "convert", "completion"}),
    (["--vers"], {"--version"}),
    (["info", "--sto"], {"--stored", "--storage-option", "--storage-options"}),
    (["info", "--sort", ""], {"name", "dtype", "shape", "parameters", "size"}),
    (["-v", "stats", "--sort", "abs"], {"absmax"}),
    (["verify", "x", "--overwrite", "--wri"], {"--write"}),
    (["completion", ""], {"bash", "zsh", "fish"}),
    (["report", "--quantize", "q4"], {"q4_0", "q4_1", "q4_k"}),
    (["convert", "--quantize", "q8"], {"q8_0"}),
    (["convert", "--dtype", "bf"], {"bfloat16"}),
    (["check", "--schema", "mix"], {"mixtral"}),
    (["stats", "--da"], {"--dask"}),
    (["convert", "--res"], {"--resume"}),
]


def needs(shell):
    return pytest.mark.skipif(os.name == "nt" or shutil.which(shell) is None, reason=f"{shell} is not installed")


@pytest.fixture
def script(tmp_path, capsys, monkeypatch):
    """Writes the script of a shell into a folder that has weights, which becomes the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").touch()

    def make(shell):
        assert main(["completion", shell]) == 0
        path = tmp_path / f"script.{shell}"
        path.write_text(capsys.readouterr().out)
        return path

    return make


@needs("bash")
@pytest.mark.parametrize(("words", "offered"), CASES, ids=[" ".join(case[0]) for case in CASES])
def test_bash_completes(words, offered, script):
    line = " ".join(f"'{word}'" for word in ("safeload", *words))
    lines = f"source '{script('bash')}'; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _safeload; "
    done = subprocess.run(["bash", "-euc", lines + 'printf "%s\\n" "${COMPREPLY[@]}"'], capture_output=True, text=True)
    assert done.stderr == ""
    assert set(done.stdout.split()) == offered


@needs("bash")
def test_bash_completes_after_an_equals_sign_and_leaves_paths_to_readline(script):
    path = script("bash")
    for words, offered in ((["stats", "--sort", "=", "na"], "name nan"), (["info", "wei"], ""), (["weights/mo"], "")):
        line = " ".join(("safeload", *words))
        lines = f"source '{path}'; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _safeload; "
        done = subprocess.run(["bash", "-uc", lines + 'echo "${COMPREPLY[*]-}"'], capture_output=True, text=True)
        assert done.stdout.strip() == offered


@needs("bash")
def test_bash_completes_on_a_terminal(script):
    """Keys typed into a shell: a path after the command, a command, an option."""
    path = script("bash")
    keys = f'source {path}\rsafeload() {{ echo "got<$*>"; }}\rsafeload inf\twei\tmo\t --store\t\rexit\r'
    _, shown = on_terminal("--norc", "--noprofile", "-i", program=("bash",), keys=keys, PS1="$ ")
    assert "got<info weights/model.safetensors --stored>" in shown


@needs("fish")
@pytest.mark.parametrize(("words", "offered"), CASES, ids=[" ".join(case[0]) for case in CASES])
def test_fish_completes(words, offered, script):
    command = f"source {script('fish')}; complete -C 'safeload {' '.join(words)}'"
    done = subprocess.run(["fish", "--no-config", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
    assert offered <= {line.partition("\t")[0] for line in done.stdout.splitlines()}


@needs("fish")
def test_fish_completes_paths(script):
    path = script("fish")
    for line in ("info wei", "wei", "check x --config wei", "info --all wei"):
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"source {path}; complete -C 'safeload {line}'"],
            capture_output=True,
            text=True,
        )
        assert "weights/" in done.stdout


@needs("zsh")
def test_zsh_completes_on_a_terminal(script, tmp_path):
    path = script("zsh")
    keys = f"autoload -U compinit; compinit -D; source {path}\r"
    keys += 'safeload() { echo "got<$*>"; }\r'
    keys += "safeload inf\twei\tmo\t--store\t\r"
    keys += "safeload report --qu\tint\twei\t\r"
    keys += "safeload completion fi\t\rexit\r"
    _, shown = on_terminal("-f", "-i", program=("zsh",), keys=keys, columns=200)
    assert "got<info weights/model.safetensors --stored>" in shown
    assert "got<report --quantize int8 weights>" in shown
    assert "got<completion fish>" in shown


def test_every_command_and_option_is_in_every_script(capsys):
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    options = {word.strip(",[]") for word in capsys.readouterr().out.split() if word.startswith("--")}
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        out = capsys.readouterr().out
        spelled = out.replace(" -l ", " --") if shell == "fish" else out
        assert all(name in spelled for name in COMMANDS | (options - {"--"}))


def test_an_unknown_shell_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["completion", "tcsh"])
    assert caught.value.code == 2
    assert "see safeload completion --help" in capsys.readouterr().err
