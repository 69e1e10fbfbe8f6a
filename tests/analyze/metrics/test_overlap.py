"""What is exposed of the sums over replicas in a recorded trace, with and without overlap."""

from time import monotonic, sleep

import numpy as np
import pytest

from hpc3d.comm.communicator import Pending
from hpc3d.comm.threads import Threads
from tests.analyze.naps import trained

NAP = 4e-3


@pytest.fixture
def slow_line(monkeypatch):
    """All-reduces of a rank take NAP seconds each, one after the other, from when they are
    posted."""
    free, whole = {}, Threads._all_reduce

    def _all_reduce(self, block, op):
        pending = whole(self, block, op)
        here = self.members, self.rank
        due = free[here] = max(monotonic(), free.get(here, 0)) + NAP

        def finish():
            sleep(max(0, due - monotonic()))
            return pending.wait()

        return Pending(finish)

    monkeypatch.setattr(Threads, "_all_reduce", _all_reduce)


def exposed(trace):
    """Seconds that ranks spend in sums over the replicas, in the best step, and the bytes."""
    events = trace.events
    along = [number for number, group in enumerate(trace.groups) if group.axis == "d"]
    calls = np.isin(events["group"], along)
    steps = [calls & (events["step"] == step) for step in range(1, 5)]
    received = {int(events["bytes"][step].sum()) for step in steps}
    return min(events["dur"][step].sum() * 1e-9 for step in steps), received


PIPELINE = {"mesh__p": 2, "parallel__schedule": "1f1b", "parallel__microbatches": 4}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, PIPELINE])
def test_sums_that_overlap_are_less_exposed(more, slow_line, tmp_path):
    def nap(recorder, name):
        return 4 * NAP if name == "gelu" and recorder.phase != "forward" else 0

    how = {"mesh__d": 2, "model__layers": 4, "parallel__bucket_mb": 0, "train__steps": 5, **more}
    found = {}
    for overlap in ("true", "false"):
        ranks = 2 * how.get("mesh__p", 1)
        with trained(tmp_path / overlap, ranks, nap, parallel__overlap=overlap, **how) as trace:
            found[overlap] = exposed(trace)
    (hidden, same), (bare, wanted) = found["true"], found["false"]
    assert same == wanted and len(wanted) == 1
    assert hidden < bare - 4 * NAP
