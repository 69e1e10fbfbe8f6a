"""Trackers receive every record in the background; whatever they do, the run continues."""

import sys
import threading
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from hpc3d.runtime import trackers
from hpc3d.runtime.metrics_file import MetricsFile, sinks_of
from hpc3d.runtime.trackers import GROUP, InBackground, MLflow, WandB, trackers_of
from hpc3d.train import read_command_line
from tests.runs import wait_for


class Recording:
    """Tracker that stores all calls, and fails in one of them if asked."""

    fails_in, made = None, []

    def __init__(self, folder, settings):
        self.calls = [("settings", dict(settings))]
        Recording.made.append(self)
        self.fail("init")

    def fail(self, where):
        if self.fails_in == where:
            raise SystemExit(where)  # as a package that calls sys.exit

    def write(self, record):
        self.calls.append((record["step"], record["loss"], threading.current_thread()))
        self.fail("write")

    def close(self):
        self.calls.append("closed")
        self.fail("close")


@pytest.fixture
def installed(monkeypatch):
    """Provide the tracker `recording` by an entry point, as another package does."""
    monkeypatch.setattr(Recording, "made", [])
    value = f"{__name__}:Recording"
    points = [EntryPoint("recording", value, GROUP), EntryPoint("broken", "nowhere:X", GROUP)]
    monkeypatch.setattr(trackers, "entry_points", lambda group: points if group == GROUP else [])


def recorded(tmp_path, steps=3):
    """Return the messages of a run with the tracker `recording`."""
    said = []
    sinks = sinks_of(None, ["recording"], tmp_path, {"train.steps": steps})
    metrics = MetricsFile(tmp_path, 0, sinks, said.append)
    for step in range(steps):
        metrics.write(step=step, loss=2.0)
    metrics.end()
    metrics.end()
    metrics.file.close()
    return said


def test_tracker_of_an_entry_point_receives_every_record_on_another_thread(installed, tmp_path):
    assert recorded(tmp_path) == []
    (tracker,) = Recording.made
    settings, *records, closed = tracker.calls
    assert settings == ("settings", {"train.steps": 3}) and closed == "closed"
    assert [record[:2] for record in records] == [(0, 2.0), (1, 2.0), (2, 2.0)]
    assert all(record[2] is not threading.main_thread() for record in records)


@pytest.mark.parametrize("where", ["init", "write", "close"])
def test_failing_tracker_is_reported_once_and_the_run_continues(
    where, installed, tmp_path, monkeypatch
):
    monkeypatch.setattr(Recording, "fails_in", where)
    (line,) = recorded(tmp_path)
    assert f"Recording: SystemExit: {where}; this metrics sink is disabled" in line
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3


def test_hanging_tracker_delays_neither_the_steps_nor_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "_CLOSING", 0.05)
    monkeypatch.setattr(trackers, "_WAITING", 2)
    never, begun = threading.Event(), threading.Event()

    def hang(record):
        begun.set()
        never.wait(60)

    kind = lambda **given: SimpleNamespace(write=hang, close=int)  # noqa: E731
    kind.__name__ = "Hanging"
    sink = InBackground(kind, tmp_path, {})
    sink({"step": 0})
    assert begun.wait(60)
    sink({"step": 1})
    with pytest.raises(TimeoutError, match=r"Hanging did not receive all records within 0\.05 s"):
        sink.close()
    with pytest.raises(TimeoutError, match="Hanging does not accept records"):
        sink({"step": 2})
    never.set()


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (["nothing"], r"run.trackers: no tracker is called 'nothing'; use broken, mlflow, recor"),
        (["broken"], r"run.trackers: broken \(nowhere:X\) cannot be imported \(ModuleNotFound"),
    ],
)
def test_unavailable_tracker_is_rejected_in_one_line(names, line, installed):
    with pytest.raises(ValueError, match=line):
        trackers_of(names)


def test_train_rejects_an_unknown_tracker_before_it_starts():
    with pytest.raises(
        ValueError, match="no tracker is called 'nothing'; use mlflow, tensorboard"
    ):
        read_command_line(1, ["--run.trackers", '["nothing"]'])


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_tracker_without_its_package_is_rejected(name, monkeypatch):
    monkeypatch.setattr("hpc3d.runtime.optional_packages.find_spec", lambda package: None)
    with pytest.raises(ValueError, match=rf"^run.trackers = {name} .*'hpc3d\[{name}\]'$"):
        trackers_of([name])


RECORDS = [
    {"step": 0, "loss": 2.5, "gradient_norm": None, "time": 1e9},
    {"step": 1, "loss": 2.25, "gradient_norm": 1.5, "time": 1e9 + 1},
]


def test_mlflow_stores_metrics_and_settings_without_a_server(tmp_path, monkeypatch):
    client = pytest.importorskip("mlflow", reason="extra mlflow").MlflowClient
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    settings = {f"section.key{number}": number for number in range(120)}
    tracker = MLflow(tmp_path, settings)
    for record in RECORDS:
        tracker.write(record)
    tracker.close()
    stored = client(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = stored.search_runs([stored.get_experiment_by_name("hpc3d").experiment_id])
    assert run.info.run_name == tmp_path.name and run.info.status == "FINISHED"
    assert run.data.params == {key: str(value) for key, value in settings.items()}
    history = stored.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == [(0, 2.5), (1, 2.25)]
    assert run.data.metrics == {"loss": 2.25, "gradient_norm": 1.5}


def test_mlflow_receives_only_names_that_it_allows(tmp_path, monkeypatch):
    package = Mock()
    package.entities.Metric = lambda key, value, *at: (key, value)
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", package.entities)
    MLflow(tmp_path, {}).write({"step": 0, "time": 1e9, "validation_loss/a-b (1),ü.txt": 2.5})
    sent = package.MlflowClient.return_value.log_batch.call_args.kwargs["metrics"]
    assert sent == [("validation_loss/a-b _1__ü.txt", 2.5)]


def test_wandb_stores_the_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="extra wandb")
    for variable in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    tracker = WandB(tmp_path, {"train.steps": 2})
    for record in RECORDS:
        tracker.write(record)
    tracker.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    wait_for(lambda: b"gradient_norm" in file.read_bytes())  # another process writes it
