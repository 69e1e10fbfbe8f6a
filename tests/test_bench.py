"""The command `bench` before it measures anything."""

import json
import subprocess
import sys

import pytest

from hpc3d import bench
from tests.mpi import ROOT, checked


@pytest.mark.parametrize("rounds", ["-3", "0", "1.5", "many"])
def test_a_number_of_pairs_is_at_least_one(rounds, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(["trace", f"--rounds={rounds}"])
    assert end.value.code == 2
    assert f"{rounds}: must be a whole number, 1 or more" in capsys.readouterr().err


def test_calls_are_between_ranks():
    """On one rank, in a process of its own: MPI is not started in that of the tests."""
    words = [sys.executable, "-m", "hpc3d.bench", "calls"]
    done = subprocess.run(words, cwd=ROOT, text=True, capture_output=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "calls are between ranks: mpirun -np 2" in done.stderr


def test_calls_run_on_ranks_that_the_others_have_not(capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(["calls", "step"])
    assert end.value.code == 2
    assert "ask for it alone" in capsys.readouterr().err


def test_calls_are_measured_against_those_of_mpi():
    out = checked(2, "-m", "hpc3d.bench", "calls", "--rounds", "1", "--json")
    *_, last = out.splitlines()
    rows = json.loads(last)["calls"]
    assert [row["op"] for row in rows[::5]] == ["all_gather", "reduce_scatter", "all_reduce"]
    assert all(row["members"] == 2 and row["ours_s"] > 0 and row["mpi_s"] > 0 for row in rows)
    assert all(row["bound_s"] == 0 for row in rows)
