"""What the commands have in common that need no launcher: their parser, and how they end."""

import argparse
import os
import sys

from hpc3d.cluster.exits import BAD_INPUT

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
        self.exit(BAD_INPUT, f"hpc3d.{self.verb}: {message}; see --help\n")


def run(verb, body):
    """The exit code of `body()`, 0 if it returns none; for bad input lines and its code."""
    try:
        return body() or 0
    except BrokenPipeError:
        read_no_more()
        return 0
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}" if error.filename else error
    except ValueError as error:
        problem = error
    complain(verb, problem)
    return BAD_INPUT


def complain(verb, problem):
    """Say what is wrong, which may be several lines."""
    for line in str(problem).splitlines():
        print(f"hpc3d.{verb}: {line}", file=sys.stderr)


def read_no_more():
    """Who reads our output has enough, also of what Python flushes when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def positive(text):
    """A whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, 1 or more")
    return int(text)
