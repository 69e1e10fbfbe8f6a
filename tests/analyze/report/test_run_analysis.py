"""The report of small runs, compared with known values."""

import csv
import math
from types import SimpleNamespace

import h5py
import pytest

from hpc3d import report
from hpc3d.analyze.metrics.step import comparison_rows
from hpc3d.analyze.report.run_analysis import analyze_run
from hpc3d.trace.segment import segment_path
from tests.analyze import traces
from tests.analyze.report.by_hand import CUT_OFF, WITHOUT_RANK_1, limits, reported, write_run
from tests.analyze.small import small
from tests.analyze.synthetic import call
from tests.strided import strided

# category, phase, axis, op: us, calls, bytes, flop, flop/s; means over 4 ranks and 2 steps
TIME = {
    # 600 less 300 of the product and 115 of the gather
    ("host", "forward", "", "none"): (185, 1, 0, 0, 0),
    ("compute", "forward", "", "gemm"): (300, 1, 0, 6e5, 2e9),
    ("compute", "backward", "", "gemm"): (400, 2, 0, 8e5, 2e9),
    # 100, 110, 120, 130
    ("comm", "forward", "x", "all_gather"): (115, 1, 4000, 0, 0),
    ("comm", "backward", "y", "reduce_scatter"): (25, 0.5, 500, 0, 0),
    ("wait", "backward", "y", "reduce_scatter"): (20, 1, 0, 0, 0),
    # the mean step of 1650 less all of the above
    ("unrecorded", "", "", ""): (605, 0, 0, 0, 0),
}


def test_time_by_phase_axis_and_operation(run, capsys):
    rows = reported(capsys, run)["runs"][0]["time"]
    keys = ("category", "phase", "axis", "op")
    assert {tuple(row[key] for key in keys) for row in rows} == TIME.keys()
    for row in rows:
        us, calls, received, flop, rate = TIME[tuple(row[key] for key in keys)]
        assert row["seconds"] == pytest.approx(us * 1e-6)
        assert row["share"] == pytest.approx(us / 1650)
        assert (row["calls"], row["bytes"], row["flop"]) == (calls, received, flop)
        assert row["flop_per_s"] == pytest.approx(rate)


def test_step_memory_and_loss_tables(run, capsys):
    (result,) = reported(capsys, run)["runs"]
    assert result["step"] == [
        pytest.approx(
            {
                "ranks": 4,
                "steps": 2,
                "first": 1,
                "last": 2,
                "step_s_min": 1.3e-3,
                "step_s_25": 1.55e-3,
                "step_s_median": 1.8e-3,
                "step_s_75": 2.05e-3,
                "step_s_max": 2.3e-3,
                "forward_s": 2.5e-3,
                "backward_s": 2e-3,
                "tokens_per_s": 1e6,
                "communication_share": (115 + 25 + 20) / 1650,
                "communication_calls": 1.5,
                "communication_bytes": 4500,
            }
        )
    ]
    assert result["memory"] == [
        {"kind": "parameter", "peak": 103, "rank": 3},
        {"kind": "activation", "peak": 5000, "rank": 0},
    ]
    assert [row["loss"] for row in result["loss"]] == [4.0, 3.5, 3.25]
    assert result["about"]["averages"] == ("over steps 1 to 2, without the warmup step 0")


def test_run_with_one_step_reports_the_warmup_step(tmp_path, capsys):
    (result,) = reported(capsys, write_run(tmp_path / "one", losses=(4.0,)))["runs"]
    (step,) = result["step"]
    assert (step["steps"], step["first"], step["last"]) == (1, 0, 0)
    assert step["step_s_median"] == pytest.approx(9.3e-3)
    assert result["about"]["averages"] == (
        "only the warmup step 0; train for more steps to exclude it"
    )


def test_traffic_table_lists_bytes_between_ranks(run, capsys):
    """Each gather along x receives 4000 B from the other member; 1000 B along y in one step."""
    (result,) = reported(capsys, run)["runs"]
    pairs = [(axis, rank, rank ^ bit) for axis, bit in (("x", 2), ("y", 1)) for rank in range(4)]
    assert [tuple(row.values()) for row in result["traffic"]] == [
        (*pair, 4000 if pair[0] == "x" else 500) for pair in pairs
    ]


# Its four gathers along x with rank 3, and its reduce-scatter along y with rank 0.
def test_missing_segment_is_reported(run, capsys):
    segment_path(run, 1, 0).unlink()
    assert reported(capsys, run)["runs"][0]["missing"] == WITHOUT_RANK_1
    assert "* rank 1: no segment" in (run / "report" / "report.md").read_text()


def test_losses_are_compared_at_the_last_common_step(tmp_path, capsys):
    """Step 2 is the last common step of all runs, and step 3 that of the two longer runs."""
    longer, other = (
        write_run(tmp_path / f"{seed}", losses=(4.0, 3.5, 3.0, loss), keys=f"seed = {seed}\n")
        for seed, loss in ((1, 2.5), (2, 2.0))
    )
    out = tmp_path / "out"
    short = write_run(tmp_path / "short", scheme="1d")
    found = reported(capsys, longer, other, short, "--out", out)
    rows, (seeds,) = found["comparison"], found["seeds"]
    assert [(row["loss_step"], row["loss"]) for row in rows] == [(2, 3.0), (2, 3.0), (2, 3.25)]
    assert (seeds["loss_step"], seeds["loss"]) == (2, 3.0)
    assert limits(found) == [
        "1d, x=2 y=2: the last step is 2, so the losses of all runs are compared there"
    ]
    for name in ("runs", "seeds"):
        assert "loss after step" in (out / "tables" / f"{name}.tex").read_text()
    assert "the last step is" not in str(reported(capsys, longer, other)["notes"])
    rows = reported(capsys, longer, write_run(tmp_path / "one", scheme="1d", keys="seed = 1\n"))
    keys = "loss_difference", "difference_step"
    assert [[row[key] for key in keys] for row in rows["comparison"]] == [[0, 3], [0.25, 2]]


def test_sent_bytes_do_not_count_as_received(tmp_path, capsys):
    """A rank sends 7000 bytes to another rank, which receives them."""
    rows = [
        call(0, "send", 4, 5, seq=0, peer=1, bytes=7000, count=1750, posted=4),
        call(1, "recv", 4, 6, seq=0, peer=0, bytes=7000, posted=4),
    ]
    small(tmp_path / "trace.h5", rows).close()
    (found,) = reported(capsys, tmp_path / "trace.h5")["runs"]
    assert found["step"][0]["communication_bytes"] == 3500
    assert {row["op"]: row["bytes"] for row in found["time"] if row["category"] == "comm"} == {
        "send": 0,
        "recv": 3500,
    }


def test_comparison_of_two_runs(run, tmp_path, capsys):
    other = write_run(tmp_path / "other", scheme="1d", losses=(4.0, 3.5, 3.125))
    out = tmp_path / "comparison"
    found = reported(capsys, run, other, "--out", out)
    first, second = found["comparison"]
    assert (first["run"], second["run"]) == ("3d (shards only m and n), x=2 y=2", "1d, x=2 y=2")
    assert (first["loss"], first["loss_difference"]) == (3.25, 0)
    assert (second["loss"], second["loss_difference"]) == (3.125, 0.125)
    assert [row["speedup"] for row in found["scaling"]] == [1, 1]
    assert {row["run"] for row in found["differences"]} == {"1d, x=2 y=2"}
    whole, *_ = found["received"]
    assert (whole["bytes_1"], whole["bytes_2"], whole["difference_2"]) == (4500, 4500, 0)
    assert whole["bytes_1"] == first["communication_bytes"]
    with (out / "tables" / "ranks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"][:2], row["rank"]) for row in rows] == [
        (run, rank) for run in ("3d", "1d") for rank in "0123"
    ]
    assert (out / "tables" / "ranks.tex").read_text().count("1d, x=2 y=2 & ") == 4
    assert not (run / "report").exists()


def test_index_outside_its_table_is_rejected(run, capsys):
    assert report.main([str(run), "--tables"]) == 0
    with h5py.File(run / "trace.h5", "r+") as file:
        file["events/group"][0] = 4
    assert report.main([str(run), "--tables"]) == 2
    assert "events/group contains an invalid row index" in capsys.readouterr().err


def test_run_without_a_completed_step_is_rejected(tmp_path, capsys):
    run = write_run(tmp_path / "short", losses=())
    assert report.main([str(run)]) == 2
    assert "no step was completed" in capsys.readouterr().err


@pytest.mark.slow
def test_report_merges_segments_written_since_the_last_merge(run, capsys):
    """New segments are merged even if data was added to the trace after they were written."""
    late = segment_path(run, 3, 0)
    late.rename(run / "late")
    assert "rank 3: no segment" in reported(capsys, run)["runs"][0]["missing"]
    (run / "late").rename(late)
    (run / "trace.h5").touch()
    assert reported(capsys, run)["runs"][0]["missing"] == CUT_OFF
    before = (run / "trace.h5").stat().st_mtime_ns
    reported(capsys, run)
    assert (run / "trace.h5").stat().st_mtime_ns == before, "merged again for nothing"


COUNTED = ("category", "phase", "axis", "op", "calls", "bytes", "flop")
LAYOUTS = {
    "1f1b": {"mesh__p": 2, "mesh__x": 2, "parallel__microbatches": 4},
    "zb-v": {"mesh__p": 2, "parallel__schedule": "zb-v", "parallel__microbatches": 4},
    "pipedream-2bw": {
        **{"mesh__p": 2, "parallel__schedule": "pipedream-2bw", "parallel__microbatches": 4}
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", strided(LAYOUTS, 3))
def test_evaluation_does_not_change_the_analysis_of_a_step(name, tmp_path):
    """Calls, bytes, operations, passes and microbatches in flight do not change."""
    layout = LAYOUTS[name]
    ranks = layout["mesh__p"] * layout.get("mesh__x", 1)
    found, expected = (
        _analysed(traces.trained(tmp_path / str(evaluate), ranks, evaluate, **layout))
        for evaluate in (True, False)
    )
    mine, others = (
        [{key: row[key] for key in COUNTED} for row in run.tables["time"]]
        for run in (found, expected)
    )
    times = "copy", "unrecorded"  # a call is a row of category copy where it took long
    mine, others = (
        [row for row in rows if row["category"] not in times] for rows in (mine, others)
    )
    assert _sorted(mine) == _sorted(others)
    assert found.violations == expected.violations == [] and not found.missing
    for table, key in (("pipeline", "in_flight"), ("efficiency", "recorded_flop")):
        mine, others = ([row[key] for row in run.tables[table]] for run in (found, expected))
        assert mine == others
    assert _sorted(found.tables["traffic"]) == _sorted(expected.tables["traffic"])
    assert found.tables["between"] == expected.tables["between"] == []
    evaluations = found.tables["evaluation"]
    assert [row["step"] for row in evaluations] == [*range(traces.STEPS)]
    for row in evaluations:
        assert row["tokens"] == 2 * 24 * 4 and row["seconds"] > 0 and 0 <= row["accuracy"] < 1
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert not expected.tables["evaluation"]


def _sorted(rows):
    return sorted(map(str, rows))


def _analysed(folder):
    with traces.opened(folder) as trace:
        return analyze_run(trace)


def test_comparison_shows_the_last_common_evaluation_and_the_best_one_up_to_it():
    """All runs have steps 0 to 2. They were evaluated after other steps, or not at all."""

    def run(evaluations, steps=3):
        rows = [{"step": step, "loss": loss} for step, loss in evaluations.items()]
        trained = [{"step": step, "loss": 1.0} for step in range(steps)]
        tables = {"loss": trained, "step": [{}], "evaluation": rows, "memory_ranks": []}
        return SimpleNamespace(label="", tables=tables)

    runs = [run({0: 2.0, 1: 2.5, 3: 1.0}, 4), run({}), run({1: None, 2: 3.0, 3: 1.0}, 4)]
    found = comparison_rows(runs, dict.fromkeys(range(3), 0))
    keys = "validation_step", "validation_loss", "validation_best"
    assert [tuple(row[key] for key in keys) for row in found] == [
        (1, 2.5, 2.0), (1, None, None), (1, None, None),
    ]  # fmt: skip
    (row,) = comparison_rows([run({0: 2.0, 2: 1.5})], {0: 0})
    assert tuple(row[key] for key in keys) == (2, 1.5, 1.5)
    assert comparison_rows([run({})], {0: 0})[0]["validation_step"] is None


def test_comparison_repeats_the_warnings_of_each_run(tmp_path, capsys):
    """The second run stopped after step 2, lost a segment, and its last loss is not finite."""
    one = write_run(tmp_path / "one")
    other = write_run(tmp_path / "two", "1d", (4.0, 3.5, math.nan), "[train]\nsteps = 5\n")
    segment_path(other, 1, 0).unlink()
    found = reported(capsys, one, other)
    missing = "missing in the trace: {} (3 more messages: see the report)"
    assert found["runs"][1]["missing"][1] == (
        "steps from 3 on: not trained, because the run has completed 3 of 5 steps"
    )
    lines = [line.rpartition("x=2 y=2: ")[2] for line in found["notes"]]
    assert missing.format("rank 0: the end of step 3") in lines
    assert missing.replace("3 more", "5 more").format("rank 1: no segment") in lines
    assert lines[-1] == "the loss after step 2 is not finite"
    assert report.main([str(other), "--tables"]) == 0
    assert lines[-1] in capsys.readouterr().out


def test_losses_are_compared_with_the_reference_of_each_run():
    losses = [3.0, 3.5, 2.0, 2.25, 4.0]
    tables = [{"loss": [{"step": 0, "loss": loss}], "step": [{}]} for loss in losses]
    rest = {"evaluation": [], "memory_ranks": []}
    runs = [SimpleNamespace(label="", tables=each | rest) for each in tables]
    found = comparison_rows(runs, {0: 0, 1: 0, 2: 2, 3: 2, 4: None})
    assert [row["loss_difference"] for row in found] == [0, 0.5, 0, 0.25, None]
