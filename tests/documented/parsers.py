"""Parses commands of the pages with the real parsers, without running them."""

import io
import os
import re
from configparser import ConfigParser
from contextlib import ExitStack, redirect_stderr
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from unittest.mock import patch

from hpc3d import train
from hpc3d.__main__ import COMMANDS
from hpc3d.config.load import load
from hpc3d.console.command_line import Parser, split_options
from hpc3d.predict.machine import machine_file
from tests.documented.pages import simple
from tests.mpi import ROOT

# What stands for something of the reader's own, by something that is there.
SAMPLES = {
    "INPUT.toml": "gpt-3d-64",
    "inputs/mine.toml": "gpt-3d-64",
    "N": "64",
    "M": "h100",
    "NAME": "h100",
    "PART": "kernels",
    "results/gpu-machine.toml": "h100",
    "$scheme": "1d",
    "tokens.h5": "inputs/corpus",
    "shakespeare.h5": "inputs/corpus",
    "validation.h5": "inputs/corpus",
    "openwebtext.h5": "inputs/corpus",
    "mine.h5": "inputs/corpus",
    "TEXT": "inputs/corpus",
}
SYNOPSIS = re.compile(r"\[(--[^\]]*)\]")
RUN = "RUN", "results/"  # of a run, which is not there
REST = "..."  # of a command is left to the reader
RANKS = re.compile(r"(?:-np|-n|--ranks)=?")
FILE = re.compile(r"\.?/?(?:inputs|jobs|packaging|tests|docs|notebooks|hpc3d)/[\w./*-]+")
WRITTEN = {"inputs/machines/this-machine.toml"}  # by bench calibrate
MODULES = {  # of `partition`, which has several parsers
    "": "hpc3d.partition.__main__",
    "compare": "hpc3d.partition.baselines.__main__",
    "profile": "hpc3d.partition.profiles.__main__",
}


def wrong(text, whole=True):
    """Return the error in a documented command, or an empty text. A command in running text need
    not be `whole`, like one that ends with `...`."""
    try:
        for words in simple(SYNOPSIS.sub(r"\1", text)):
            ours = [SAMPLES.get(word, word) for word in words]
            _look(ours if whole else [*ours, REST], words)
    except (ValueError, AssertionError) as error:
        return str(error)
    return ""


def _look(words, written):
    _files([word for word in written if word not in SAMPLES])
    _extras(" ".join(written))
    program = words[0].rpartition("/")[2]
    if program == "make":
        _make([word for word in words[1:] if word != REST])
    elif program == "sbatch":
        _job(words)
    elif found := _command(words):
        verb, place = found
        _parsed(verb, words[place:], _ranks(words[: place - 1]))


def _files(words):
    for word in words:
        if FILE.fullmatch(word) and word not in WRITTEN:
            assert [*ROOT.glob(word.removeprefix("./"))], f"{word}: there is no such file"


@cache
def _setup():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup


def _extras(text):
    names = re.findall(r"(?:hpc3d|\.)\[([\w,-]+)\]", text)
    unknown = {*",".join(names).split(",")} - {"", *_setup()["options.extras_require"]}
    assert not unknown, f"{unknown}: there is no such extra in setup.cfg"


@cache
def _makefile():
    return (ROOT / "Makefile").read_text(encoding="utf-8")


def _make(words):
    for word in words:
        name, given, _ = word.partition("=")
        known = rf"\b{name}\b" if given else rf"^{re.escape(name)}:"
        assert re.search(known, _makefile(), re.MULTILINE), f"make {word}: not in the Makefile"


def _job(words):
    """Check keys after jobs/train.sbatch and jobs/resume.sbatch, which are those of train."""
    for name, ranks in {"jobs/train.sbatch": None, "jobs/resume.sbatch": 12}.items():
        if name in words:
            rest = words[words.index(name) + 1 :]
            _train(["--resume", *rest] if ranks else rest, ranks)


def _command(words):
    """Return (verb, index of the next word) of `python -m hpc3d.VERB` or `hpc3d VERB`, also after
    a launcher or in a container."""
    for place, word in enumerate(words):
        if word == "-m" and words[place + 1 :]:
            module = words[place + 1]
            assert module.isupper() or _there(module), f"{module}: there is no such module"
            verb = module.removeprefix("hpc3d.")
            return (verb, place + 2) if verb in COMMANDS else None
    launched = words[0] in ("mpirun", "srun") or words[:2] == ["apptainer", "exec"]
    places = [place for place, word in enumerate(words) if word == "hpc3d"]
    if words[0] == "hpc3d" or (places and (launched or words[:2] == ["docker", "run"])):
        verb, place = words[places[-1] + 1], places[-1] + 2
        assert verb in COMMANDS or verb == "COMMAND", f"hpc3d {verb}: there is no such command"
        return None if verb == "COMMAND" else (verb, place)
    return None


def _there(module):
    return module.rpartition(".")[2].isupper() or find_spec(module) is not None


def _ranks(launcher):
    """Return the number of ranks passed to a launcher; None means all ranks of a job."""
    for word, value in pairwise(launcher):
        if RANKS.fullmatch(word):
            return int(value)
    return None if launcher[:1] == ["srun"] else 1


def _parsed(verb, words, ranks):
    """Parse the words of a command with its own parser; keys and machines must exist."""
    rest = REST in words
    words = [word for word in words if word != REST]
    if not words:
        return
    if verb == "train":
        _train(words, ranks)
    elif verb in ("generate", "evaluate"):
        words, settings = split_options(words)
        import_module(f"hpc3d.{verb}").parser().parse_args(words)
        load(None, settings)
    elif verb == "partition" and words[0] == "run":
        load(None, [word.replace("--steps", "--train.steps") for word in _options(words)])
    else:
        _called(verb, words, rest)


def _options(words):
    """Return keys and values of a command line that may resume a run."""
    words = words[next((n for n, word in enumerate(words) if word[:1] == "-"), len(words)) :]
    _taken(words, "--resume")
    return words


def _taken(words, option):
    """Remove an option from the words, and return its value, if present."""
    if option not in words:
        return None
    place = words.index(option)
    value = words[place + 1]
    del words[place : place + 2]
    return value


def _train(words, ranks):
    words = [*words]
    if launched := _taken(words, "--launch"):
        ranks = int(launched)
    if "--resume" in words:
        load(None, _options(words))
        return
    dry = "--dry-run" in words
    words = [word for word in words if word != "--dry-run"]
    if dry:
        ranks = int(_taken(words, "--ranks") or ranks)
        machine_file.load(_taken(words, "--machine") or "h100")
    train.read_command_line(ranks, words)


def _called(verb, words, rest):
    """Call `main` of a command without its work; keys are those of its input, if it has one."""
    part = words[0] if verb == "partition" and words[0] in MODULES else ""
    modules = {"partition": MODULES[part], "layout": "hpc3d.layout.__main__"}
    module = import_module(modules.get(verb, f"hpc3d.{verb}"))
    also = ("--name", "--seed") if verb == "checkpoint" else ()
    words, keys = split_options(words[1:] if part else words, also)
    _main(module, words, rest)
    if "--machine" in words:
        machine_file.load(words[words.index("--machine") + 1])
    keys = [] if verb == "sweep" else keys  # the study file, with its axes, does not exist
    of_input = verb in ("plan", "simulate", "layout") and words[0] != "schedule"
    source = words[0] if of_input and not words[0].startswith(RUN) else None
    load(source, keys)


def _main(module, words, rest):
    idle = {name: _Idle() for name in ("run", "launch") if hasattr(module, name)}
    error = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ))
        stack.enter_context(redirect_stderr(error))
        stack.enter_context(patch.multiple(module, **idle))
        stack.enter_context(patch.object(Parser, "parse_known_args", _all_known))
        try:
            module.main(words)
        except SystemExit as end:
            said = error.getvalue()
            assert end.code == 0 or (rest and "required: " in said), said


_KNOWN = Parser.parse_known_args


def _all_known(parser, words=None, namespace=None):
    """Reject unknown arguments; keys, which some commands pass on, have already been removed."""
    found, unknown = _KNOWN(parser, words, namespace)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return found, []


class _Idle:
    """Replacement of `run` in hpc3d.console.command_line or hpc3d.runtime.launch."""

    def __call__(self, *_, **__):
        return 0

    run = __call__
