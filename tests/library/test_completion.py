"""Completion of commands and keys in shells."""

import shutil
import subprocess

import pytest

from hpc3d.__main__ import COMMANDS, main
from hpc3d.library.completion import script


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    """Return bash's completions of the last word of a command line."""
    path = tmp_path_factory.mktemp("completion") / "hpc3d.bash"
    path.write_text(script("bash", COMMANDS))

    def offered(*words):
        code = f"""
            source {path}
            COMP_WORDS=({" ".join(words)}); COMP_CWORD=$(({len(words)} - 1)); _hpc3d
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        command = ["bash", "-c", code]
        return subprocess.check_output(command, text=True, cwd=path.parent).split()

    return offered


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["hpc3d", "tr"], {"train"}),
        (["hpc3d", "train", "--train.de"], {"--train.decay", "--train.decay_steps"}),
        (["hpc3d", "train", "--train.decay", "w"], {"wsd", "wsd-linear"}),
        (["hpc3d", "train", "--train.tf32", "t"], {"true"}),
        (["hpc3d", "simulate", "--machine", "v100"], {"v100-4x16", "v100-8x4"}),
        (["hpc3d", "plan", "gpt-4"], {"gpt-4d-64"}),
        (["hpc3d", "report", "--st"], {"--step", "--steps"}),
        (["hpc3d", "report", "--train.s"], set()),
    ],
)
def test_bash_completion_offers_commands_and_keys(bash, words, offered):
    assert {*bash(*words)} == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_scripts_are_valid(shell, tmp_path):
    text = script(shell, COMMANDS)
    assert all(command in text for command in COMMANDS) and "decay" in text
    if shutil.which(shell):
        (tmp_path / "script").write_text(text)
        subprocess.run([shell, "-n", tmp_path / "script"], check=True)


@pytest.mark.parametrize("words", [[], ["tcsh"], ["bash", "zsh"]])
def test_unknown_shell_is_rejected(words, capsys):
    assert main(["--completion", *words]) == 2
    assert "bash, zsh, fish" in capsys.readouterr().err
