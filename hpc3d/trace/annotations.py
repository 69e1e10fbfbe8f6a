"""Supplementary tables of a merged trace file: measured call times and predicted quantities."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.trace.file import changing, remove, write_table
from hpc3d.trace.reader import Trace
from hpc3d.trace.schema import CALIBRATION, OP, PREDICTION

if TYPE_CHECKING:
    from hpc3d.trace.file import File


class Calibration(NamedTuple):
    """Measured times of one operation along one mesh axis.

    `rows` maps each column of CALIBRATION to its values.  The times are fitted by
    t = alpha + beta * bytes, with alpha in s and beta in s/B.
    """

    rows: Mapping[str, Any]
    alpha: float
    beta: float


Measured = Mapping[tuple[str, str], Calibration]  # keys: (operation, mesh axis)


def write_calibration(path: Path | str, measured: Measured) -> None:
    """Write calibrations to a trace file, replacing existing entries with the same (op, axis).

    A modified copy replaces the file atomically, so readers see either the old or the new file.
    """
    for op, axis in measured:
        if op not in OP or not axis or {"/", "."} & {*axis}:
            raise ValueError(
                f"calibration key ({op!r}, {axis!r}): must be an operation and a mesh axis"
            )
    with _changing(path) as file:
        add_supplements(file, measured)


def write_prediction(path: Path | str, rows: Mapping[str, Any], machine: str = "") -> None:
    """Write a prediction for a machine to a trace file, replacing any earlier prediction.

    A modified copy replaces the file atomically, so readers see either the old or the new file.
    """
    with _changing(path) as file:
        add_supplements(file, {}, rows, machine)


@contextmanager
def _changing(path):
    Trace(path).close()
    with changing(Path(path)) as file:
        yield file


def add_supplements(
    file: File,
    measured: Measured,
    predicted: Mapping[str, Any] | None = None,
    machine: str = "",
) -> None:
    """Write calibrations and, if given, a prediction to a file opened for writing."""
    for (op, axis), (rows, alpha, beta) in measured.items():
        path = f"calibration/{op}/{axis}"
        remove(file, path)
        group = write_table(file, path, CALIBRATION, _whole(CALIBRATION, rows))
        group.attrs.update(alpha=float(alpha), beta=float(beta))
    if predicted:
        remove(file, "prediction")
        group = write_table(file, "prediction", PREDICTION, _whole(PREDICTION, predicted))
        group.attrs["machine"] = machine


def _whole(columns, rows):
    lacking = [column.name for column in columns if column.name not in rows]
    if lacking:
        raise ValueError(f"missing columns: {', '.join(lacking)}")
    if len({len(rows[column.name]) for column in columns}) > 1:
        raise ValueError("the columns must have equal lengths")
    return rows


def supplements(path: Path, run_id: str) -> tuple[Measured, dict[str, np.ndarray], str]:
    """Return the calibrations and the prediction of a trace file, and the predicted machine.

    All are empty if the trace cannot be read or belongs to a run other than `run_id`.
    """
    try:
        with Trace(path) as trace:
            if trace.attrs["run_id"] != run_id:
                return {}, {}, ""
            measured = {
                key: Calibration(table.columns(), table.attrs["alpha"], table.attrs["beta"])
                for key, table in trace.calibration.items()
            }
            machine = str(trace.prediction.attrs.get("machine", ""))
            return measured, trace.prediction.columns(), machine
    except ValueError:  # the file is missing or damaged
        return {}, {}, ""
