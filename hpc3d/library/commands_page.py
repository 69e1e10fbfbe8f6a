"""Generator of docs/commands.md: python -m hpc3d.library.commands_page > docs/commands.md."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib import import_module
from inspect import getdoc
from textwrap import fill

_HEAD = """\
# Commands

This reference lists every command of hpc3d with its usage and its options.

`hpc3d COMMAND`, `python -m hpc3d COMMAND` and `python -m hpc3d.COMMAND` are equivalent. If the
usage line of a command contains `--section.key value`, every key of an input file is also an
option ([configuration.md](configuration.md)). Inputs and machines shipped with hpc3d can be
specified by name, such as `gpt-3d-64` and `h100`. The [README](../README.md#exit-codes) lists the
exit codes.

The command `python -m hpc3d.library.commands_page > docs/commands.md` writes this page from the
parsers, and a test compares the two.
"""

# Maps each command to its module and the name of the function that returns its argparse parser.
# If the function name is "", the module has no parser, and its docstring serves as help text.
_PARSERS = {
    "init": ("init", "parser"),
    "train": ("train", ""),
    "generate": ("generate", "parser"),
    "evaluate": ("evaluate", "parser"),
    "plan": ("plan", "parser"),
    "simulate": ("simulate", "parser"),
    "simulate schedule": ("simulate", "schedule_parser"),
    "layout": ("layout.__main__", "parser"),
    "sweep": ("sweep", "parser"),
    "partition": ("partition.__main__", "parser"),
    "partition run": ("partition.execution.module_run", ""),
    "partition compare": ("partition.baselines.__main__", "parser"),
    "partition profile": ("partition.profiles.__main__", "parser"),
    "watch": ("watch", "parser"),
    "report": ("report", "parser"),
    "reproduce": ("reproduce", "parser"),
    "checkpoint": ("checkpoint", "parser"),
    "prepare": ("prepare", "parser"),
    "bench": ("bench", "parser"),
    "bench scaling": ("benchmarks.scaling.study", "parser"),
    "bench peers": ("benchmarks.peers", "parser"),
    "doctor": ("doctor", "parser"),
}


def page() -> str:
    """Return the text of docs/commands.md."""
    parts = [_HEAD]
    for command, (name, function) in _PARSERS.items():
        module = import_module(f"hpc3d.{name}")
        if function:
            parts += _sections(command, getattr(module, function)())
        else:
            parts.append(f"## {command}\n\n{_fenced(getdoc(module) or '')}\n")
    return "\n".join(parts)


def _sections(command: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    given = [each for each in parser._actions if each.dest != "help"]
    verbs = [each for each in given if isinstance(each, argparse._SubParsersAction)]
    usage = parser.usage % {"prog": parser.prog} if parser.usage else _usage(parser.prog, given)
    options = [_option(each) for each in given if each not in verbs]
    about = _fenced(f"{usage}\n\n{_sentence(parser.description)}")
    rest = [about, "\n".join(options), _sentence(parser.epilog)]
    yield "\n\n".join([f"## {command}", *filter(None, rest)]) + "\n"
    for each in verbs:
        for name, verb in each.choices.items():
            yield from _sections(f"{command} {name}", verb)


def _usage(program: str, given: Sequence[argparse.Action]) -> str:
    """Return the usage line of a program; required options precede positional arguments."""
    needed = [
        _spelled(each, short=True) for each in given if each.option_strings and each.required
    ]
    named = [_values(each) for each in given if not each.option_strings]
    optional = any(each.option_strings and not each.required for each in given)
    return " ".join([program, *needed, *["[options]"] * optional, *named])


def _option(action: argparse.Action) -> str:
    text = (action.help or "") % {**vars(action), "prog": "hpc3d"}
    required = " (required)" if action.option_strings and action.required else ""
    return f"* **`{_spelled(action)}`**{required}: {_sentence(' '.join(text.split()))}"


def _spelled(action: argparse.Action, short: bool = False) -> str:
    """Format an option or argument for a usage line, such as `-o, --output FILE`."""
    names = action.option_strings[:1] if short else action.option_strings
    return " ".join(filter(None, [", ".join(names), _values(action)]))


def _values(action: argparse.Action) -> str:
    """Return the metavar of an option or argument, such as `FILE [FILE ...]`."""
    choices = action.choices if action.metavar is None else None
    name = "|".join(map(str, choices)) if choices else action.metavar or action.dest.upper()
    forms = {"+": f"{name} [{name} ...]", "*": f"[{name} ...]", "?": f"[{name}]", 0: ""}
    return forms.get(action.nargs, str(name))


def _sentence(text: str | None) -> str:
    text = (text or "").strip()
    return text[:1].upper() + text[1:] + "." * (text[-1:] not in ("", "."))


def _fenced(text: str) -> str:
    """Return `text` as a fenced Markdown code block, with lines wrapped at 99 characters."""
    lines = [fill(line, 99) if len(line) > 99 else line for line in text.split("\n")]
    return "\n".join(["```text", *lines, "```"])


if __name__ == "__main__":
    print(page(), end="")
