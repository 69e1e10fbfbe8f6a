"""Experiment trackers: TensorBoard, MLflow, Weights & Biases, and those of other packages.

A tracker is a class with the methods of `Tracker`. Another package provides one by an entry point
of the group GROUP, and `run.trackers` selects it by the name of the entry point.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from queue import Full, Queue
from typing import Any, ClassVar, Protocol

from hpc3d.runtime.optional_packages import need

GROUP = "hpc3d.trackers"
_WAITING = 10_000  # maximum number of records that a tracker has not received yet
_CLOSING = 30  # timeout in s of a tracker at the end of the run
_NO_METRICS = ("step", "steps", "time")
_Record = Mapping[str, Any]


class Tracker(Protocol):
    """Interface of a tracker, which is created on rank 0 when the run starts or resumes.

    The constructor has the parameters `folder`, the folder of the run, and `settings`, which maps
    each key of the configuration to its value. All methods are called on one background thread.
    """

    def write(self, record: _Record) -> None:
        """Send a record of metrics.jsonl, whose keys are documented in docs/watching.md."""

    def close(self) -> None:
        """Send everything that is still pending."""


class TensorBoard:
    """Tracker that writes event files to the folder `tensorboard` of the run."""

    PACKAGE: ClassVar[str] = "tensorboardX"

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), flush_secs=1)

    def write(self, record: _Record) -> None:
        for key, value in _metrics(record):
            self.writer.add_scalar(key, value, record["step"], record["time"])

    def close(self) -> None:
        self.writer.close()


class MLflow:
    """Tracker for MLflow: the server at MLFLOW_TRACKING_URI, or a database in the run folder."""

    PACKAGE: ClassVar[str] = "mlflow"
    INVALID: ClassVar[re.Pattern[str]] = re.compile(r"[^\w/.\- ]")  # in the name of a metric

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        local = f"sqlite:///{folder / 'mlflow.db'}"
        self.metric, uri = Metric, os.environ.get("MLFLOW_TRACKING_URI", local)
        self.client, name = MlflowClient(uri), os.environ.get("MLFLOW_EXPERIMENT_NAME", "hpc3d")
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        self.run = self.client.create_run(experiment, run_name=folder.name).info.run_id
        params = [Param(key, str(value)) for key, value in settings.items()]
        for start in range(0, len(params), 100):  # the limit of one request
            self.client.log_batch(self.run, params=params[start : start + 100])

    def write(self, record: _Record) -> None:
        at = round(1e3 * record["time"]), record["step"]
        named = ((self.INVALID.sub("_", key), value) for key, value in _metrics(record))
        metrics = [self.metric(key, value, *at) for key, value in named]
        self.client.log_batch(self.run, metrics=metrics)

    def close(self) -> None:
        self.client.set_terminated(self.run)


class WandB:
    """Tracker for Weights & Biases, which stores the run locally unless WANDB_MODE is online."""

    PACKAGE: ClassVar[str] = "wandb"

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "hpc3d"),
            name=folder.name,
            dir=str(folder),
            config=dict(settings),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(console="off", silent=True),
        )

    def write(self, record: _Record) -> None:
        self.run.log(dict(_metrics(record)) | {"training_step": record["step"]})

    def close(self) -> None:
        self.run.finish()


_BUILT_IN: Mapping[str, Any] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def _metrics(record: _Record) -> Iterator[tuple[str, float]]:
    """Yield the names and values of a record that are metrics; null values are omitted."""
    for key, value in record.items():
        if key not in _NO_METRICS and value is not None:
            yield key, value


def trackers_of(names: Iterable[str]) -> dict[str, Any]:
    """Return the classes of the trackers with the given names.

    Raises
    ------
    ValueError
        If a tracker does not exist, cannot be imported, or needs a package that is missing.
    """
    found = {point.name: point for point in entry_points(group=GROUP)}
    kinds = {}
    for name in names:
        if name not in found and name not in _BUILT_IN:
            known = ", ".join(sorted({*found, *_BUILT_IN}))
            raise ValueError(f"run.trackers: no tracker is called {name!r}; use {known}")
        try:
            kinds[name] = found[name].load() if name in found else _BUILT_IN[name]
        except Exception as error:  # importing runs code of another package
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"run.trackers: {name} ({found[name].value}) cannot be imported ({reason}); "
                "reinstall the package or remove the name"
            ) from None
        if package := getattr(kinds[name], "PACKAGE", ""):
            need(f"run.trackers = {name}", package)
    return kinds


class InBackground:
    """Sink that passes records to a tracker on a background thread.

    The thread also creates the tracker. If the tracker raises an exception, the next call of this
    sink or of `close` raises it.
    """

    def __init__(self, kind: Any, folder: Path, settings: Mapping[str, Any]) -> None:
        self.name, self.error, self.made = kind.__name__, None, (kind, folder, settings)
        self.records: Queue[_Record | None] = Queue(_WAITING)
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        kind, folder, settings = self.made
        try:
            tracker = kind(folder=folder, settings=settings)
            while (record := self.records.get()) is not None:
                tracker.write(record)
            tracker.close()
        except BaseException as error:  # other packages may raise anything, also SystemExit
            self.error = error

    def __call__(self, record: _Record) -> None:
        self._raise()
        try:
            self.records.put_nowait(record)
        except Full:
            raise TimeoutError(f"{self.name} does not accept records") from None

    def close(self) -> None:
        """Wait until the tracker has received all records, but at most _CLOSING seconds."""
        if self.thread.is_alive():
            try:
                self.records.put_nowait(None)
            except Full:
                raise TimeoutError(f"{self.name} does not accept records") from None
            self.thread.join(_CLOSING)
        self._raise()
        if self.thread.is_alive():
            raise TimeoutError(f"{self.name} did not receive all records within {_CLOSING} s")

    def _raise(self) -> None:
        if self.error is not None:
            raise RuntimeError(f"{self.name}: {type(self.error).__name__}: {self.error}")
