"""The cost of tests by tier, kind and file: `make test-profile` (tests/profile.py)."""

import json

import pytest

from tests.test_fuzz import pytest_on

TESTS = """
import subprocess
import sys

import pytest

@pytest.mark.parametrize("number", range(6))
def test_work(number):
    end = sum(range(20_000_000))

@pytest.mark.slow
def test_process():
    subprocess.run([sys.executable, "-c", "sum(range(20_000_000))"], check=True)
"""


@pytest.mark.slow
def test_sampled_costs_are_extrapolated_and_include_child_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("DAY", "all")
    words = "-p", "tests.profile", "--every", "3", "--costs", "costs.json", "-k", "work or process"
    done = pytest_on(tmp_path, TESTS, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    counts = {row[0].removeprefix("| "): row[1] for row in rows}
    assert (counts["quick"], counts["slow"]) == ("6", "1")
    assert (counts["this process"], counts["processes"]) == ("6", "1")
    assert "3 passed" in done.stdout  # two of the six, and the other test
    costs = json.loads((tmp_path / "costs.json").read_text())
    assert costs["test_cases.py::test_work"] >= 1
