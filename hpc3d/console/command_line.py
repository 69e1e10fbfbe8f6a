"""Argument parser for all commands, and error handling for commands that do not use MPI."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from typing import Any, NoReturn

from hpc3d.console.exit_codes import BAD_INPUT, INTERRUPTED, REFUSED
from hpc3d.console.progress import progress
from hpc3d.console.sanitize import (
    OutputError,
    Problems,
    file_and_reason,
    lines_of,
    sanitized,
    sanitized_streams,
)

_EXITS = "exit codes: 0 success, 2 invalid input (explained on standard error)"
TOP_KEYS = "--name", "--seed"  # configuration options without a section
_ALIKE = 0.8  # smallest similarity of a mistyped option and the option in its error message
_LAUNCHING = "train, evaluate and generate"  # commands with the option --launch
_ON_RANKS = {"bench", "doctor", "partition"}  # other commands that run under mpirun


class Parser(argparse.ArgumentParser):
    """Argument parser of `python -m hpc3d.<verb>`.

    The parser keeps the line breaks of its description, rejects abbreviated options, and reports
    each wrong value on its own line.
    """

    def __init__(
        self, verb: str, description: str | None, epilog: str = _EXITS, **how: Any
    ) -> None:
        super().__init__(
            f"python -m hpc3d.{verb}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **how,
        )
        self.verb = verb.split(maxsplit=1)[0]
        self._problems: list[str] = []

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            option = re.split("[ /]", message.partition(":")[0])[-1]
            message += f"; write {option}=VALUE if the value begins with -"
        self.refuse([f"{each}; see --help" for each in (*self._problems, message)])

    def refuse(self, problems: Sequence[str]) -> NoReturn:
        """Print the problems of a command line to standard error and exit."""
        complain(self.verb, problems)
        self.exit(BAD_INPUT)

    def parse_known_args(self, words: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse a command line; `parse_args` also calls this method.

        Configuration options and their values are returned with the unknown arguments.
        Printing the help text to a closed pipe, as in `--help | head`, is not an error.
        """
        keys = [key for key in TOP_KEYS if key not in self._option_string_actions]
        ours, settings = split_options(sys.argv[1:] if words is None else words, keys)
        if problems := mistyped_options(ours, [*self._option_string_actions]):
            self.refuse(problems)
        with sanitized_streams():
            try:
                found, others = super().parse_known_args(ours, namespace)
            except OutputError as error:
                self.refuse([file_and_reason(error)])
            if has_option(others, "--launch"):
                self.error(f"--launch is an option of {_LAUNCHING}; {self._without_launch()}")
            if self._problems:
                self.error(self._problems.pop())
            return found, [*others, *settings]

    def _without_launch(self) -> str:
        if self.verb in _ON_RANKS:
            return f"start N ranks of {self.verb} with mpirun -np N"
        return f"{self.verb} runs as a single process, so leave out --launch"

    def print_help(self, file: Any = None) -> None:
        super().print_help(file)
        sys.stdout.flush()

    def _get_values(self, action: argparse.Action, words: list[str]) -> Any:
        """Convert the values of an option; collect errors to report them all at once."""
        try:
            return super()._get_values(action, words)
        except argparse.ArgumentError as error:
            if (
                action.nargs == argparse.PARSER
            ):  # argparse cannot continue after an unknown subcommand
                raise
            self._problems.append(str(error).replace(": : ", ": '': "))  # an empty value
            return action.default


class RootParser(Parser):
    """Argument parser for rank 0. It raises exceptions so that all ranks can exit together."""

    def refuse(self, problems: Sequence[str]) -> NoReturn:
        raise Problems(problems)


def run(verb: str, body: Callable[[], int | None], patient: bool = True) -> int:
    """Run the body of a command and return its exit code.

    `body()` returns an exit code or `None` (success).  If it raises one of the
    exceptions in REFUSED, the error message is printed and BAD_INPUT is returned.  Progress lines
    are shown unless `patient` is false.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with sanitized_streams():
        try:
            with progress(verb) if patient else nullcontext():
                code = body() or 0
            sys.stdout.flush()
            return code
        except REFUSED as error:
            complain(verb, lines_of(error))
            return BAD_INPUT
        except KeyboardInterrupt:
            complain(verb, ["interrupted"])
            return INTERRUPTED


def complain(verb: str, lines: Iterable[str]) -> None:
    """Print lines to standard error, each with the name of the command as a prefix."""
    for line in lines:
        print(f"hpc3d.{verb}: {sanitized(line)}", file=sys.stderr)


def split_options(words: Iterable[str], also: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Separate the command's own arguments from configuration options `--section.key value`.

    Returns both lists. The options named in `also` count as configuration options.
    """
    ours: list[str] = []
    settings: list[str] = []
    into = ours
    for word in words:
        name, equals, _ = word.partition("=")
        if name in also or (name.startswith("--") and "." in name):
            settings.append(word)
            into = ours if equals else settings  # list of the next word, unless it is an option
        else:
            (ours if word.startswith("--") else into).append(word)
            into = ours
    return ours, settings


def has_option(words: Iterable[str], option: str) -> bool:
    """Return True if the command-line arguments `words` contain an option."""
    return any(word.partition("=")[0] == option for word in words)


def mistyped_options(words: Iterable[str], known: Sequence[str]) -> list[str]:
    """Return an error message for each option that is similar to one of the `known` options."""
    names = dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--"))
    bare = [option.lstrip("-") for option in known]
    near = {
        name: get_close_matches(name[2:], bare, 1, _ALIKE) for name in names if name not in known
    }
    return [
        f"{name}: unknown option; did you mean --{found[0]}?"
        for name, found in near.items()
        if found
    ]


def taken(words: list[str], option: str) -> str | None:
    """Remove an option from the command-line arguments `words`, and return its value or `None`.

    Raises ValueError if the option has no value.
    """
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == option:
            value = value if equals else (words[index + 1 : index + 2] or ["--"])[0]
            if value.startswith("--"):
                raise ValueError(f"{option}: the value is missing; use {option} VALUE")
            del words[index : index + 2 - bool(equals)]
            return value
    return None


def positional(words: list[str]) -> str | None:
    """Remove the first argument that is neither an option `--key VALUE` nor its value.

    Returns the removed argument, or `None` if `words` contains only options.
    """
    index = 0
    while index < len(words) and words[index].startswith("-"):
        lacks_value = any(word.startswith("--") for word in words[index + 1 : index + 2])
        index += 1 if "=" in words[index] or lacks_value else 2
    return words.pop(index) if index < len(words) else None


def readable_time(seconds: float) -> str:
    """Format a predicted time in seconds, such as 1.234 s or 56.789 ms."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3f} ms"
