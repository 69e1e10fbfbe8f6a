"""The Python functions for training, prediction and planning: values and error messages."""

import numpy as np
import pytest

import hpc3d
from hpc3d.config.load import load
from hpc3d.library import commands
from hpc3d.runtime.mpi_library import MpiInstall
from tests.library.tiny import TINY

SMALL = {"model.hidden": 64, "model.heads": 8, "model.layers": 1, "train.batch": 8}


def test_predict_step_returns_the_step_time():
    found = hpc3d.predict_step(options=SMALL, ranks=4, machine="v100-4x16")
    assert found["ranks"] == 4 and found["machine"] == "v100-4x16"
    assert 0 < found["step_time_s"] < 1 and found["memory"]["fits"]


@pytest.mark.slow
def test_find_layouts_returns_the_fastest_layouts():
    rows = hpc3d.find_layouts("gpt-3d-64", SMALL | {"model.layers": 2}, ranks=4, top=3)
    assert 0 < len(rows) <= 3
    times = [row["step_time_s"] for row in rows]
    assert times == sorted(times)
    best = {f"mesh.{axis}": size for axis, size in rows[0]["layout"]["mesh"].items()}
    assert all(isinstance(size, int) for size in best.values())


def test_find_layouts_raises_the_message_of_plan_if_nothing_fits():
    with pytest.raises(ValueError, match=r"no layout fits in 0\.00 MB .* needs "):
        hpc3d.find_layouts("gpt-serial", 1, TINY, memory=1e3)


def test_python_options_map_to_configuration_values():
    given = {
        "name": "1e3",
        "mesh.x": np.int64(2),
        "parallel.split": {"m": "x"},
        "parallel.offload": ["optimizer"],
        "trace.enabled": False,
        "train.learning_rate": 1e-4,
    }
    config = load(None, commands._words(given))
    assert (config.name, config.mesh.x, config.parallel.split) == ("1e3", 2, {"m": "x"})
    assert [*config.parallel.offload] == ["optimizer"]
    assert (config.trace.enabled, config.train.learning_rate) == (False, 1e-4)


@pytest.mark.slow
def test_run_training_returns_the_opened_run(tmp_path):
    options = SMALL | {"train.steps": 2, "name": "from-python"}
    runs = [hpc3d.run_training(None, options, ranks, tmp_path / str(ranks)) for ranks in (1, 2)]
    one, two = runs
    assert one.losses == pytest.approx(two.losses, abs=1e-5) and len(one.losses) == 2
    assert [record["loss"] for record in two.metrics] == two.losses
    assert two.name.startswith("from-python-")


@pytest.mark.parametrize(
    "call",
    [
        lambda: hpc3d.predict_step("nowhere"),
        lambda: hpc3d.predict_step(options={"train.stepz": 1}, ranks=1),
        lambda: hpc3d.predict_step(options=SMALL, ranks=4, machine="nowhere"),
        lambda: hpc3d.find_layouts("gpt-3d-64", {"train.steps": 0}, 4),
        lambda: hpc3d.find_layouts("gpt-3d-64", {"train.steps": 0}, ranks=4),
        lambda: hpc3d.find_layouts("gpt-3d-64", 4, {"train.steps": 0}),
        lambda: hpc3d.find_layouts("gpt-3d-64", 4, options={"train.steps": 0}),
        lambda: hpc3d.find_layouts("gpt-3d-64", np.int64(4), {}, "nowhere"),
        lambda: hpc3d.run_training("nowhere"),
        lambda: hpc3d.find_layouts("nowhere", 2),
    ],
)
def test_rejected_input_raises_value_error(call):
    with pytest.raises(ValueError, match=r"nowhere|train\.step"):
        call()


def test_missing_mpirun_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    library = MpiInstall("Open MPI", "5.0.8", None)
    monkeypatch.setattr("hpc3d.runtime.mpi_launcher._library", lambda: library)
    with pytest.raises(ValueError, match=r"hpc3d\[mpi\]"):
        hpc3d.run_training(ranks=2)


@pytest.mark.parametrize("given", [{}, {"ranks": 0}, {"ranks": 2.5}, {"ranks": 2, "top": 0}])
def test_find_layouts_requires_integer_counts(given):
    with pytest.raises(ValueError, match="must be a positive integer"):
        hpc3d.find_layouts("gpt-serial", **given)
