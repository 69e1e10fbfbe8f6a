"""The short summary that `report` prints."""

from dataclasses import replace

import h5py
import numpy as np
import pytest

from hpc3d import trace
from hpc3d.analyze.metrics.run_summary import CORES_SHARED
from hpc3d.analyze.report import figure_list
from hpc3d.analyze.report.cards import cards
from hpc3d.analyze.report.run_analysis import analyze_run, compare
from hpc3d.analyze.report.terminal import lines
from hpc3d.analyze.report.verdict import verdict
from tests.analyze.small import small
from tests.analyze.synthetic import call, row


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with small(tmp_path_factory.mktemp("run") / "trace.h5") as trace:
        run = analyze_run(trace)
        return run, compare([trace], [run]), compare([trace] * 2, [run] * 2)


def test_summary_of_a_run_has_the_verdict_and_the_step_time(found):
    run, report, _ = found
    said = lines(report)
    assert said[0] == run.label and said[1 : 1 + len(verdict(run.tables))] == verdict(run.tables)
    assert any(line.startswith("step: 10.0 ms") for line in said)
    assert len(said) <= 12


def test_summary_reports_missing_and_inconsistent_data(found):
    run, report, _ = found
    gaps = report._replace(runs=[replace(run, missing=["a", "b"], violations=["c"])])
    said = lines(gaps)
    assert "missing in the trace: a (1 more message: see the report)" in said
    assert said[-1] == "inconsistent trace: c"


def test_summary_reports_shared_cores(found):
    run, report, _ = found
    shared = f"2 for 8 ranks per host: {CORES_SHARED}"
    crowded = replace(run, about=run.about | {"cores": shared})
    assert f"cores: {shared}" in lines(report._replace(runs=[crowded]))
    assert not any(line.startswith("cores") for line in lines(report))


def test_summary_of_several_runs_has_a_line_per_run(found):
    *_, both = found
    said = lines(both)
    assert said[0].endswith("one of them is unknown; losses up to step 0 agree to the last bit")
    assert len(said) == 4 and all(": step 10.0 ms" in line for line in said[2:])
    assert len(lines(both._replace(runs=both.runs * 10))) == 12


def test_summary_has_a_line_per_group_of_differing_keys(found):
    *_, both = found
    keys = {f"train.{letter}": "1 in one; 2 in other" for letter in "abcdefgh"}
    said = lines(both._replace(notes=[], differing={"workload": keys, "layout": {}}))
    short = ", ".join([*keys][:6])
    assert said[1] == f"workload differs: {short} and 2 more" and "layout differs" not in str(said)


def test_summary_of_one_step_has_no_spread_and_no_straggler(found):
    run, report, _ = found
    (line,) = [line for line in lines(report) if line.startswith("step: ")]
    assert "10.0 ms to" not in line and line.endswith(run.about["averages"])
    values = {title: value for title, value, _ in cards(run)}
    assert values["straggler"] == "unknown"


def test_simulated_step_reports_no_loss_and_no_straggler_waits(tmp_path):
    rows = []
    for rank in (0, 1):
        gather = call(rank, "all_gather", 5, 9, seq=0, bytes=1000, count=250, posted=5)
        rows += [row(rank, 0, 5, flops=5e9, layer=0), gather]
    small(tmp_path / "trace.h5", rows, kind="simulated").close()
    with h5py.File(tmp_path / "trace.h5", "r+") as file:
        file["steps/loss"][:] = np.nan
    with trace.open(tmp_path / "trace.h5") as opened:
        run = analyze_run(opened)
        report = compare([opened], [run])
    said = lines(report)
    assert said[1] == "50% of a step is computation; 40% communication calls; 10% unrecorded."
    assert not any("wait" in line or line.startswith("loss") for line in said)
    assert run.tables["stragglers"] == []
    assert report.tables["runs"][0]["loss_step"] is None
    assert "loss" not in {picture.name for picture in figure_list.of_runs(report)}
    assert "stragglers" not in {picture.name for picture in figure_list.of_run(run)}
