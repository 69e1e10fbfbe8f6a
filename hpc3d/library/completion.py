"""Shell completion for `hpc3d`, printed by `hpc3d --completion SHELL`.

The completion script is generated from the commands, their help texts and the input keys.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import is_dataclass
from importlib import import_module
from typing import get_type_hints

from hpc3d.config.input_file import Config
from hpc3d.config.load import known_keys
from hpc3d.config.package_data import INPUT, MACHINE, file_names
from hpc3d.config.reference import choices_of

SHELLS = "bash", "zsh", "fish"
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
# Commands that accept input keys as options.
_OF_INPUTS = (
    *("train", "plan", "simulate", "layout", "sweep", "partition", "generate", "evaluate"),
)

_BASH = """\
_hpc3d() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands} --help --version"
    else
        case "$before" in
            --machine) words="{machines}" ;;
{values}
        esac
        if [ -z "$words" ]; then
            case "$command:$word" in
{options}
                {takers}) words="{inputs}" ;;
            esac
        fi
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word") $(compgen -f -- "$word"))
}}
complete -o filenames -F _hpc3d hpc3d
"""


def script(shell: str, commands: Iterable[str]) -> str:
    """Return the shell script that completes `commands` and their options in `shell`."""
    options = {command: _options(command) for command in commands}
    if shell == "fish":
        return _fish(options)
    text = _BASH.format(
        commands=" ".join(options),
        machines=" ".join(file_names(MACHINE)),
        inputs=" ".join(file_names(INPUT)),
        values="\n".join(
            f'            --{key}) words="{" ".join(found)}" ;;'
            for key, found in _values().items()
        ),
        options="\n".join(
            f'                {command}:-*) words="{" ".join(found)}" ;;'
            for command, found in options.items()
        ),
        takers="|".join(f"{command}:*" for command in _OF_INPUTS),
    )
    zsh = "autoload -Uz bashcompinit compinit && compinit && bashcompinit\n"
    return zsh + text if shell == "zsh" else text


def _fish(options: dict[str, list[str]]) -> str:
    lines = ["complete -c hpc3d -n __fish_use_subcommand -a '" + " ".join(options) + "'"]
    for command, found in options.items():
        seen = f"complete -c hpc3d -n '__fish_seen_subcommand_from {command}'"
        lines += [f"{seen} -l {option.removeprefix('--')}" for option in found]
        if command in _OF_INPUTS:
            lines.append(f"{seen} -a '{' '.join(file_names(INPUT))}'")
    return "\n".join(lines) + "\n"


def _options(command: str) -> list[str]:
    """Return the options in a command's help, plus all input keys if the command accepts them."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said), suppress(SystemExit):
        import_module(f"hpc3d.{command}").main(["--help"])
    keys = [f"--{key}" for key in known_keys()] if command in _OF_INPUTS else []
    own = dict.fromkeys(_OPTION.findall(said.getvalue()))
    return [*own, *(key for key in keys if "." in key or key in ("--name", "--seed"))]


def _values() -> dict[str, list[str]]:
    """Return the allowed values of each boolean or enumerated key."""
    found: dict[str, list[str]] = {}
    for section, table in get_type_hints(Config).items():
        for key, kind in get_type_hints(table).items() if is_dataclass(table) else ():
            if few := [each.strip('"') for each in choices_of(kind)]:
                found[f"{section}.{key}"] = few
            elif kind is bool:
                found[f"{section}.{key}"] = ["true", "false"]
    return found
