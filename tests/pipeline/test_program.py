"""The passes of a run in each training step, and the microbatches that they use."""

from itertools import chain, islice

import pytest

from hpc3d.config.input_file import Config, MeshConfig, ParallelConfig, TrainConfig
from hpc3d.pipeline.instruction import parse
from hpc3d.pipeline.program import STEP, cut, program_of

STEPS = 5


def config(schedule, stages, micros, batch=24):
    parallel = ParallelConfig(schedule=schedule, microbatches=micros, chunks=1)
    return Config(
        mesh=MeshConfig(p=stages), parallel=parallel, train=TrainConfig(steps=STEPS, batch=batch)
    )


def text(groups):
    return " ".join("+".join(map(str, group)) for group in groups)


def test_synchronous_schedule_repeats_every_step():
    plan = program_of(config("1f1b", stages=2, micros=2))
    assert (plan.asynchronous, plan.ahead) == (False, 0)
    first, second = islice(plan.steps(1), 2)
    assert first is second
    assert text(first) == "RecvF0 F0 RecvF1 BW0 SendB0 F1 BW1 SendB1 Reduce Step"


def test_step_with_few_microbatches_reduces_gradients_after_all_passes():
    plan = program_of(config("1f1b", stages=2, micros=4))
    few = [text(plan.with_few(stage, {1})) for stage in (0, 1)]
    assert few == [
        "F1 SendF1 RecvB1 BW1 Reduce Step",
        "RecvF1 F1 BW1 SendB1 Reduce Step",
    ]


def test_asynchronous_steps_overlap():
    """Stage 0 is ahead: microbatch 2 of step 1 is in flight when step 0 ends."""
    plan = program_of(config("pipedream-2bw", stages=2, micros=2))
    steps = [text(groups) for groups in plan.steps(0)]
    assert steps[0] == "F0 SendF0 F1 SendF1+RecvB0 BW0 F2 SendF2+RecvB1 BW1+Reduce Step"
    assert steps[1] == "F3 SendF3+RecvB2 BW2 F4 SendF4+RecvB3 BW3+Reduce Step"
    assert steps[-1] == "F9 SendF9+RecvB8 BW8 RecvB9 BW9+Reduce Step"


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        (1, ["F0 Step", "F1 BW0 Step", "BW1 Step", "F2 Step SendF2"]),
        (2, ["F0 Step F1 BW0 Step", "BW1 Step F2 Step SendF2"]),
        (4, ["F0 Step F1 BW0 Step BW1 Step F2 Step SendF2"]),
    ],
)
def test_groups_after_the_last_update_belong_to_the_last_step(updates, expected):
    words = ["F0", "Step", "F1", "BW0", "Step", "BW1", "Step", "F2", "Step", "SendF2"]
    groups = [(parse(word),) for word in words]
    assert [text(part) for part in cut(groups, updates)] == expected


def test_program_of_a_stage_equals_its_part_of_the_full_program():
    whole = program_of(config("1f1b", stages=3, micros=4))
    alone = whole.of(1)
    assert [*alone.stages] == [1]
    assert next(alone.steps(1)) == next(whole.steps(1))
    assert alone[1:] == whole[1:]


ASYNCHRONOUS = [
    *(("pipedream", *sizes) for sizes in [(1, 1), (1, 3), (2, 2), (2, 4), (4, 2), (4, 3), (4, 6)]),
    *(("pipedream-2bw", *sizes) for sizes in [(1, 1), (1, 3), (2, 2), (2, 4), (4, 4), (4, 6)]),
]


@pytest.mark.parametrize(("schedule", "stages", "micros"), ASYNCHRONOUS)
def test_asynchronous_steps_end_with_their_update_and_lose_nothing(schedule, stages, micros):
    plan = program_of(config(schedule, stages, micros))
    updates = micros if schedule == "pipedream" else 1
    assert (plan.updates, plan.alone) == (updates, schedule == "pipedream")
    for stage in range(stages):
        parts = list(plan.steps(stage))
        assert len(parts) == STEPS
        assert [*chain(*parts)] == plan.stages[stage]
        assert all(part.count(STEP) == updates for part in parts)
        assert all(part[-1] == STEP for part in parts)


@pytest.mark.parametrize(("schedule", "stages", "micros"), ASYNCHRONOUS)
def test_step_uses_microbatches_of_at_most_ahead_later_steps(schedule, stages, micros):
    plan = program_of(config(schedule, stages, micros))
    furthest = 0
    for stage in range(stages):
        for number, groups in enumerate(plan.steps(stage)):
            mbs = {one.mb for group in groups for one in group if one.mb >= 0}
            assert min(mbs) >= number * micros
            furthest = max(furthest, max(mbs) // micros - number)
    assert furthest == plan.ahead
