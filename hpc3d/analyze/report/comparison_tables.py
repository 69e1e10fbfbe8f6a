"""Tables that compare runs, in report order, and titles for the groups of configuration keys."""

from __future__ import annotations

from collections.abc import Sequence

from hpc3d.analyze.metrics.loads import EXECUTION, LAYOUT, WORK
from hpc3d.analyze.report.run_tables import AXIS, CATEGORY, OP, PHASE
from hpc3d.analyze.report.table_format import (
    ColumnSpec,
    TableSpec,
    change,
    count,
    integer,
    milliseconds,
    percent,
    prefixed,
    ratio,
)

RUN = ColumnSpec("run", "run")
_RUNS_SHOWN = 6  # maximum number of runs in a text table that has separate columns for each run
GROUPS = {
    WORK: "work (model, data and optimization)",
    LAYOUT: "layout (mesh and techniques)",
    EXECUTION: "execution (machine, program, paths, and recorded and saved data)",
}


def _interval(key: str) -> tuple[ColumnSpec, ColumnSpec]:
    """Return the two columns with the limits of the 95 % confidence interval of a ratio."""
    return ColumnSpec(f"{key}_low", "from", ratio), ColumnSpec(f"{key}_high", "to", ratio)


_RUNS = TableSpec(
    "runs",
    "Runs",
    (
        RUN,
        ColumnSpec("ranks", "ranks", integer),
        ColumnSpec("steps", "steps", integer),
        ColumnSpec("step_s_25", "25 % [ms]", milliseconds),
        ColumnSpec("step_s_median", "step [ms]", milliseconds),
        ColumnSpec("step_s_75", "75 % [ms]", milliseconds),
        ColumnSpec("tokens_per_s", "tokens/s", prefixed),
        ColumnSpec("communication_share", "communication", percent),
        ColumnSpec("communication_calls", "calls", count),
        ColumnSpec("communication_bytes", "received [B]", prefixed),
        ColumnSpec("peak_bytes", "peak memory [B]", prefixed),
        ColumnSpec("offloaded_bytes", "offloaded [B]", prefixed),
        ColumnSpec("loss_step", "loss after step", integer),
        ColumnSpec("loss", "loss [nat]", "{:.6f}".format),
        ColumnSpec("loss_difference", "max loss difference [nat]", "{:.1e}".format),
        ColumnSpec("validation_loss", "validation loss [nat]", "{:.6f}".format),
        ColumnSpec("validation_best", "best validation loss [nat]", "{:.6f}".format),
    ),
)
_RECEIVED = TableSpec("received", "Bytes received by axis and operation", (AXIS, OP))
_SCALING = TableSpec(
    "scaling",
    "Scaling",
    (
        RUN,
        ColumnSpec("ranks", "ranks", integer),
        ColumnSpec("batch", "batch", integer),
        ColumnSpec("hidden", "hidden", integer),
        ColumnSpec("heads", "heads", integer),
        ColumnSpec("forward_s", "forward [ms]", milliseconds),
        ColumnSpec("backward_s", "backward [ms]", milliseconds),
        ColumnSpec("average_step_s", "average step time [ms]", milliseconds),
        ColumnSpec("tokens_per_s", "tokens/s", prefixed),
        ColumnSpec("tokens_per_s_rank", "tokens/s per rank", prefixed),
        ColumnSpec("scaling", "scaling"),
        ColumnSpec("speedup", "speedup", ratio),
        *_interval("speedup"),
        ColumnSpec("efficiency", "efficiency", percent),
    ),
)
_GAINS = TableSpec(
    "gains",
    "Gain over 1-D and 2-D",
    (
        RUN,
        ColumnSpec("family", "tensor parallelism"),
        ColumnSpec("average_step_s", "average step time [ms]", milliseconds),
        ColumnSpec("over_1d", "over 1-D", ratio),
        *_interval("over_1d"),
        ColumnSpec("over_2d", "over 2-D", ratio),
        *_interval("over_2d"),
        ColumnSpec("step_s", "step [ms]", milliseconds),
        ColumnSpec("step_over_1d", "step over 1-D", ratio),
        *_interval("step_over_1d"),
        ColumnSpec("step_over_2d", "step over 2-D", ratio),
        *_interval("step_over_2d"),
    ),
)
_DIFFERENCES = TableSpec(
    "differences",
    "Differences from the first run",
    (
        RUN,
        CATEGORY,
        PHASE,
        AXIS,
        OP,
        ColumnSpec("seconds", "first run [ms]", milliseconds),
        ColumnSpec("other_seconds", "this run [ms]", milliseconds),
        ColumnSpec("difference_s", "difference [ms]", milliseconds),
        ColumnSpec("low", "from [ms]", milliseconds),
        ColumnSpec("high", "to [ms]", milliseconds),
    ),
    rows_shown=10,
)


def over_runs(labels: Sequence[str]) -> tuple[TableSpec, ...]:
    """Return the specifications of the tables that compare the runs with these labels."""
    return _RUNS, _received(labels), _SCALING, _GAINS, _DIFFERENCES


def _received(labels):
    """Return the specification of the received-bytes table, which has columns for every run.

    Text tables show only the columns for the first _RUNS_SHOWN runs.
    """
    fields = [AXIS, OP]
    for number, label in enumerate(labels, 1):
        fields.append(ColumnSpec(f"bytes_{number}", f"{label} [B]", prefixed))
        if number > 1:
            fields.append(ColumnSpec(f"difference_{number}", "difference", change))
        fields.append(ColumnSpec(f"seconds_{number}", "time [ms]", milliseconds))
    shown = len(_RECEIVED.fields) + 3 * _RUNS_SHOWN - 1
    return _RECEIVED._replace(fields=tuple(fields), columns_shown=shown)
