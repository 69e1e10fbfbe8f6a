"""A prediction, compared with the measured times of the run in tests.analyze.small."""

import pytest

from hpc3d import trace
from hpc3d.analyze.metrics.prediction import prediction_rows
from hpc3d.analyze.report.run_analysis import analyze_run
from hpc3d.trace.annotations import write_prediction
from tests.analyze.small import MEMORY, small

PREDICTED = [
    # quantity, stage, rank, step: predicted; measured, ratio
    (("step_s", -1, -1, -1, 0.005), 0.010, 0.5),
    (("peak_parameter_bytes", 0, 1, -1, 25.0), 20, 1.25),
    (("peak_all_bytes", 0, 1, -1, 100.0), None, None),
    (("peak_gradient_bytes", 0, 0, -1, 7.0), None, None),
]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "trace.h5"
    small(path).close()
    of_one_step = ("step_s", -1, -1, 3, 1.0)
    rows = [row for row, *_ in PREDICTED] + [of_one_step]
    quantity, stage, rank, step, value = map(list, zip(*rows))
    columns = {"quantity": quantity, "stage": stage, "rank": rank, "step": step, "value": value}
    write_prediction(path, columns, "h100")
    return path


def test_prediction_table_lists_predicted_and_measured_values(path):
    with trace.open(path) as opened:
        rows = prediction_rows(opened)
        shown = analyze_run(opened).tables["prediction"]
    assert shown == rows
    assert [tuple(row.values()) for row in rows] == [
        ("h100", quantity, stage, rank, value, measured and pytest.approx(measured), ratio)
        for (quantity, stage, rank, _, value), measured, ratio in PREDICTED
    ]


def test_peak_of_a_step_outside_the_step_table_is_ignored(tmp_path):
    path = tmp_path / "trace.h5"
    warmup = [row | {"step": 1, "peak": 30} for row in MEMORY]
    small(path, memory=MEMORY + warmup).close()
    columns = zip(("quantity", "stage", "rank", "step", "value"), PREDICTED[1][0])
    write_prediction(path, {key: [value] for key, value in columns})
    with trace.open(path) as opened:
        (row,) = prediction_rows(opened)
    assert (row["measured"], row["ratio"]) == (20, 1.25)


def test_trace_without_a_prediction_has_no_prediction_table(tmp_path):
    with small(tmp_path / "trace.h5") as opened:
        assert prediction_rows(opened) == []


def test_cpu_time_is_not_compared_with_a_predicted_step(tmp_path, path):
    with small(tmp_path / "other.h5", config='[trace]\nclock = "cpu"\n') as opened:
        assert prediction_rows(opened) == []
    columns = {"quantity": ["step_s"], "stage": [-1], "rank": [-1], "step": [-1], "value": [1.0]}
    write_prediction(tmp_path / "other.h5", columns)
    with trace.open(tmp_path / "other.h5") as opened:
        (row,) = prediction_rows(opened)
    assert (row["predicted"], row["measured"], row["ratio"]) == (1.0, None, None)
