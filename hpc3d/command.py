"""What the commands have in common that need no launcher: their parser, and how they end."""

import argparse
import os
import sys

from hpc3d.cluster.exits import BAD_INPUT
from hpc3d.plain import lines_of, plain, plain_streams

EXITS = "exit codes: 0 good, 2 bad input (one line on stderr says what)"


class Parser(argparse.ArgumentParser):
    """The parser of `python -m hpc3d.<verb>`: keeps the lines of its description, takes no
    abbreviations, and says in one line what is wrong."""

    def __init__(self, verb, description, epilog=EXITS, **how):
        super().__init__(
            f"python -m hpc3d.{verb}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **how,
        )
        self.verb = verb.split()[0]

    def error(self, message):
        self.exit(BAD_INPUT, f"hpc3d.{self.verb}: {plain(message)}; see --help\n")


def run(verb, body):
    """The exit code of `body()`, 0 if it returns none; for bad input lines and its code."""
    with plain_streams():
        try:
            return body() or 0
        except BrokenPipeError:
            read_no_more()
            return 0
        except (OSError, ValueError) as error:
            complain(verb, lines_of(error))
            return BAD_INPUT


def complain(verb, lines):
    """Say what is wrong."""
    for line in lines:
        print(f"hpc3d.{verb}: {plain(line)}", file=sys.stderr)


def read_no_more():
    """Who reads our output has enough, also of what Python flushes when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def positive(text):
    """A whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, 1 or more")
    return int(text)
