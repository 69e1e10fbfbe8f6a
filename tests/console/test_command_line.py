"""Exit codes and error messages of commands."""

import os
import re
import signal
import subprocess
import sys

import pytest

from hpc3d.__main__ import COMMANDS
from hpc3d.config.argument_types import number_of_ranks, positive
from hpc3d.console.command_line import Parser, positional, run, taken
from hpc3d.console.exit_codes import BAD_INPUT
from hpc3d.console.sanitize import Problems
from tests.elided import elided
from tests.mpi import ROOT
from tests.runs import interruptible


def refuse():
    raise Problems(["one.key = 1: remedy", "another.key = 2: remedy"])


@pytest.mark.parametrize(("result", "code"), [(None, 0), (3, 3)])
def test_command_exits_with_the_code_of_its_body(result, code):
    assert run("test", lambda: result) == code


def test_each_input_problem_is_one_line(capsys):
    assert run("test", refuse) == BAD_INPUT
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["hpc3d.test: one.key = 1: remedy", "hpc3d.test: another.key = 2: remedy"]


@pytest.mark.parametrize("ranks", [["--ranks", "0"], []], ids=["wrong", "missing"])
def test_all_options_with_wrong_values_are_reported(ranks, capsys):
    parser = Parser("test", "Test.")
    parser.add_argument("--ranks", type=number_of_ranks, required=True)
    parser.add_argument("--top", type=positive)
    parser.add_argument("--to", choices=("a", "b"))
    with pytest.raises(SystemExit) as ended:
        parser.parse_args([*ranks, "--to", "c", "--top", "many"])
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == BAD_INPUT and len(lines) == 3
    for option in ("--ranks", "--to", "--top"):
        assert any(re.match(f"hpc3d.test: .*{option}[:;]", line) for line in lines)


LAUNCH = "--launch is an option of train, evaluate and generate; "


@pytest.mark.parametrize(
    ("verb", "words", "said"),
    [
        ("bench", ["--launch", "4"], f"{LAUNCH}start N ranks of bench with mpirun -np N"),
        ("simulate", ["a", "--launch=4"], f"{LAUNCH}simulate runs as a single process, ..."),
        ("layout", ["--x.y", "3", "--launch"], f"{LAUNCH}layout runs as a single process, ..."),
    ],
)
def test_launch_is_an_option_of_three_commands(verb, words, said, capsys):
    """Commands that accept keys as options receive the unknown options."""
    for parse in (Parser(verb, "Test.").parse_args, Parser(verb, "Test.").parse_known_args):
        with pytest.raises(SystemExit):
            parse(words)
        err = capsys.readouterr().err
        assert re.fullmatch(elided(f"hpc3d.{verb}: {said}; see --help\n"), err)


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("--mesh.x 4 a --out b", "--mesh.x 4"),
        ("a --mesh.x=4 --out b --seed 1", "--mesh.x=4 --seed 1"),
        ("--out b --mesh.x --seed 1 a", "--mesh.x --seed 1"),
        ("--out b --mesh.x 4 --seed 1", None),
    ],
)
def test_value_of_a_key_is_not_the_input(line, settings, capsys):
    parser = Parser("test", "Test.")
    parser.add_argument("input", metavar="INPUT")
    parser.add_argument("--out")
    if settings is None:
        with pytest.raises(SystemExit):
            parser.parse_known_args(line.split())
        assert "arguments are required: INPUT; see --help" in capsys.readouterr().err
    else:
        options, rest = parser.parse_known_args(line.split())
        assert (options.input, options.out, rest) == ("a", "b", settings.split())


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("a --rank 8 --mach=b", ["--rank: unknown option; did you mean --ranks?"]),
        ("--jsn --rnks 8", ["--jsn: ... --json?", "--rnks: ... --ranks?"]),
        ("--ranks 8 --train 3 --steps 4 --ranks.x 5", []),
    ],
)
def test_mistyped_option_suggests_an_option_of_the_command(line, lines, capsys):
    parser = Parser("test", "Test.")
    parser.add_argument("--ranks")
    parser.add_argument("--json", action="store_true")
    if lines:
        with pytest.raises(SystemExit) as ended:
            parser.parse_known_args(line.split())
        assert ended.value.code == BAD_INPUT
    else:
        parser.parse_known_args(line.split())
    expected = "".join(f"hpc3d.test: {each}\n" for each in lines)
    assert re.fullmatch(elided(expected), capsys.readouterr().err)


def test_option_that_begins_with_another_name_is_unknown(capsys):
    with pytest.raises(SystemExit):
        Parser("test", "Test.").parse_args(["--launched", "4"])
    said = "hpc3d.test: unrecognized arguments: --launched 4; see --help\n"
    assert capsys.readouterr().err == said


def test_interrupt_is_reported_in_one_line(capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert run("plan", interrupted) == 130
    assert capsys.readouterr().err == "hpc3d.plan: interrupted\n"


def python(*words, folder):
    """Run Python with the modules in a folder."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *words],
        env=environment,
        capture_output=True,
        check=False,
        timeout=100,
        preexec_fn=interruptible,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_interrupt_during_imports_prints_no_traceback(command, tmp_path):
    interrupt = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    for name in ("argparse", "pathlib"):  # each command imports one of them
        (tmp_path / f"{name}.py").write_text(interrupt)
    done = python("-m", f"hpc3d.{command}", "--help", folder=tmp_path)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


def test_importing_package_keeps_its_interrupt_handler(tmp_path):
    """Otherwise, Ctrl-C would not end the ranks of hpc3d.run_training."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("import hpc3d\n")
    handler = "signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    (tmp_path / "theirs" / "__main__.py").write_text(f"import signal\nassert {handler}\n")
    done = python("-m", "theirs", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")


def test_program_error_is_not_reported_as_invalid_input():
    def body():
        raise KeyError("a fault")

    with pytest.raises(KeyError, match="a fault"):
        run("test", body)


@pytest.mark.parametrize(
    ("line", "found", "rest"),
    [
        ("a --x 1 b", "a", "--x 1 b"),
        ("--x 1 a b", "a", "--x 1 b"),
        ("--x=1 a", "a", "--x=1"),
        ("--x --y 1 a", "a", "--x --y 1"),
        ("--x -1", None, "--x -1"),
        ("", None, ""),
    ],
)
def test_argument_may_stand_between_options(line, found, rest):
    words = line.split()
    assert (positional(words), words) == (found, rest.split())


def test_option_is_removed_from_the_arguments():
    words = ["a", "--ranks=4", "--machine", "h100", "--x"]
    assert (taken(words, "--ranks"), taken(words, "--machine")) == ("4", "h100")
    assert (words, taken(words, "--ranks")) == (["a", "--x"], None)


@pytest.mark.parametrize("verb", ["report", "generate"])
def test_missing_package_is_reported_in_one_line(verb):
    """With -S, Python finds none of the installed packages."""
    command = [sys.executable, "-S", "-m", f"hpc3d.{verb}", "results"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert re.fullmatch(
        rf"hpc3d(.{verb})?: No module named '\w+'; activate the environment .*\n", done.stderr
    )
