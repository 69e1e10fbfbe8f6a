"""The step model of a schedule, compared with its timeline."""

import random
from itertools import product

import pytest

from hpc3d.pipeline import step_model as module
from hpc3d.pipeline.csv_schedule import to_csv
from hpc3d.pipeline.schedule import SCHEDULES as RECORDS
from hpc3d.pipeline.schedule import find, instruction_streams
from hpc3d.pipeline.step_model import StageTimes, reduced, step_model
from hpc3d.pipeline.timeline import Cost, makespan, timeline

SCHEDULES = [
    *(("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1)),
    *((name, 2) for name in ("zb-v", "v-half", "v-min", "dualpipe-v")),
]


def drawn(seed, name, chunks, most_stages, micros):
    """Return random sizes and costs, and the ends of the stages on the timeline."""
    draw = random.Random(seed)
    sizes = name, draw.randint(2, most_stages), draw.randint(*micros), chunks
    costs = [Cost(*(draw.uniform(0, 3) for _ in range(4))) for _ in range(sizes[1] * chunks)]
    rows = timeline(*instruction_streams(*sizes), costs)
    return sizes, costs, [row[-1][1] for row in rows]


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
@pytest.mark.parametrize("seed", range(6))
def test_step_model_ends_match_the_timeline(name, chunks, seed):
    sizes, costs, expected = drawn(seed, name, chunks, most_stages=5, micros=(5, 9))
    assert step_model(*sizes).ends(costs) == expected


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_steady_ends_approximate_the_timeline(name, chunks, seed):
    sizes, costs, expected = drawn(seed, name, chunks, most_stages=4, micros=(40, 60))
    assert step_model(*sizes).steady_ends(costs) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("micros", [17, 18, 23])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb-v", 2)])
def test_a_schedule_of_a_file_is_simulated_with_all_its_microbatches(
    name, chunks, micros, tmp_path
):
    """From 9 microbatches per stage on, other schedules are simulated with fewer."""
    _, costs, _ = drawn(micros, name, chunks, 2, (micros, micros))
    streams = instruction_streams(name, 2, micros, chunks)
    to_csv(str(tmp_path / "by_hand.csv"), *streams)
    sizes = f"csv:{tmp_path / 'by_hand.csv'}", 2, micros, chunks
    assert step_model(*sizes).steady_ends(costs) == [
        row[-1][1] for row in timeline(*streams, costs)
    ]


def test_step_model_of_a_single_stage():
    assert step_model("none", 1, 3, 1).ends([Cost(1.0, 2.0, 3.0)]) == [18.0]
    assert step_model("none", 1, 3, 1).seconds(StageTimes([1.0], [2.0], [3.0])) == 18.0


# Closed forms


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
def test_a_closed_form_is_near_the_makespan_of_the_timeline(name, chunks, tolerance):
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
        found = step_model(name, stages, micros, chunks).seconds(StageTimes(*times, message))
        assert found == pytest.approx(exact, rel=tolerance), (stages, micros, cost, message)


def test_slowest_stage_determines_the_closed_form():
    times = [1.0, 1.0, 2.0], [2.0, 2.0, 4.0], [0.0] * 3
    assert step_model("gpipe", 3, 10, 1).seconds(StageTimes(*times)) == 10 * 6 + 2 * 3
    seconds = step_model("1f1b", 3, 10, 1).seconds(StageTimes(*times, 0.1))
    assert seconds == pytest.approx(10 * 6 + 2 * 3 + 2 * 0.1)


UNEVEN = StageTimes((1, 1, 1.5, 1), (2, 1.5, 1.5, 2), (0.5, 1, 1, 2), 0.1)
SEVERAL_STAGES = [name for name, one in RECORDS.items() if not one.asynchronous and name != "none"]


@pytest.mark.parametrize("micros", [4, 11, 40, 43])
@pytest.mark.parametrize("name", SEVERAL_STAGES)
def test_without_a_closed_form_the_time_is_that_of_the_timeline(name, micros, monkeypatch):
    monkeypatch.setattr(module, "_CLOSED_FORMS", {})
    chunks = find(name).chunks or 2
    passes, placement = instruction_streams(name, 4, micros, chunks)
    stages = [Cost(*each, UNEVEN.message).share(chunks) for each in zip(*UNEVEN[:3])]
    costs = [stages[placement.location(part)[0]] for part in range(placement.parts)]
    exact = makespan(timeline(passes, placement, costs))
    found = step_model(name, 4, micros, chunks).seconds(UNEVEN)
    assert found == pytest.approx(exact, rel=1e-9)


# Gradient reductions


def test_a_reduction_over_several_stages_starts_after_the_last_of_them():
    assert reduced([5.0, 7.0, 6.0], [1.0, 0.0, 2.0]) == [6.0, 7.0, 8.0]
    over = [((0, 1), 10.0), ((0, 2), 1.0)]
    assert reduced([5.0, 7.0, 6.0], [1.0, 0.0, 2.0], over) == [18.0, 17.0, 18.0]


# Memory


def most_held(model, stage, *sizes):
    return max(nbytes for _, nbytes in model.held(stage, *sizes))


def test_chunks_are_in_flight_together():
    """Stage 0 begins with F0 F1 1F0 1F1 F2 1B0 F3, so it holds four microbatches of chunk 0 with
    one of chunk 1, or three with two."""
    model = step_model("interleaved", 2, 4, 2)
    assert model.most_in_flight == [5, 3]
    assert most_held(model, 0, [10, 1], [0, 0]) == 41
    assert most_held(model, 0, [1, 10], [0, 0]) == 23


def test_each_kind_of_pass_has_its_moments():
    """In 1F1B on the second-to-last stage, F1 starts with one microbatch, B0 and B1 with two."""
    found = step_model("1f1b", 2, 4, 1).held(0, [10], [0])
    assert sorted(found) == [(("BW", 0), 20), (("F", 0), 10)]


def test_inputs_of_weight_gradients_are_held_until_they_are_computed():
    """The last of three stages of ZB-H1 defers two W."""
    model = step_model("zb-h1", 3, 6, 1)
    assert most_held(model, 2, [0], [1]) == 3
    assert [most_held(model, stage, [1], [1]) for stage in range(3)] == [3, 3, 3]


def test_peaks_record_whether_gradients_are_in_flight():
    """With GPipe, or 1F1B with m = p, the peak is before the gradients are in flight."""
    for name, micros in (("gpipe", 3), ("1f1b", 2)):
        model = step_model(name, 2, micros, 1)
        assert most_held(model, 0, [10], [10], 4) == 10 * micros
        assert most_held(model, 0, [10], [10], 14) == 10 * micros + 4
    assert most_held(step_model("1f1b", 2, 4, 1), 0, [10], [10], 4) == 24
