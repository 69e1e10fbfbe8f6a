"""Pipeline passes in the traces of small runs, compared with the executed schedules."""

from itertools import pairwise

import pytest

from hpc3d.analyze.metrics.pipeline_step import (
    StepPasses,
    configuration,
    idle_shares,
    pipeline_of_step,
    simulated,
)
from hpc3d.pipeline.instruction import Instruction, parse, whole
from hpc3d.pipeline.schedule import instruction_streams
from hpc3d.pipeline.step_model import in_flight
from tests.analyze.traces import STEPS, config_of, opened, trained
from tests.strided import strided

SYNCHRONOUS = [
    # schedule, stages, microbatches, chunks, ranks along x
    ("none", 1, 3, 1, 1),
    ("gpipe", 2, 4, 1, 2),
    ("gpipe", 4, 3, 1, 1),
    ("1f1b", 2, 4, 1, 1),
    ("1f1b", 4, 8, 1, 1),
    ("zb-h1", 3, 6, 1, 1),
    ("zb-h1", 4, 8, 1, 1),
    ("interleaved", 2, 4, 2, 2),
    ("interleaved", 4, 4, 2, 1),
    ("zb-v", 2, 4, 2, 2),
    ("zb-v", 4, 8, 2, 1),
]


@pytest.fixture(
    scope="module",
    params=strided([(each,) for each in SYNCHRONOUS], 4, 2, ids=lambda case: str(case[0])),
)
def run(request, tmp_path_factory):
    """Return the passes of a run, the streams and placement of its stages, and their ranks."""
    name, stages, micros, chunks, along_x = request.param
    folder = trained(
        tmp_path_factory.mktemp("run") / "tiny",
        stages * along_x,
        mesh__p=stages,
        mesh__x=along_x,
        parallel__schedule=name,
        parallel__microbatches=micros,
        parallel__chunks=chunks,
    )
    with opened(folder) as recorded:
        return StepPasses(recorded), *instruction_streams(name, stages, micros, chunks), along_x


def test_stages_execute_the_instruction_streams_of_the_schedule(run):
    passes, given, _, along_x = run
    assert passes.ranks == dict.fromkeys(range(len(given)), along_x)
    for step in range(STEPS):
        rows = passes.measured(step)
        assert min(row[0][0] for row in rows) == 0
        assert [[what for *_, what in row] for row in rows] == [whole(one) for one in given]


def test_passes_are_sequential_and_start_after_their_dependencies(run):
    passes, _, placement, _ = run
    for step in range(STEPS):
        rows = passes.measured(step)
        ends = {}
        for stage, row in enumerate(rows):
            for (_, end, _), (start, *_) in pairwise(row):
                assert end <= start
            for start, end, (op, mb, chunk) in row:
                assert start < end
                ends[stage, Instruction(op[0], mb, chunk)] = end
        for stage, row in enumerate(rows):
            for start, _, what in row:
                assert all(ends[need] <= start for need in placement.needs(stage, what))


def test_microbatches_in_flight_match_the_schedule(run):
    passes, given, _, _ = run
    wanted = {stage: in_flight(stream).activations for stage, stream in enumerate(given)}
    for step in range(STEPS):
        assert passes.in_flight(step) == wanted


@pytest.mark.parametrize(
    ("stages", "micros"), [(2, 4), (3, 3), pytest.param(4, 6, marks=pytest.mark.slow)]
)
def test_asynchronous_schedule_continues_across_steps(tmp_path, stages, micros):
    sizes = {"mesh__p": stages, "parallel__microbatches": micros}
    folder = trained(tmp_path / "run", stages, parallel__schedule="pipedream-2bw", **sizes)
    given, _ = instruction_streams("pipedream-2bw", stages, micros, steps=STEPS)
    with opened(folder) as recorded:
        passes, config = StepPasses(recorded), configuration(recorded)
    steps = [passes.measured(step) for step in range(STEPS)]
    for stage, stream in enumerate(given):
        seen = [what for rows in steps for *_, what in rows[stage]]
        assert seen == [what for what in whole(stream) if what.op != "Step"]
    wanted = {stage: stages - stage for stage in range(stages)}
    assert passes.in_flight(0) == passes.in_flight(1) == wanted
    idle = [idle_shares(simulated(config, step, steps[step]).rows) for step in range(STEPS)]
    assert max(idle[1].values()) == pytest.approx(0, abs=1e-9), "neither fills nor drains"
    assert idle[2][0] > 0, "drains at the end of the run"


def test_simulated_panel_includes_passes_of_adjacent_steps(tmp_path):
    sizes = {"mesh__p": 3, "parallel__microbatches": 4}
    folder = trained(tmp_path / "run", 3, parallel__schedule="pipedream-2bw", **sizes)
    with opened(folder) as recorded:
        rows, *_, ((_, measured), (_, ideal)) = pipeline_of_step(recorded, 1)
    assert [row["passes"] for row in rows] == [8, 8, 8]
    assert min(span.start for row in measured for span in row) == 0
    assert {span.kind for row in ideal for span in row} == {"F", "BW"}
    end = max(span.end for row in ideal for span in row)
    for row in ideal:
        assert (row[0].start, row[-1].end) == (0, end)


def test_microbatches_on_a_single_stage_are_measured(tmp_path):
    folder = trained(tmp_path / "run", 1, parallel__microbatches=3)
    with opened(folder) as recorded:
        (row,), *bubbles, panels = pipeline_of_step(recorded, 2)
    assert (row["passes"], row["in_flight"], row["in_flight_simulated"]) == (6, 1, 1)
    assert row["idle_share_simulated"] == pytest.approx(0, abs=1e-9) and len(panels) == 2
    assert bubbles == [[], []]


def test_run_without_stages_and_microbatches_has_no_pipeline_table(tmp_path):
    folder = trained(tmp_path / "run", 2, mesh__x=2)
    with opened(folder) as recorded:
        assert pipeline_of_step(recorded, 1) == ([], [], [], [])


def test_time_of_alternating_passes_is_divided(tmp_path):
    """Each pair takes the time from its first to its last event."""
    options = {"overlap_experts": "true", "schedule": "dualpipe-v", "microbatches": 4}
    keys = {f"parallel__{key}": value for key, value in options.items()}
    folder = trained(tmp_path / "run", 2, mesh__e=2, mesh__x=1, model__experts=4, **keys)
    with opened(folder) as recorded:
        (row,) = StepPasses(recorded).measured(1)
        tables = pipeline_of_step(recorded, 1)[0]
    streams, _ = instruction_streams("dualpipe-v", 1, 4, 2)
    assert [what for *_, what in row] == whole(streams[0])
    assert all(one[1] <= other[0] for one, other in pairwise(row))
    assert 0 <= tables[0]["idle_share"] < 1 and 0 <= tables[0]["idle_share_simulated"] < 0.01
    assert tables[0]["in_flight"] == tables[0]["in_flight_simulated"]


def rows_of(*stages):
    """Return the rows, in seconds, of stages given as {pass: (start, end)}."""
    return [[(*span, parse(text)) for text, span in row.items()] for row in stages]


def test_simulated_pass_costs_are_medians_that_ignore_an_outlier():
    config = config_of(2, mesh__p=2, parallel__microbatches=3)
    rows = rows_of(
        {"F0": (0, 1), "F1": (1, 2), "BW0": (9, 11), "F2": (11, 20), "BW1": (20, 22)},
        {"F0": (1, 4), "BW0": (4, 9), "F1": (20, 23), "BW1": (23, 28), "F2": (28, 32)},
    )
    # medians of F: of 1, 1, 9 and of 3, 3, 4; of BW: 2 and 5
    assert simulated(config, 1, rows).cost == pytest.approx((2, 3.5, 0, 0))


def test_idle_share_counts_until_the_last_stage_finishes():
    rows = rows_of({"F0": (0, 2)}, {"F0": (2, 3), "BW0": (3, 5)}, {})
    assert idle_shares(rows) == pytest.approx({0: 0.6, 1: 0.4, 2: 1})
