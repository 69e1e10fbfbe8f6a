"""Findings of `make fuzz`, their report, and the time limit."""

import os
import subprocess
import sys

import pytest

from tests.mpi import ROOT

CASES = """
import time
import numpy as np
from hypothesis import given, strategies as st

@given(st.booleans(), st.data())
def test_right(long, data):
    assert len(data.draw(st.lists(st.integers(), min_size=long))) >= long

def test_by_hand(chance):
    assert 0 <= chance.random() < 1

def test_that_draws_nothing():
    assert False
"""
WRONG = """
@given(st.integers(0, 10**6))
def test_of_numbers(number):
    assert number < 5000
"""
BY_HAND = """
def test_of_numbers(chance):
    assert chance.random() < 0.2
"""
HANGS = """
@given(st.integers(0, 10**6))
def test_of_numbers(number):
    time.sleep(1000 if number > 5000 else 0)
"""
DEADLOCK = """
from hpc3d.comm.threads import run

def rank(mesh):
    if mesh.rank:
        mesh.comm("x").all_reduce(np.ones(1))

@given(st.integers(0, 10**6))
def test_of_numbers(number):
    run({"x": 3 if number > 5000 else 1}, rank)
"""
LARGE = """
@given(st.integers(0, 10**6))
def test_of_numbers(number):
    np.ones(16 << 30 if number > 5000 else 1, np.uint8)
"""


def pytest_on(folder, text, *words):
    """Run pytest on a file with this text, in a separate process."""
    (folder / "test_cases.py").write_text(CASES + text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", folder]
    return subprocess.run(
        [*map(str, command), "-p", "no:cacheprovider", *words, "test_cases.py"],
        env={**os.environ, "PYTEST_ADDOPTS": "", "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


CLOCK = """
import itertools
from types import SimpleNamespace
import tests.fuzz

readings = itertools.count()
tests.fuzz.time = SimpleNamespace(monotonic=lambda: next(readings) / 100)
"""


def fuzz(folder, text, *words, minutes=100):
    how = ("--timeout", "0", "--minutes", str(minutes))
    return pytest_on(folder, text, "-p", "tests.fuzz", *how, *words)


@pytest.mark.slow
def test_fuzzing_without_a_failure_ends_on_time(tmp_path):
    """The clock advances by 10 ms per reading, and is also read before each example."""
    (tmp_path / "clock.py").write_text(CLOCK)
    done = fuzz(tmp_path, "", "-p", "clock", "--hypothesis-seed", "7", minutes=0.1)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, rounds, summary = done.stdout.strip().splitlines()
    assert "fuzz: 0.1 minutes from seed 7 on" in done.stdout
    assert rounds.startswith("fuzz: ") and "rounds from seed 7 on" in rounds
    assert " passed" in summary and "1 deselected" in summary and "failed" not in summary
    assert int(rounds.split()[1]) == 3  # rounds
    assert 2 * 200 < int(rounds.split()[-2]) < 600  # examples


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param(WRONG, "number=5000,", id="wrong"),
        pytest.param(BY_HAND, "assert 0.", id="by hand"),
        pytest.param(HANGS, "no end in sight: {'number': ", id="hangs"),
        pytest.param(DEADLOCK, "no end in sight: {'number': ", id="locks"),
        pytest.param(LARGE, "MemoryError", id="large"),
    ],
)
def test_fuzzing_failure_prints_a_command_that_reproduces_it(text, line, tmp_path):
    done = fuzz(tmp_path, text, "--hang", "10")
    assert done.returncode == 1 and line in done.stdout, done.stdout + done.stderr
    assert "1 failed" in done.stdout.splitlines()[-1]
    (again,) = (one for one in done.stdout.splitlines() if one.startswith("python -m pytest"))
    assert again.startswith("python -m pytest 'test_cases.py::test_of_numbers' --hyp")
    if text not in (HANGS, DEADLOCK, LARGE):
        done = pytest_on(tmp_path, text, "-k", "test_of_numbers", *again.split()[4:])
        assert done.returncode == 1 and line in done.stdout
