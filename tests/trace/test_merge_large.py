"""Traces of large runs are merged and checked within bounds of memory; the seconds are printed."""

import subprocess
import sys
import time

import pytest

import hpc3d.trace
from tests.trace.large import generate

MEGABYTES = "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
MERGE = f"""
import resource, sys
from hpc3d.trace.merge import merge
merge(sys.argv[1])
{MEGABYTES}
"""
CHECK = f"""
import resource, sys
import hpc3d.trace
from hpc3d.trace.check import violations
with hpc3d.trace.open(sys.argv[1] + "/trace.h5") as trace:
    assert violations(trace) == []
{MEGABYTES}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "steps", "events", "most"),
    [((4, 2, 4, 2), 100, 600, 500), ((8, 4, 8, 4), 10, 500, 1000)],
    ids=["64 ranks", "1024 ranks"],
)
def test_a_large_run_takes_little_memory(sizes, steps, events, most, tmp_path):
    generate(tmp_path, sizes, steps, events)
    ranks = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    assert megabytes(MERGE, tmp_path) < most / 2
    with hpc3d.trace.open(tmp_path / "trace.h5") as trace:
        assert trace.attrs["complete"], trace.attrs["missing"]
        assert len(trace.events) == ranks * steps * events
        assert (len(trace.steps), len(trace.ranks)) == (ranks * steps, ranks)
    assert megabytes(CHECK, tmp_path) < 1000


def megabytes(program, folder):
    """The most memory that a process with this program takes."""
    start = time.perf_counter()
    done = subprocess.check_output([sys.executable, "-c", program, folder], text=True)
    print(f"{program.split()[-1]} {time.perf_counter() - start:.1f} s, {done.strip()} MB")
    return float(done)
