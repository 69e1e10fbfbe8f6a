"""The step model of a schedule, against the timeline."""

import random

import pytest

from hpc3d.pipeline.csv_schedule import to_csv
from hpc3d.pipeline.schedule import instruction_streams
from hpc3d.pipeline.step_model import steady_ends, step_model
from hpc3d.pipeline.timeline import Cost, timeline

SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]


def drawn(seed, name, chunks, most_stages, micros):
    """Random sizes and costs, and the ends of the stages by the timeline."""
    draw = random.Random(seed)
    sizes = name, draw.randint(2, most_stages), draw.randint(*micros), chunks
    costs = [Cost(*(draw.uniform(0, 3) for _ in range(4))) for _ in range(sizes[1] * chunks)]
    rows = timeline(*instruction_streams(*sizes), costs)
    return sizes, costs, [row[-1][1] for row in rows]


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
@pytest.mark.parametrize("seed", range(6))
def test_its_ends_are_those_of_the_timeline(name, chunks, seed):
    sizes, costs, expected = drawn(seed, name, chunks, most_stages=5, micros=(5, 9))
    assert step_model(*sizes).ends(costs) == expected


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_with_many_microbatches_its_ends_are_as_good_as_those_of_the_timeline(name, chunks, seed):
    sizes, costs, expected = drawn(seed, name, chunks, most_stages=4, micros=(40, 60))
    assert steady_ends(*sizes, costs) == pytest.approx(expected, rel=0.02)


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
    assert steady_ends(*sizes, costs) == [row[-1][1] for row in timeline(*streams, costs)]


def test_one_stage_alone():
    assert step_model("none", 1, 3, 1).ends([Cost(1.0, 2.0, 3.0)]) == [18.0]


def test_peaks_are_of_all_chunks_together():
    """Stage 0 begins with F0 F1 1F0 1F1 F2 1B0 F3, and has 3 and 2 again."""
    found = step_model("interleaved", 2, 4, 2).peaks[0]
    assert sorted(found) == [((3, 2), True), ((4, 1), True)]
    assert step_model("1f1b", 2, 4, 1).peaks == [[((2,), True)], [((1,), True)]]
    assert step_model("zb-h1", 3, 6, 1).peaks == 3 * [[((3,), True)]]


def test_gradients_are_on_their_way_after_the_first_backward_pass():
    """Under GPipe, and 1F1B of as many microbatches as stages, the fullest moment is before it."""
    for name, micros in (("gpipe", 3), ("1f1b", 2)):
        assert sorted(step_model(name, 2, micros, 1).peaks[0]) == [
            ((micros - 1,), True),
            ((micros,), False),
        ]
