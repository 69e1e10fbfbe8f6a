"""Traces of large runs are merged and checked with limited memory; the times are printed."""

import subprocess
import sys
import time
from math import prod

import pytest

import hpc3d.trace
from tests.strided import rotating
from tests.trace.large import generate

MEGABYTES = "print(peak_bytes() / 1e6)"
MERGE = f"""
import sys
from tests.memory import peak_bytes
from hpc3d.trace.merge import merge
merge(sys.argv[1])
{MEGABYTES}
"""
CHECK = f"""
import sys
from tests.memory import peak_bytes
import hpc3d.trace
from hpc3d.trace.checks_per_rank import violations
with hpc3d.trace.open(sys.argv[1] + "/trace.h5") as trace:
    assert violations(trace) == []
{MEGABYTES}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "steps", "events"),
    [
        pytest.param((4, 2, 4, 2), 100, 600, marks=rotating(0), id="64 ranks"),
        pytest.param((8, 4, 8, 4), 10, 500, id="1024 ranks"),
    ],
)
def test_large_run_is_merged_with_little_memory(sizes, steps, events, tmp_path):
    generate(tmp_path, sizes, steps, events)
    ranks = prod(sizes)
    assert megabytes("merge", MERGE, tmp_path) < 300
    with hpc3d.trace.open(tmp_path / "trace.h5") as trace:
        assert trace.attrs["complete"], trace.attrs["missing"]
        assert len(trace.events) == ranks * steps * events
        assert (len(trace.steps), len(trace.ranks)) == (ranks * steps, ranks)
    assert megabytes("check", CHECK, tmp_path) < 1000


def megabytes(what, program, folder):
    """Return the peak memory of a process that runs this program."""
    start = time.perf_counter()
    done = subprocess.check_output([sys.executable, "-c", program, folder], text=True)
    print(f"{what} {time.perf_counter() - start:.1f} s, {done.strip()} MB")
    return float(done)
