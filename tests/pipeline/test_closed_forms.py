"""Closed forms of the time of a pipeline, against its timeline."""

from itertools import product

import pytest

from hpc3d.pipeline.closed_forms import StageTimes
from hpc3d.pipeline.schedule import find, instruction_streams
from hpc3d.pipeline.timeline import Cost, makespan, timeline


@pytest.mark.parametrize(
    ("name", "chunks", "tolerance"),
    [
        ("gpipe", 1, 1e-9),
        ("1f1b", 1, 0.02),
        ("interleaved", 2, 1e-9),
        ("interleaved", 4, 1e-9),
        ("zb-h1", 1, 0.06),
        ("zb-h2", 1, 0.1),
        ("zb-v", 2, 0.05),
    ],
)
def test_the_makespan_is_that_of_the_timeline(name, chunks, tolerance):
    costs = [(1, 1, 1), (1, 1.5, 0.9), (1, 2, 1)]
    for stages, rounds, cost, message in product(
        (2, 4, 8), (0.25, 0.5, 1, 2, 4), costs, (0, 0.05, 0.2)
    ):
        micros = max(1, int(rounds * stages))
        if find(name).forbids(stages, micros, chunks):
            continue
        passes, placement = instruction_streams(name, stages, micros, chunks)
        exact = makespan(timeline(passes, placement, Cost(*cost, message)))
        forward, backward, weight = cost
        if not find(name).splits_backward:
            backward, weight = backward + weight, 0
        times = [[seconds] * stages for seconds in (forward, backward, weight)]
        found = find(name).seconds(micros, chunks, StageTimes(*times, message))
        assert found == pytest.approx(exact, rel=tolerance), (stages, micros, cost, message)


def test_a_slow_last_stage_sets_the_pace():
    times = [1.0, 1.0, 2.0], [2.0, 2.0, 4.0], [0.0] * 3
    assert find("gpipe").seconds(10, 1, StageTimes(*times)) == 10 * 6 + 2 * 3
    seconds = find("1f1b").seconds(10, 1, StageTimes(*times, 0.1))
    assert seconds == pytest.approx(10 * 6 + 2 * 3 + 2 * 0.1)
