"""Steps that are included in averages."""

import pytest

from hpc3d.analyze.metrics.columns import cells
from hpc3d.analyze.metrics.steady import Steady, averaged
from hpc3d.analyze.metrics.step import slowest_seconds
from hpc3d.analyze.report.run_analysis import analyze_run
from tests.analyze.synthetic import by_hand, row


def run_of(path, steps, **attributes):
    """Return a run of two ranks with steps of 90 ms, 10 ms, 10 ms, ..."""
    times = {
        (rank, step): (100 * place, 100 * place + (10 if place else 90))
        for rank in (0, 1)
        for place, step in enumerate(steps)
    }
    rows = [row(rank, start, end, step=step) for (rank, step), (start, end) in times.items()]
    return by_hand(path, rows, times, **attributes)


@pytest.mark.parametrize(
    ("steps", "kept", "said"),
    [
        ([0], [90], "only the warmup step 0; train for more steps to exclude it"),
        ([0, 1], [10], "over step 1, without the warmup step 0"),
        (
            [4, 5, 6],  # of a run that went on, on other ranks
            [10, 10],
            "over steps 5 to 6, without the warmup step 4",
        ),
    ],
)
def test_averages_skip_the_first_step_if_there_are_others(tmp_path, steps, kept, said):
    with run_of(tmp_path / "t.h5", steps) as trace:
        steady = Steady(trace)
        assert slowest_seconds(steady).tolist() == pytest.approx([each * 1e-3 for each in kept])
        assert averaged(steady) == said
        assert (cells(steady) >= 0).sum() == 2 * len(kept)
        assert len(trace.steps) == 2 * len(steps)


def test_report_means_exclude_the_first_step(tmp_path):
    with run_of(tmp_path / "t.h5", [0, 1, 2]) as trace:
        found = analyze_run(trace).tables
    assert (found["step"][0]["step_s_max"], found["step"][0]["steps"]) == (pytest.approx(0.01), 2)
    for name, key in (("time", "seconds"), ("ranks", "step_s"), ("layers", "seconds")):
        assert found[name][0][key] == pytest.approx(0.01), name
    assert found["imbalance"][0]["mean_s"] == pytest.approx(0.01)
    assert found["efficiency"][0]["step_s"] == pytest.approx(0.01)
    assert [each["step"] for each in found["loss"]] == [0, 1, 2]


def test_first_step_can_be_selected_for_the_timeline(tmp_path):
    with run_of(tmp_path / "t.h5", [0, 1, 2]) as trace:
        assert analyze_run(trace).step == 1
        assert sum(each["seconds"] for each in analyze_run(trace, step=0).tables["path"]) == (
            pytest.approx(0.09)
        )


def test_simulated_step_has_no_warmup(tmp_path):
    with run_of(tmp_path / "t.h5", [0], kind="simulated") as trace:
        assert averaged(Steady(trace)) == "of the simulated step"
