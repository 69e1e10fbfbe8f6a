"""Measurement of calls between ranks, compared with MPI."""

import json
import subprocess
import sys

import pytest

from tests.mpi import ROOT, checked


def test_calls_benchmark_requires_several_ranks():
    """Uses a separate process of one rank, so that MPI does not start in this process."""
    words = [sys.executable, "-m", "hpc3d.bench", "calls"]
    done = subprocess.run(
        words, cwd=ROOT, text=True, capture_output=True, check=False, timeout=250
    )
    assert done.returncode == 2
    assert "`bench calls` needs at least 2 ranks; run mpirun -np 2" in done.stderr


@pytest.mark.slow
def test_calls_are_measured_against_mpi():
    out = checked(2, "-m", "hpc3d.bench", "calls", "--rounds", "1", "--json")
    *_, last = out.splitlines()
    rows = json.loads(last)["calls"]
    assert [row["op"] for row in rows[::5]] == ["all_gather", "reduce_scatter", "all_reduce"]
    assert all(row["members"] == 2 and row["ours_s"] > 0 and row["mpi_s"] > 0 for row in rows)
    assert all(row["bound_s"] == 0 for row in rows)
