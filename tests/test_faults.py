"""Runs in which a rank fails: they end within seconds, with a line and a readable trace."""

import re
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

import hpc3d.trace
from hpc3d.trace.merge import merge
from tests.mpi import mpirun
from tests.runs import newest, said, words

slow = pytest.mark.slow


def processes(word):
    """The command lines of all processes that hold `word`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        found += [command] if word in command else []
    return found


def gone(word, within=3):
    """Whether all processes that hold `word` are gone after a moment."""
    end = time.monotonic() + within
    while processes(word) and time.monotonic() < end:
        time.sleep(0.1)
    return not processes(word)


def faulty(fault, ranks, out, **values):
    """A job with a fault, how long it lived on after it, and what its trace says."""
    name, file = f"fault-{uuid.uuid4().hex}", out / "time"
    line = words(out / "results", name=name, train__steps=1000, **values)
    done = mpirun(ranks, "-m", "tests.faulty_train", fault, file, *line, timeout=200)
    ended = time.time()
    begin = float(file.read_text())
    assert gone(name)
    with hpc3d.trace.open(merge(newest(out / "results"))) as trace:
        steps = {rank: trace.steps["step"][trace.steps["rank"] == rank] for rank in range(ranks)}
        present = set(np.unique(trace.events["rank"]).tolist())
        missing = trace.attrs["missing"]
    return done, ended - begin, steps, present, missing


@pytest.mark.parametrize(
    ("ranks", "transport"),
    [(8, "auto"), (8, "mpi"), pytest.param(64, "auto", marks=slow)],
)
@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("raise", 1, "KeyError: 'a message of one rank'\n"),
        ("exit", 3, "hpc3d.train: rank {last} exited with 3\n"),
    ],
)
def test_a_rank_that_fails_ends_the_job_and_leaves_a_trace(
    fault, code, message, ranks, transport, tmp_path
):
    done, lasted, steps, present, missing = faulty(
        fault, ranks, tmp_path, mesh__transport=transport
    )
    last = ranks - 1
    assert lasted < 10
    assert done.returncode == code
    (line,) = said(done)
    assert line.startswith(f"hpc3d.train: rank {last} ")
    assert done.stderr.count(message.format(last=last)) == 1
    assert last in present
    assert steps[last].tolist() == [0, 1]
    assert_all_accounted_for(ranks, present, missing)


@pytest.mark.parametrize("ranks", [8, pytest.param(64, marks=slow)])
def test_a_rank_that_is_killed_ends_the_job_and_leaves_a_trace(ranks, tmp_path):
    done, lasted, steps, present, missing = faulty("kill", ranks, tmp_path)
    assert lasted < 10
    assert done.returncode == 128 + 9
    assert steps[ranks - 1].tolist() == [0, 1]
    assert present == set(range(ranks))
    assert_all_accounted_for(ranks, present, missing)


def assert_all_accounted_for(ranks, present, missing):
    """Every rank is in the trace, or the trace says that it is not."""
    absent = {int(rank) for rank in re.findall(r"rank (\d+): no segment", missing)}
    assert present | absent == set(range(ranks))
    assert not present & absent


def test_a_launcher_that_is_told_to_end_leaves_a_trace(tmp_path):
    done, lasted, steps, present, missing = faulty("end the launcher", 2, tmp_path)
    assert lasted < 10
    assert done.returncode != 0
    assert all(steps[rank].tolist()[:2] == [0, 1] for rank in range(2))
    assert_all_accounted_for(2, present, missing)
