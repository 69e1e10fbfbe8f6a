"""Schedules that split the backward pass in two."""

from collections import Counter

import pytest

from hpc3d.pipeline.schedule import instruction_streams
from tests.pipeline.test_schedule import text


def test_zero_bubble_instruction_streams():
    assert text("zb-h1", 3, 4) == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]
    assert text("zb-h2", 2, 4) == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]
    assert text("zb-v", 2, 3, 2) == [
        "F0 F1 F2 1F0 1B0 1W0 1F1 1B1 1W1 B0 W0 1F2 1B2 1W2 B1 W1 B2 W2",
        "F0 1F0 F1 1F1 1B0 1W0 F2 B0 W0 1F2 1B1 1W1 B1 1B2 B2 W1 1W2 W2",
    ]
    assert text("zb-v", 2, 1, 2) == ["F0 1F0 1B0 1W0 B0 W0", "F0 1F0 1B0 1W0 B0 W0"]


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_delayed_weight_inputs_of_zero_bubble_schedules(p):
    for name, lag in (("zb-h1", 1), ("zb-h2", 2)):
        for stage, stream in enumerate(instruction_streams(name, p, 32)[0]):
            done = Counter()
            waiting = []
            for op, *_ in stream:
                waiting += [done["B"] - done["W"]] * (op == "B")
                done[op] += 1
            assert max(waiting) == lag * stage
