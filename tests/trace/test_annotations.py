"""Data added to a merged trace: calibration and prediction."""

import h5py
import pytest

import hpc3d.trace
from hpc3d.trace.annotations import Calibration, write_calibration, write_prediction
from hpc3d.trace.merge import merge


def calibration(first, alpha):
    rows = {"bytes": [first, 2 * first], "t_min": [0.1, 0.2], "t_median": [0.2, 0.3]}
    return Calibration({**rows, "t_p95": [0.25, 0.35], "reps": [100, 50]}, alpha, 1e-9)


MEASURED = {("all_gather", "x"): calibration(64, 2e-6), ("send", "p"): calibration(8, 3e-6)}
PREDICTED = {
    "step": [-1, 4],
    "quantity": ["step_s", "peak_bytes"],
    "stage": [-1, 1],
    "rank": [-1, 3],
    "value": [0.25, 1e9],
}


def supplements(path):
    """Return the calibration, the prediction and its machine in a file, as plain values."""
    with hpc3d.trace.open(path) as trace:
        measured = {
            key: (
                {name: values.tolist() for name, values in table.columns().items()},
                table.attrs["alpha"],
                table.attrs["beta"],
            )
            for key, table in trace.calibration.items()
        }
        predicted = {name: values.tolist() for name, values in trace.prediction.columns().items()}
        assert len(trace.events["dur"]) == 48
        return measured, predicted, trace.prediction.attrs.get("machine", "")


def test_file_without_annotations_has_none(path):
    assert supplements(path) == ({}, {}, "")


def test_calibration_and_prediction_are_added_and_replaced(path):
    write_calibration(path, MEASURED)
    write_prediction(path, PREDICTED, "h100")
    assert supplements(path) == (MEASURED, PREDICTED, "h100")
    newer = {("send", "p"): calibration(16, 4e-6), ("recv", "p"): calibration(32, 5e-6)}
    write_calibration(path, newer)
    write_prediction(path, {name: values[:1] for name, values in PREDICTED.items()}, "a100")
    measured, predicted, machine = supplements(path)
    assert measured == MEASURED | newer
    assert predicted == {name: values[:1] for name, values in PREDICTED.items()}
    assert machine == "a100"


@pytest.mark.parametrize("key", [("melt", "x"), ("send", ""), ("send", "x/y"), ("send", "..")])
def test_calibration_of_an_unknown_call_is_rejected(path, key):
    with pytest.raises(ValueError, match=r"operation .* axis"):
        write_calibration(path, {key: calibration(8, 1e-6)})


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ({"step": [1]}, ".*quantity, stage, rank, value"),
        (PREDICTED | {"value": [1.0]}, ".*lengths"),
        (PREDICTED | {"value": ["fast", "slow"]}, "could not convert"),
    ],
)
def test_failed_write_leaves_the_file_unchanged(path, rows, reason):
    old = path.read_bytes()
    with pytest.raises(ValueError, match=rf"trace\.h5: {reason}.*; nothing was written"):
        write_prediction(path, rows)
    assert path.read_bytes() == old
    assert not [*path.parent.glob("*.tmp")]


@pytest.mark.parametrize("link", [h5py.SoftLink("/events"), h5py.ExternalLink("other.h5", "/")])
def test_nothing_is_written_through_a_link(path, link):
    other = path.with_name("other.h5")
    other.write_bytes(path.read_bytes())
    with h5py.File(path, "r+") as file:
        file["calibration"] = file["prediction"] = link
    old = other.read_bytes()
    with pytest.raises(ValueError, match=r"calibration .*link"):
        write_calibration(path, MEASURED)
    write_prediction(path, PREDICTED)  # in place of the link
    assert other.read_bytes() == old
    with hpc3d.trace.open(path) as trace:
        assert trace.prediction["value"].tolist() == PREDICTED["value"]


def test_merge_keeps_the_annotations_of_the_same_run(path):
    write_calibration(path, MEASURED)
    write_prediction(path, PREDICTED, "h100")
    merge(path.parent)
    assert supplements(path) == (MEASURED, PREDICTED, "h100")
    with h5py.File(path, "r+") as file:
        file.attrs["run_id"] = "another"
    merge(path.parent)
    assert supplements(path) == ({}, {}, "")
