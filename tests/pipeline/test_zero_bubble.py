"""Schedules that split the backward pass in two."""

import random
from collections import Counter

import pytest

from hpc3d.pipeline.instruction import whole
from hpc3d.pipeline.schedule import SCHEDULES, instruction_streams
from hpc3d.pipeline.step_model import step_model
from hpc3d.pipeline.timeline import Cost, timeline
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


def kept(stream):
    """Return the peak number of chunks from F to the end of the full backward pass, or of W."""
    split = {each[1:] for each in stream if each.op == "W"}
    peak = now = 0
    for op, *which in stream:
        now += (op == "F") - (op == "W" or (op == "B" and tuple(which) not in split))
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 7, 8, 12, 15])
@pytest.mark.parametrize("rounds", [2, 5])
def test_bubble_and_memory_of_v_schedules_match_the_formulas(p, rounds):
    """Each chunk has passes of one second. The bubble is that of the stage with the most."""
    half, least = 7 * p / 2 - 2 if p % 2 == 0 else 7 * (p - 1) / 2, 4 * p - 5 + 2 * (p % 3 == 0)
    expected = {
        "v-half": (half, 2 * (p // 2) + 2),
        "v-min": (max(0, least), 2 * -(-(p + 2) // 3)),
        "dualpipe-v": (p - 1, 2 * p + 1),
    }
    for name, found in expected.items():
        streams, placement = instruction_streams(name, p, rounds * p, 2)
        rows = timeline(streams, placement, Cost(2, 2, 2))
        bubble = max(row[-1][1] - row[0][0] for row in rows) - 6 * rounds * p
        assert (bubble, max(map(kept, streams))) == found, name


@pytest.mark.parametrize("p", [2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(4))
def test_lean_schedules_are_slower_with_a_microbatch_per_stage(p, seed):
    draw = random.Random(seed)
    passes = (draw.uniform(0.1, 2) for _ in range(3))
    costs = [Cost(*passes, draw.choice([0, draw.uniform(0, 2)]))] * (2 * p)
    shaped = [each for each in SCHEDULES.values() if each.v_shaped]
    for micros in (p, p + 1, 2 * p - 1, 4 * p + 1):
        lean, others = (
            min(max(step_model(each.name, p, micros, 2).ends(costs)) for each in group)
            for group in (
                [each for each in shaped if each.lean is which] for which in (True, False)
            )
        )
        assert lean >= others * (1 - 1e-12)


def theirs(schedules, stages, micros, rank):
    """Return torch's passes of a rank; D is a full backward pass."""
    schedule = object.__new__(schedules.ScheduleDualPipeV)
    schedule.pp_group_size, schedule._n_microbatches = stages, micros
    actions = schedule._calculate_single_rank_operations(rank)
    letters = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "D"}
    return [
        (
            letters[each.computation_type.name],
            each.microbatch_index,
            int(each.stage_index >= stages),
        )
        for action in actions
        for each in action.sub_actions or (action,)
    ]


@pytest.mark.parametrize("p", [1, 2, 3, 6])
def test_dualpipe_v_equals_the_schedule_of_torch(p):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for micros in (2 * p, 4 * p + 3):
        for stage, stream in enumerate(instruction_streams("dualpipe-v", p, micros, 2)[0]):
            found = [(op.replace("BW", "D"), mb, chunk) for op, mb, chunk in whole(stream)]
            assert found == theirs(schedules, p, micros, stage)
