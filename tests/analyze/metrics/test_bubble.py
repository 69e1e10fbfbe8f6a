"""The three parts of a pipeline bubble, for schedules with known bubbles."""

import json

import pytest

from hpc3d import simulate, trace
from hpc3d.analyze.metrics.bubble import bubble_rows, pipeline_bubble
from hpc3d.analyze.metrics.pipeline_step import StepPasses, pipeline_of_step
from hpc3d.pipeline.instruction import parse
from hpc3d.pipeline.schedule import instruction_streams
from hpc3d.pipeline.timeline import Cost, timeline
from tests.analyze.delayed_runs import trained
from tests.analyze.synthetic import by_hand, call
from tests.analyze.synthetic import row as event

TF, TB = 2.0, 3.0
DELAY = 0.15  # seconds of virtual time; all else takes microseconds


def rows_of(name, stages, micros, chunks=1, cost=(TF, TB, 0.0)):
    return timeline(*instruction_streams(name, stages, micros, chunks), Cost(*cost))


def parts(rows):
    """Return (warm-up, steady, drain) of each stage, which add up to its idle time."""
    found = []
    start, end = min(row[0][0] for row in rows), max(row[-1][1] for row in rows)
    for each, row in zip(bubble_rows(rows), rows):
        idle = end - start - sum(end - start for start, end, _ in row)
        assert each["span_s"] == pytest.approx(end - start)
        assert each["idle_s"] == pytest.approx(idle)
        found.append((each["warmup_s"], each["steady_s"], each["drain_s"]))
        assert sum(found[-1]) == pytest.approx(idle)
    return found


def test_bubble_of_a_hand_written_schedule():
    """Stage 0 is idle from 4 to 9 before its first backward pass, from 12 to 13 between this pass
    and its last forward pass, from 15 to 20, and after 22. Stage 1 is idle from 0 to 4, 10 to 12
    and 15 to 25.
    """
    stage_0 = [(0, 4, "F0"), (9, 12, "BW0"), (13, 15, "F1"), (20, 22, "BW1")]
    stage_1 = [(4, 6, "F0"), (6, 10, "B0"), (12, 14, "F1"), (14, 15, "B1"), (25, 26, "W0")]
    rows = [[(start, end, parse(text)) for start, end, text in row] for row in (stage_0, stage_1)]
    assert parts(rows) == [(5, 1, 5 + 4), (4, 2, 10)]


def test_stage_without_a_backward_pass_has_only_a_fill_bubble():
    rows = [[(0, 4, parse("F0")), (6, 9, parse("BW0"))], [(4, 6, parse("F0"))]]
    assert parts(rows) == [(2, 0, 0), (7, 0, 0)]


@pytest.mark.parametrize(("stages", "micros"), [(2, 2), (4, 8), (4, 3)])
def test_gpipe_bubble_matches_its_closed_form(stages, micros):
    """Each stage waits i t_f for its first microbatch, (p-1-i)(t_f + t_b) for the first gradient,
    and the rest of (p-1)(t_f + t_b) after its last pass."""
    for stage, found in enumerate(parts(rows_of("gpipe", stages, micros))):
        below = stages - 1 - stage
        assert found == pytest.approx((stage * TF + below * (TF + TB), 0, stage * TB))


@pytest.mark.parametrize(("stages", "micros"), [(2, 4), (4, 8)])
def test_1f1b_bubble_matches_its_closed_form(stages, micros):
    """The total is (p-1)(t_f + t_b) (Narayanan et al. 2021). During warm-up, the first stage waits
    for the others' t_b, and the last stage for the others' t_f."""
    found = parts(rows_of("1f1b", stages, micros))
    for each in found:
        assert sum(each) == pytest.approx((stages - 1) * (TF + TB))
    ahead = stages - 1
    assert found[-1] == pytest.approx((ahead * TF, 0, ahead * TB))
    assert found[0][0] == pytest.approx(ahead * TB), "p forward passes fill p t_f"
    assert found[0][2] == pytest.approx(ahead * TF)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "interleaved"])
def test_bubble_components_of_other_schedules_are_not_negative(name):
    chunks = 1 if name == "zb-h1" else 2
    for each in parts(rows_of(name, 4, 8, chunks, cost=(1.0, 1.5, 0.5))):
        assert min(each) >= 0


def test_bubble_of_a_threaded_run_with_a_slow_stage(tmp_path):
    """A stage that pauses eight times delays the other stage: twice before the first gradient
    arrives, twice before the second, and four times after its forward passes."""

    def delay(recorder, name):
        slow = recorder.layer == 7 and recorder.step == 1
        return DELAY if slow and name == "gelu" else 0

    sizes = {"mesh__p": 2, "parallel__microbatches": 4, "parallel__schedule": "1f1b"}
    rows = StepPasses(trained(tmp_path / "run", 2, delay, **sizes)).measured(1)
    first, second = parts(rows)
    assert first == pytest.approx((2 * DELAY, 2 * DELAY, 4 * DELAY), abs=0.01 * DELAY)
    assert second == pytest.approx((0, 0, 0), abs=0.01 * DELAY)


def test_pipeline_bubble_of_known_passes(tmp_path):
    """Stage 0 works from 0 to 10, waits for a message, and works from 16 to 20. Stage 1 works from
    5 to 15, with 2 ms in an all-reduce. The message that stage 1 receives first is before its
    first pass. The costs are 20 and 10, and the works 14 and 10."""
    here = {"step": 1, "microbatch": 0}
    message = here | {"group": 1}
    rows = [
        event(0, 0, 10, **here),
        call(0, "recv", 10, 16, 0, peer=1, **message),
        event(0, 16, 20, **here),
        event(0, 90, 99, step=1),  # the optimizer
        call(1, "recv", 0, 5, 0, peer=0, **message),
        event(1, 5, 8, **here),
        call(1, "all_reduce", 8, 10, 0, **here),
        event(1, 10, 15, **here),
        event(1, 30, 90, step=0, microbatch=0),
    ]
    steps = {(rank, step): (100 * step - 100, 100 * step) for rank in (0, 1) for step in (0, 1)}
    mesh = {"axes": "p x", "axis_sizes": [2, 1]}
    with by_hand(tmp_path / "t.h5", rows, steps, [("x", (1,)), ("p", (0, 1))], **mesh) as opened:
        assert pipeline_bubble(opened, 1) == pytest.approx(1 - 14 / 20)
        assert pipeline_bubble(opened, 2) is None


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_report_of_a_simulated_step_has_the_bubble_of_simulate(name, tmp_path, capsys):
    layout = ["--mesh.p", 4, "--model.layers", 5, "--parallel.schedule", name, "--mesh.d", 2]
    words = ["gpt-serial", *layout, "--train.batch", 16, "--parallel.microbatches", 8]
    words += ["--machine", "v100-4x16", "--out", tmp_path / "run", "--json"]
    assert simulate.main([*map(str, words)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    with trace.open(tmp_path / "run") as opened:
        _, _, (total,), _ = pipeline_of_step(opened, 0)
    assert total["bubble"] == pytest.approx(found["bubble"], rel=1e-9)
    assert 0 < total["bubble"] < total["idle_share"]
