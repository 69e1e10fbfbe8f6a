"""Ranks of a job agree, reject input together, and end together."""

import subprocess
import sys
import textwrap

import pytest

from tests.mpi import ROOT
from tests.runs import said
from tests.runtime.test_launch import job


@pytest.mark.parametrize("mode", ["agree", "leave_well"])
def test_successful_job_exits_with_0(mode, tmp_path):
    done, _ = job(3, mode, tmp_path)
    assert done.returncode == 0


def test_invalid_input_is_reported_once_and_ends_all_ranks(tmp_path):
    done, _ = job(4, "refuse", tmp_path)
    expected = ["hpc3d.test: one.key = 1: remedy", "hpc3d.test: another.key = 2: remedy"]
    assert said(done) == expected
    assert done.returncode == 2
    assert "MPI_ABORT" not in done.stderr
    assert "Traceback" not in done.stderr


def test_problem_of_some_ranks_is_reported_once_and_ends_all(tmp_path):
    done, _ = job(3, "refuse_on_some", tmp_path)
    assert said(done) == ["hpc3d.test: a.key = 1: remedy"]
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_mpi_can_start_after_only_the_library_was_inspected():
    code = """
        from hpc3d.runtime.mpi_library import found
        assert found()
        from hpc3d.runtime import launch
        raise SystemExit(launch.run("test", lambda job: None))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
