"""`python -m hpc3d`: the commands, one line each."""

import re
import subprocess
import sys
from pathlib import Path

import hpc3d

FOLDER = Path(hpc3d.__file__).parent


def python(*words):
    command = [sys.executable, "-X", "importtime", "-m", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parent, check=False)


def test_every_verb_is_listed_with_the_first_line_of_its_text():
    done = python("hpc3d")
    listed = dict(re.findall(r"^  python -m hpc3d\.(\w+) +(.+)$", done.stdout, re.MULTILINE))
    sources = {path.stem: path.read_text() for path in FOLDER.glob("[!_]*.py")}
    verbs = {name: text for name, text in sources.items() if "\ndef main(" in text}
    assert {"train", "report"} <= listed.keys() == verbs.keys()
    assert all(verbs[name].startswith(f'"""{line}') for name, line in listed.items())
    assert done.returncode == 0
    assert hpc3d.__version__ in done.stdout


def test_the_list_costs_no_numpy_and_starts_no_mpi():
    loaded = {line.rpartition("|")[2].strip() for line in python("hpc3d").stderr.splitlines()}
    assert "argparse" in loaded
    assert not loaded & {"numpy", "mpi4py", "h5py", "pydantic"}


def test_a_verb_after_a_space_is_refused():
    done = python("hpc3d", "train")
    assert done.returncode == 2
    assert "usage: python -m hpc3d.<command>" in done.stderr
