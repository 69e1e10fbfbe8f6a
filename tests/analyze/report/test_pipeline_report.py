"""The report of a pipeline, compared with known times."""

import csv
import json

import numpy as np
import pytest

from hpc3d import report
from hpc3d.analyze.metrics.pipeline_step import (
    StepPasses,
    configuration,
    pipeline_of_step,
    simulated,
)
from hpc3d.analyze.metrics.steady import Steady
from hpc3d.analyze.metrics.step import median_step
from hpc3d.analyze.report.gantt import gantt
from hpc3d.trace.segment import segment_path
from tests.analyze.traces import MS, by_hand, event, opened

# Two stages, two microbatches of 1F1B, in ms:
#   stage 0   F0 0-4   F1 4-8           BW0 20-26    BW1 40-50
#   stage 1       F0 6-8   BW0 10-20   F1 20-22   BW1 24-38
STAGE_0 = [
    event("F0", 0, 3),
    event("F0", 3, 1, op="all_reduce"),
    event("F1", 4, 4),
    event("BW0", 20, 2),
    event("BW0", 21, 1),
    event("BW0", 23, 3),
    event("BW1", 40, 10),
]
STAGE_1 = [
    event("F0", 6, 2),
    event("BW0", 10, 10),
    event("F1", 20, 2),
    event("BW1", 24, 14),
]
# None of these is of a pass of the step: messages, the optimizer, no microbatch, other steps.
BESIDE = [
    event("F0", 1, 60, op="recv"),
    event("BW0", 1, 60, op="send"),
    event("F0", 1, 60, phase="optimizer"),
    event("F0", 1, 60, microbatch=-1),
    event("F0", 1, 60, phase="other"),
    event("F0", 1, 60, step=-1),
    event("F0", -900, 5, step=0),
    event("BW0", -800, 5, step=0),
]
MEASURED = [
    [(0, 4, "F0"), (4, 8, "F1"), (20, 26, "BW0"), (40, 50, "BW1")],
    [(6, 8, "F0"), (10, 20, "BW0"), (20, 22, "F1"), (24, 38, "BW1")],
]
# F: medians 4 and 2 make 3; BW: medians 8 and 12 make 10
IDEAL = [
    [(0, 3, "F0"), (3, 6, "F1"), (16, 26, "BW0"), (29, 39, "BW1")],
    [(3, 6, "F0"), (6, 16, "BW0"), (16, 19, "F1"), (19, 29, "BW1")],
]
SIZES = {"parallel__microbatches": 2, "parallel__schedule": "1f1b"}


def assert_rows(found, wanted):
    """Compare rows in seconds with rows in milliseconds."""
    assert len(found) == len(wanted)
    for row, expected in zip(found, wanted):
        assert [str(what) for *_, what in row] == [text for *_, text in expected]
        times = [[start * 1e3, end * 1e3] for start, end, _ in row]
        np.testing.assert_allclose(times, [span[:2] for span in expected], atol=1e-9)


@pytest.fixture
def hand(tmp_path):
    events = {0: [*STAGE_0, *BESIDE], 1: [*STAGE_1, *BESIDE]}
    return by_hand(tmp_path / "hand", events, **SIZES)


def test_pass_covers_all_its_events_except_messages(hand):
    with opened(hand) as recorded:
        passes = StepPasses(recorded)
    assert_rows(passes.measured(1), MEASURED)
    assert_rows(passes.measured(0), [[(0, 5, "F0"), (100, 105, "BW0")]] * 2)
    assert passes.in_flight(1) == {0: 2, 1: 1}


def test_simulated_schedule_uses_the_mean_of_median_pass_times(hand):
    with opened(hand) as recorded:
        config, rows = configuration(recorded), StepPasses(recorded).measured(1)
    ideal = simulated(config, 1, rows)
    assert_rows(ideal.rows, IDEAL)
    assert ideal.in_flight == {0: 2, 1: 1}


TABLE = [
    {
        "step": 1,
        "stage": 0,
        "ranks": 1,
        "passes": 4,
        "forward_s": 8e-3,
        "backward_s": 16e-3,
        "input_s": None,
        "weight_s": None,
        "idle_share": 26 / 50,
        "idle_share_simulated": 13 / 39,
        "in_flight": 2,
        "in_flight_simulated": 2,
    },
    {
        "step": 1,
        "stage": 1,
        "ranks": 1,
        "passes": 4,
        "forward_s": 4e-3,
        "backward_s": 24e-3,
        "input_s": None,
        "weight_s": None,
        "idle_share": 22 / 50,
        "idle_share_simulated": 13 / 39,
        "in_flight": 1,
        "in_flight_simulated": 1,
    },
]


def test_pipeline_table_of_a_hand_written_run(hand):
    with opened(hand) as recorded:
        rows, *_, panels = pipeline_of_step(recorded, 1)
    assert rows == [pytest.approx(row) for row in TABLE]
    assert [title for title, _ in panels] == [
        "measured: schedule 1f1b, step 1, idle 48.0%",
        "simulated: mean pass times on all stages (F 3 ms, BW 10 ms), instantaneous messages, "
        "idle 33.3%",
    ]


def test_first_rank_represents_its_stage(tmp_path):
    late = [{**each, "t_start": each["t_start"] + 9 * MS, "stage": 0} for each in STAGE_0]
    run = by_hand(tmp_path / "run", {0: STAGE_0, 1: STAGE_1, 2: late}, mesh__p=3)
    with opened(run) as recorded:
        passes = StepPasses(recorded)
    assert passes.ranks == {0: 2, 1: 1}
    assert_rows(passes.measured(1), MEASURED)


def test_split_backward_passes_have_separate_costs(tmp_path):
    events = {
        0: [event("F0", 0, 2), event("B0", 10, 4), event("W0", 20, 1), event("1F0", 30, 6)]
        + [event("1B0", 40, 8), event("1W0", 50, 3)]
    }
    run = by_hand(tmp_path / "run", events, parallel__chunks=2, parallel__schedule="zb-v")
    with opened(run) as recorded:
        config, rows = configuration(recorded), StepPasses(recorded).measured(1)
    # a microbatch in a stage is both chunks: 2 + 6, 4 + 8, 1 + 3
    assert simulated(config, 1, rows).cost == pytest.approx((8e-3, 12e-3, 4e-3, 0))


def test_missing_or_changed_schedule_file_is_not_simulated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.csv"
    file.write_text("F0,F1,BW0,BW1\nF0,BW0,F1,BW1\n")
    sizes = SIZES | {"parallel__schedule": "csv:mine.csv"}
    run = by_hand(tmp_path / "run", {0: STAGE_0, 1: STAGE_1}, **sizes)

    def observed():
        with opened(run) as recorded:
            return pipeline_of_step(recorded, 1)

    rows, *_, panels = observed()
    assert rows == [pytest.approx(row) for row in TABLE] and len(panels) == 2
    file.write_text("F0,F1,B0,W0,B1,W1\nF0,F1,B0,W0,B1,W1\n")
    assert len(observed()[-1]) == 1
    file.unlink()
    rows, *_, panels = observed()
    assert rows[0]["idle_share"] == pytest.approx(0.52)
    assert rows[0]["idle_share_simulated"] is rows[0]["in_flight_simulated"] is None
    assert [title for title, _ in panels] == [
        "measured: schedule csv:mine.csv, step 1, idle 48.0%"
    ]


def test_overlapping_steps_are_clipped_to_the_shown_step(tmp_path):
    """Step 1 of 2BW lasts from 0 to 40 ms; passes of adjacent steps are clipped at these times."""
    rows = [
        [(-9, 2, "BW1", 0), (2, 6, "F3", 1), (6, 30, "BW2", 1), (30, 38, "F4", 1)],
        [(0, 4, "F2", 1), (4, 40, "BW3", 1), (40, 42, "F4", 2), (-20, -1, "F1", 0)],
    ]
    rows[0] += [(38, 50, "BW3", 2)]
    events = {
        stage: [event(text, start, end - start, step=step) for start, end, text, step in row]
        for stage, row in enumerate(rows)
    }
    steps, sizes = (0, 1, 2), SIZES | {"parallel__schedule": "pipedream-2bw"}
    run = by_hand(tmp_path / "run", events, steps, (50, 50, 50), **sizes)
    with opened(run) as recorded:
        table, *_, ((_, measured), _) = pipeline_of_step(recorded, 1)
    found = [[(span.start * 1e3, span.end * 1e3, span.label) for span in row] for row in measured]
    assert found == [
        [pytest.approx(span) for span in row]
        for row in (
            [(0, 2, "1"), (2, 6, "3"), (6, 30, "2"), (30, 38, "4"), (38, 40, "3")],
            [(0, 4, "2"), (4, 40, "3")],
        )
    ]
    assert [row["passes"] for row in table] == [3, 2], "those of the step itself"
    assert [row["idle_share"] for row in table] == pytest.approx([0, 0], abs=1e-9)


def test_cpu_time_run_has_no_pipeline_table(tmp_path):
    run = by_hand(tmp_path / "run", {0: STAGE_0, 1: STAGE_1}, **SIZES, trace__clock="cpu")
    with opened(run) as recorded:
        assert pipeline_of_step(recorded, 1) == ([], [], [], [])


@pytest.mark.parametrize(
    ("durations", "median"),
    [([9], 0), ([1, 9], 1), ([90, 3, 1, 2], 3), ([1, 8, 9, 7, 6], 3)],
)
def test_median_step_excludes_the_first_step(tmp_path, durations, median):
    steps = range(len(durations))
    run = by_hand(tmp_path / "run", {0: STAGE_0, 1: STAGE_1}, steps, durations, **SIZES)
    with opened(run) as recorded:
        assert median_step(Steady(recorded)) == median


def reported(capsys, *arguments):
    assert report.main([*map(str, arguments), "--json", "--figures", "png"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_report_has_the_pipeline_table_and_figure(hand, capsys):
    (result,) = reported(capsys, hand)["runs"]
    assert result["pipeline"] == [pytest.approx(row) for row in TABLE]
    text = (hand / "report" / "report.md").read_text()
    for line in (
        "| stage | ranks | passes | F [ms] | BW [ms] |  idle | idle, ideal | in flight |",
        "|     0 |     1 |      4 |   8.00 |    16.0 | 52.0% |       33.3% |         2 |",
        "|     1 |     1 |      4 |   4.00 |    24.0 | 44.0% |       33.3% |         1 |",
        "Passes of step 1 on the first rank of each stage",
        "![Pipeline of 1f1b, p=2](figures/pipeline.png)",
    ):
        assert line in text
    assert "B [ms] |" not in text and "W [ms]" in text
    figures, tables = (hand / "report" / name for name in ("figures", "tables"))
    assert (figures / "pipeline.png").read_bytes().startswith(b"\x89PNG")
    with (tables / "pipeline.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["run"], first["stage"], second["stage"]) == ("1f1b, p=2", "0", "1")
    assert float(first["idle_share"]) == pytest.approx(0.52) and first["input_s"] == ""


@pytest.mark.slow
def test_pipeline_figures_of_several_runs_are_numbered(hand, tmp_path, capsys):
    other = by_hand(tmp_path / "other", {0: STAGE_0, 1: STAGE_1}, **SIZES | {"seed": 5})
    plain = by_hand(tmp_path / "plain", {0: STAGE_0[:1]}, parallel__scheme="1d")
    out = tmp_path / "out"
    result = reported(capsys, hand, plain, other, "--out", out)
    assert [len(run["pipeline"]) for run in result["runs"]] == [2, 0, 2]
    assert sorted(path.stem for path in (out / "figures").glob("pipeline*.png")) == [
        *("pipeline-1", "pipeline-3")
    ]
    text = (out / "report.md").read_text()
    assert text.count("### Pipeline\n") == 2
    assert "(figures/pipeline-1.png)" in text and "(figures/pipeline-3.png)" in text
    assert len((out / "tables" / "pipeline.csv").read_text().splitlines()) == 1 + 4


@pytest.mark.slow
def test_run_without_stages_has_no_pipeline_table_or_figure(tmp_path, capsys):
    plain = by_hand(tmp_path / "plain", {0: STAGE_0[:1]}, parallel__scheme="1d")
    assert reported(capsys, plain)["runs"][0]["pipeline"] == []
    assert not [*(plain / "report").rglob("pipeline.*"), *(plain / "report").rglob("bubble.*")]
    assert "ipeline" not in (plain / "report" / "report.md").read_text()


def test_missing_stage_is_omitted(hand, capsys):
    segment_path(hand, 1, 0).unlink()
    (result,) = reported(capsys, hand, "--merge")["runs"]
    assert [(row["stage"], row["passes"]) for row in result["pipeline"]] == [(0, 4)]


def test_recomputation_belongs_to_the_backward_pass(tmp_path):
    """Stage 1 recomputes for 2 ms before each B, and for 1 ms in the middle of the second one."""
    again = {"phase": "recompute"}
    rows = [
        event("F0", 0, 4),
        event("F1", 4, 4),
        event("B0", 10, 2, **again),
        event("B0", 12, 4),
        event("W0", 16, 2),
        event("B1", 20, 2, **again),
        event("B1", 22, 2),
        event("B1", 24, 1, **again),
        event("B1", 25, 3),
        event("W1", 28, 2),
    ]
    path = by_hand(tmp_path / "run", {0: rows, 1: []}, **SIZES | {"parallel__schedule": "zb-h1"})
    with opened(path) as recorded:
        (row, *_) = StepPasses(recorded).measured(1)
    assert [(round(a * 1e3), round(b * 1e3), str(what)) for a, b, what in row] == [
        (0, 4, "F0"),
        (4, 8, "F1"),
        (10, 16, "B0"),
        (16, 18, "W0"),
        (20, 28, "B1"),
        (28, 30, "W1"),
    ]


@pytest.mark.filterwarnings("error::UserWarning", "error::DeprecationWarning")
def test_pipeline_figure_has_two_panels_on_one_time_axis(hand):
    with opened(hand) as recorded:
        *_, panels = pipeline_of_step(recorded, 1)
    measured, ideal = gantt(panels).axes
    assert measured.get_title(loc="left").startswith("measured")
    assert ideal.get_title(loc="left").startswith("simulated")
    assert measured.get_xlim() == ideal.get_xlim() == pytest.approx((0, 0.05))
    for panel in (measured, ideal):
        assert len([path for bars in panel.collections for path in bars.get_paths()]) == 8
