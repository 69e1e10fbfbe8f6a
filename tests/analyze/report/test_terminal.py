"""What `report` prints: a dozen lines."""

from dataclasses import replace

import pytest

from hpc3d.analyze.report.run_analysis import analyze_run, compare
from hpc3d.analyze.report.terminal import lines
from hpc3d.analyze.report.verdict import verdict
from tests.analyze.small import small


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with small(tmp_path_factory.mktemp("run") / "trace.h5") as trace:
        run = analyze_run(trace)
        return run, compare([trace], [run]), compare([trace] * 2, [run] * 2)


def test_a_run_has_its_verdict_and_its_numbers(found):
    run, report, _ = found
    said = lines(report)
    assert said[0] == run.label and said[1 : 1 + len(verdict(run.tables))] == verdict(run.tables)
    assert any(line.startswith("step: 10.0 ms") for line in said)
    assert len(said) <= 12


def test_what_a_trace_lacks_is_told(found):
    run, report, _ = found
    gaps = report._replace(runs=[replace(run, missing=["a", "b"], violations=["c"])])
    said = lines(gaps)
    assert (
        "the trace, missing: a, and 1 more" in said
        and said[-1] == "the trace, contradicts itself: c"
    )


def test_ranks_that_take_turns_are_told(found):
    run, report, _ = found
    turns = "2 for 8 ranks a host: they take turns, so times are longer than on a core each"
    crowded = replace(run, about=run.about | {"cores": turns})
    assert f"cores: {turns}" in lines(report._replace(runs=[crowded]))
    assert not any(line.startswith("cores") for line in lines(report))


def test_several_runs_have_a_line_each(found):
    *_, both = found
    said = lines(both)
    assert "to the last bit" in said[1]
    assert len(said) == 4 and all(": step 10.0 ms" in line for line in said[2:])
    assert len(lines(both._replace(runs=both.runs * 10))) == 12


def test_what_runs_differ_in_is_a_line_a_group(found):
    *_, both = found
    keys = {f"train.{letter}": "1 in one; 2 in other" for letter in "abcdefgh"}
    said = lines(both._replace(notes=[], differing={"work": keys, "layout": {}}))
    short = ", ".join([*keys][:6])
    assert said[0] == f"work differs: {short} and 2 more" and "layout differs" not in str(said)
