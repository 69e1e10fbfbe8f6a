"""Supplements of a merged trace file: measured costs of calls, and predictions of a model."""

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
    """Measured times of calls.

    `rows` maps the columns of CALIBRATION to their values.  The line t = alpha + beta bytes fits
    them, in s and s/B.
    """

    rows: Mapping[str, Any]
    alpha: float
    beta: float


Measured = Mapping[tuple[str, str], Calibration]  # by operation and axis


def write_calibration(path: Path | str, measured: Measured) -> None:
    """Write calibrations by (op, axis) into a trace file; replace existing ones of these keys.

    A changed copy replaces the file atomically, so readers see either the old or the new file.
    """
    for op, axis in measured:
        if op not in OP or not axis or {"/", "."} & {*axis}:
            raise ValueError(
                f"calibration of {op!r} along {axis!r}: must be an operation and a mesh axis"
            )
    with _changing(path) as file:
        add_supplements(file, measured)


def write_prediction(path: Path | str, rows: Mapping[str, Any]) -> None:
    """Write the columns of PREDICTION into a trace file; replace an existing prediction.

    A changed copy replaces the file atomically, so readers see either the old or the new file.
    """
    with _changing(path) as file:
        add_supplements(file, {}, rows)


@contextmanager
def _changing(path):
    """Open a copy of a file for changes, after checking that it is a trace."""
    Trace(path).close()
    with changing(Path(path)) as file:
        yield file


def add_supplements(
    file: File, measured: Measured, predicted: Mapping[str, Any] | None = None
) -> None:
    """Write calibrations and, unless it is empty, a prediction into a file open for writing."""
    for (op, axis), (rows, alpha, beta) in measured.items():
        path = f"calibration/{op}/{axis}"
        remove(file, path)
        group = write_table(file, path, CALIBRATION, _whole(CALIBRATION, rows))
        group.attrs.update(alpha=float(alpha), beta=float(beta))
    if predicted:
        remove(file, "prediction")
        write_table(file, "prediction", PREDICTION, _whole(PREDICTION, predicted))


def _whole(columns, rows):
    """Return the rows; raise ValueError unless they have all columns, of equal length."""
    lacking = [column.name for column in columns if column.name not in rows]
    if lacking:
        raise ValueError(f"missing columns: {', '.join(lacking)}")
    if len({len(rows[column.name]) for column in columns}) > 1:
        raise ValueError("the columns have different lengths")
    return rows


def supplements(path: Path, run_id: str) -> tuple[Measured, dict[str, np.ndarray]]:
    """Return the calibrations and the prediction of a trace file; empty for another run."""
    try:
        with Trace(path) as trace:
            if trace.attrs["run_id"] != run_id:
                return {}, {}
            measured = {
                key: Calibration(table.columns(), table.attrs["alpha"], table.attrs["beta"])
                for key, table in trace.calibration.items()
            }
            return measured, trace.prediction.columns()
    except ValueError:  # the file is missing or damaged
        return {}, {}
