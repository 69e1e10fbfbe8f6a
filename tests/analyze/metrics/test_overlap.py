"""Exposed time of gradient all-reduces in a recorded trace, with and without overlap."""

import numpy as np
import pytest

from tests.analyze.delayed_runs import trained

LASTS = 4e-3  # seconds of virtual time that an all-reduce takes, one after the other


def exposed(trace):
    """Return the exposed seconds, calls and bytes of gradient all-reduces in each step."""
    events = trace.events
    along = [number for number, group in enumerate(trace.groups) if group.axis == "d"]
    comm = next(code for code, name in events.labels("category").items() if name == "comm")
    calls = np.isin(events["group"], along) & (events["category"] == comm)
    steps = [calls & (events["step"] == step) for step in range(1, 5)]
    (received,) = {int(events["bytes"][step].sum()) for step in steps}
    (count,) = {int(step.sum()) for step in steps}
    return [events["dur"][step].sum() * 1e-9 for step in steps], count, received


PIPELINE = {"mesh__p": 2, "parallel__schedule": "1f1b", "parallel__microbatches": 4}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, PIPELINE])
def test_overlapped_gradient_reduction_is_less_exposed(more, tmp_path):
    """The backward pass of a layer takes as long as 4 all-reduces."""

    def delay(recorder, name):
        return 4 * LASTS if name == "gelu" and recorder.phase != "forward" else 0

    how = {"mesh__d": 2, "model__layers": 4, "parallel__bucket_mb": 0, "train__steps": 5, **more}
    how |= {"lasts": {"all_reduce": int(LASTS * 1e9)}}
    found = {}
    for overlap in ("true", "false"):
        ranks = 2 * how.get("mesh__p", 1)
        with trained(tmp_path / overlap, ranks, delay, parallel__overlap=overlap, **how) as trace:
            found[overlap] = exposed(trace)
    (hidden, *same), (bare, *wanted) = found["true"], found["false"]
    assert same == wanted
    assert max(hidden) < min(bare) - 4 * LASTS
