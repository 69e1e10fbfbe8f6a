"""`hpc3d` and `python -m hpc3d`: the list of commands, and calls of each command."""

import ast
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

import hpc3d
from hpc3d.__main__ import COMMANDS, main
from tests.mpi import mpirun
from tests.strided import strided

FOLDER = Path(hpc3d.__file__).parent


def python(*words):
    command = [sys.executable, "-X", "importtime", "-m", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parent, check=False)


def loaded(done):
    """Return the modules that a `python` process has imported."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}


def test_every_command_is_listed_with_its_description():
    done = python("hpc3d")
    listed = dict(re.findall(r"^  (\w+) +(.+)$", done.stdout, re.MULTILINE))
    sources = {path.stem: path.read_text() for path in FOLDER.glob("[!_]*.py")}
    packages = [path.parent for path in FOLDER.glob("*/__main__.py")]
    sources |= {path.name: (path / "__init__.py").read_text() for path in packages}
    verbs = {name: text for name, text in sources.items() if "\ndef main(" in text}
    assert {"train", "report"} <= listed.keys() == verbs.keys()
    assert all(verbs[name].startswith(f'"""{line}') for name, line in listed.items())
    assert "hpc3d COMMAND ...  =  python -m hpc3d COMMAND ...  =  python -m hpc3d.COMMAND" in (
        done.stdout
    )
    assert done.returncode == 0


def test_closed_pipe_of_the_command_list_prints_no_traceback():
    command = [sys.executable, "-m", "hpc3d"]
    done = subprocess.run(
        f"{' '.join(command)} | head -1", shell=True, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("hpc3d ") and not done.stderr


def test_command_list_imports_no_numpy_and_starts_no_mpi():
    names = loaded(python("hpc3d"))
    assert "importlib.resources" in names
    assert not names & {"numpy", "mpi4py", "h5py", "pydantic"}


@pytest.mark.parametrize("words", [("train", "--train.steps"), ("plan", "--help")])
def test_hpc3d_script_imports_no_more_than_the_module(words):
    """All ranks of a job start this way, so extra imports would cost time on 64 ranks."""
    command, *rest = words
    straight = loaded(python(f"hpc3d.{command}", *rest))
    assert "hpc3d.console.exit_codes" in straight
    assert not loaded(python("hpc3d", *words)) - straight


def test_main_module_imports_nothing_before_the_command():
    tree = ast.parse((FOLDER / "__main__.py").read_text())
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [*map(ast.unparse, imports)] == ["import sys", "from importlib import import_module"]


def test_version_option_prints_the_version():
    done = python("hpc3d", "--version")
    assert (done.returncode, done.stdout) == (0, f"hpc3d {hpc3d.__version__}\n")


@pytest.mark.parametrize("command", strided(COMMANDS, 3))
def test_each_command_runs_the_module_of_its_name(command, capsys):
    texts = []
    for how in (("hpc3d", command), (f"hpc3d.{command}",)):
        done = python(*how, "--help")
        assert done.returncode == 0
        texts.append(done.stdout)
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("trian", "hpc3d: trian: no such command; did you mean train?"),
        ("qqq", "hpc3d: qqq: no such command; use one of init, train, generate, "),
        ("config", "hpc3d: config: no such command; "),  # a module
        ("--verbose", "hpc3d: --verbose: no such command; "),
        ("..train", "hpc3d: ..train: no such command; did you mean train?"),
    ],
)
def test_unknown_command_is_rejected_in_one_line(word, line, capsys):
    assert main([word, "more"]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith(line)


@pytest.mark.slow
def test_ranks_print_messages_once(tmp_path):
    done = mpirun(3, "-m", "hpc3d", "trian", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("did you mean train?")) == (2, 1)
    done = mpirun(3, "-m", "hpc3d", cwd=tmp_path)
    assert (done.returncode, done.stdout.count("hpc3d COMMAND --help")) == (0, 1)
    done = mpirun(3, "-m", "hpc3d", "train", "--train.stepz", "1", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("did you mean train.steps?")) == (2, 1)
    assert not [*tmp_path.iterdir()]


def test_installed_script_calls_this_main():
    setup = ConfigParser()
    setup.read(FOLDER.parent / "setup.cfg")
    assert setup["options.entry_points"]["console_scripts"].split("\n")[1:] == [
        "hpc3d = hpc3d.__main__:main"
    ]
