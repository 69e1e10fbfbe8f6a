"""Results of points: measured and simulated rows."""

import pytest

from hpc3d.config.load import load
from hpc3d.library.launched_run import launched
from hpc3d.studies.sweep_points import COLUMNS, points_of
from hpc3d.studies.sweep_results import finished, row_of, simulate, write_input
from tests.library.tiny import MODEL
from tests.mpi import JOB_LOCK


def test_input_file_contains_the_labels_of_the_point(tmp_path):
    study = tmp_path / "study.toml"
    study.write_text(
        "[sweep]\nranks = 2\nseed = [1, 2]\n"
        'layouts = [{ label = "1-D, ours", parallel.scheme = "1d" }, { mesh.d = 2 }]\n'
        'decays = [{ label = "flat", train.decay = "constant" }]\n'
    )
    labels = [load(write_input(each, tmp_path), []).run.label for each in points_of(study, [])]
    assert labels == ["1-D, ours, flat", "d=2, flat"] * 2
    study.write_text('[run]\nlabel = "mine"\n[sweep]\nranks = 2\nseed = 1\n')
    (point,) = points_of(study, [])
    assert load(write_input(point, tmp_path), []).run.label == "mine"


@pytest.mark.slow
def test_measured_row_equals_the_simulated_row(tmp_path):
    """Compare bytes and memory for ranks that receive different numbers of bytes."""
    study = tmp_path / "study.toml"
    study.write_text(
        "[sweep]\nranks = 4\nmesh.p = 2\nmesh.d = 2\ntrain.steps = 8\ntrain.eval_every = 8\n"
    )
    sizes = MODEL | {"model.layers": 2, "train.batch": 8, "data.validation": 0.01}
    words = [f"--{key}={value}" for key, value in sizes.items()]
    (point,) = points_of(study, words)
    with JOB_LOCK:
        launched(point.ranks, [str(write_input(point, tmp_path))])
    trained, path = point, finished(point, tmp_path)
    measured = row_of(trained, path)
    (point,) = points_of(study, [*words, "--sweep.machine", "h100"])
    simulate(point, tmp_path)
    simulated = row_of(point, finished(point, tmp_path))
    for key in ("received_bytes", "peak_bytes"):
        assert measured[key] == simulated[key] > 0
    assert measured["step_s_low"] <= measured["step_s"] <= measured["step_s_high"]
    assert measured["loss"] > 0 < measured["validation_loss"]
    assert {*measured} - {*point.settings, "seed"} <= COLUMNS

    path.write_bytes(path.read_bytes()[:-1000])
    assert finished(trained, tmp_path) is None  # a damaged trace is written again
