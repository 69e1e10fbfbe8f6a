"""The tables over several runs, in the order of a report, and the titles of that in which runs
differ."""

from __future__ import annotations

from collections.abc import Sequence

from hpc3d.analyze.metrics.loads import LAYOUT, MANNER, WORK
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
_SIDE_BY_SIDE = 6  # runs
GROUPS = {
    WORK: "work, what is trained",
    LAYOUT: "layout, how that is shared out",
    MANNER: "how they run: machine, program, paths, what is recorded and saved",
}


def _between(key: str) -> tuple[ColumnSpec, ColumnSpec]:
    """The columns of a ratio's 95 % interval."""
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
        ColumnSpec("peak_bytes", "memory [B]", prefixed),
        ColumnSpec("offloaded_bytes", "offloaded [B]", prefixed),
        ColumnSpec("loss_step", "loss after step", integer),
        ColumnSpec("loss", "loss [nat]", "{:.6f}".format),
        ColumnSpec("loss_difference", "largest difference [nat]", "{:.1e}".format),
        ColumnSpec("validation_loss", "validation loss [nat]", "{:.6f}".format),
        ColumnSpec("validation_best", "best [nat]", "{:.6f}".format),
    ),
)
_RECEIVED = TableSpec("received", "Bytes received, by axis and operation", (AXIS, OP))
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
        ColumnSpec("tokens_per_s_rank", "tokens/s a rank", prefixed),
        ColumnSpec("scaling", "scaling"),
        ColumnSpec("speedup", "speed-up", ratio),
        *_between("speedup"),
        ColumnSpec("efficiency", "efficiency", percent),
    ),
)
_GAINS = TableSpec(
    "gains",
    "Schemes",
    (
        RUN,
        ColumnSpec("family", "loops cut"),
        ColumnSpec("average_step_s", "average step time [ms]", milliseconds),
        ColumnSpec("over_1d", "over 1-D", ratio),
        *_between("over_1d"),
        ColumnSpec("over_2d", "over 2-D", ratio),
        *_between("over_2d"),
        ColumnSpec("step_s", "step [ms]", milliseconds),
        ColumnSpec("step_over_1d", "step over 1-D", ratio),
        *_between("step_over_1d"),
        ColumnSpec("step_over_2d", "step over 2-D", ratio),
        *_between("step_over_2d"),
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
    """The tables over runs of these labels."""
    return _RUNS, _received(labels), _SCALING, _GAINS, _DIFFERENCES


def _received(labels):
    """With columns for every run, of which a text shows the first ones."""
    fields = [AXIS, OP]
    for place, label in enumerate(labels, 1):
        fields.append(ColumnSpec(f"bytes_{place}", f"{label} [B]", prefixed))
        if place > 1:
            fields.append(ColumnSpec(f"difference_{place}", "difference", change))
        fields.append(ColumnSpec(f"seconds_{place}", "time [ms]", milliseconds))
    shown = len(_RECEIVED.fields) + 3 * _SIDE_BY_SIDE - 1
    return _RECEIVED._replace(fields=tuple(fields), columns_shown=shown)
