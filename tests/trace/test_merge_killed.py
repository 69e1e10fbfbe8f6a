"""Runs with a killed rank: the merged trace states how far each rank is complete."""

import re

import numpy as np
import pytest

import hpc3d.trace
from hpc3d.trace.checks_per_rank import violations
from hpc3d.trace.merge import merge
from tests.mpi import mpirun
from tests.runs import newest, words
from tests.trace.killed import STEP

RANKS, KILLED = 4, 1


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in a step", "while it writes"])
def test_killed_rank_is_complete_up_to_its_last_segment(where, tmp_path):
    line = words(tmp_path, mesh__x=2, mesh__y=2, train__steps=1000, train__batch=16)
    done = mpirun(RANKS, "-m", "tests.trace.killed", where, KILLED, *line, timeout=250)
    assert done.returncode == 128 + 9
    run = newest(tmp_path)
    left = [path.name for path in (run / "trace").iterdir() if path.suffix == ".tmp"]
    assert len(left) == (where == "while it writes")
    with hpc3d.trace.open(merge(run)) as trace:
        lines = trace.attrs["missing"].splitlines()
        steps = {rank: trace.steps["step"][trace.steps["rank"] == rank] for rank in range(RANKS)}
        assert not violations(trace)
        calls = calls_of_steps(trace)
    assert any(re.fullmatch(f"rank {KILLED}: .* after step {STEP - 1}", line) for line in lines)
    assert steps[KILLED].tolist() == [*range(STEP)]
    assert all(each.tolist()[:STEP] == [*range(STEP)] for each in steps.values())
    # A complete step has all its calls: as many as the others made, of whom none was killed.
    assert len({*calls[:STEP, KILLED], *calls[1:STEP].ravel()}) == 1
    assert calls[STEP, KILLED] == 0 < calls[STEP].max()


def calls_of_steps(trace):
    """Return the numbers of numbered calls, [steps, ranks]."""
    numbered = trace.events["seq"] >= 0
    step, rank = trace.events["step"][numbered], trace.events["rank"][numbered]
    calls = np.zeros((1 + step.max(), RANKS), int)
    np.add.at(calls, (step, rank), 1)
    return calls
