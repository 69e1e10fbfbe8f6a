"""Tables that compare runs, in report order, and titles for the groups of configuration keys."""

from __future__ import annotations

from collections.abc import Sequence

from hpc3d.analyze.metrics.loads import EXECUTION, LAYOUT, WORK
from hpc3d.analyze.report.run_tables import AXIS, CATEGORY, OP, PHASE
from hpc3d.analyze.report.table_format import (
    ColumnSpec,
    TableSpec,
    change,
    columns,
    count,
    integer,
    milliseconds,
    percent,
    prefixed,
    ratio,
    times,
)

RUN = ColumnSpec("run", "run")
_VALIDATION_STEP = ColumnSpec("validation_step", "evaluated after step", integer)
_LOSS_STEP = ColumnSpec("loss_step", "loss after step", integer)
_RUNS_SHOWN = 6  # maximum number of runs in a text table that has separate columns for each run
GROUPS = {
    WORK: "workload (model, data and optimization)",
    LAYOUT: "layout (mesh and techniques)",
    EXECUTION: "execution (machine, software, output folders, tracing and checkpoints)",
}


def _ratios(**headings: str) -> tuple[ColumnSpec, ...]:
    """Return three columns per ratio: the value and the limits of its 95 % confidence interval."""
    found = []
    for key, heading in headings.items():
        found += columns(ratio, **{key: heading, f"{key}_low": "from", f"{key}_high": "to"})
    return tuple(found)


_RUNS = TableSpec(
    "runs",
    "Runs",
    (
        RUN,
        *columns(integer, ranks="ranks", steps="steps"),
        *columns(milliseconds, step_s_25="25 % [ms]", step_s_median="median [ms]"),
        *columns(milliseconds, step_s_75="75 % [ms]"),
        ColumnSpec("tokens_per_s", "tokens/s", prefixed),
        ColumnSpec("communication_share", "communication", percent),
        ColumnSpec("communication_calls", "calls", count),
        *columns(prefixed, communication_bytes="received [B]", peak_bytes="peak memory [B]"),
        *columns(prefixed, offloaded_bytes="offloaded [B]"),
        _LOSS_STEP,
        ColumnSpec("loss", "loss [nat]", "{:.6f}".format),
        ColumnSpec("loss_difference", "max loss difference [nat]", "{:.1e}".format),
        _VALIDATION_STEP,
        ColumnSpec("validation_loss", "validation loss [nat]", "{:.6f}".format),
        ColumnSpec("validation_best", "best validation loss [nat]", "{:.6f}".format),
    ),
    in_latex=(
        *("run", "ranks", "step_s_median", "tokens_per_s"),
        *("communication_bytes", "peak_bytes", "loss_step", "loss", "validation_loss"),
    ),
)
_SEEDS = TableSpec(
    "seeds",
    "Runs that differ only in the seed",
    (
        RUN,
        ColumnSpec("runs", "seeds", integer),
        _LOSS_STEP,
        ColumnSpec("loss", "mean loss [nat]", "{:.4f}".format, "loss_half"),
        _VALIDATION_STEP,
        ColumnSpec(
            "validation_loss",
            "mean validation loss [nat]",
            "{:.4f}".format,
            "validation_loss_half",
        ),
    ),
)
_RECEIVED = TableSpec("received", "Bytes received by axis and operation", (AXIS, OP))
_SCALING = TableSpec(
    "scaling",
    "Speed and scaling",
    (
        RUN,
        *columns(integer, ranks="ranks", batch="batch", hidden="hidden", heads="heads"),
        *times("forward", "backward", "step"),
        ColumnSpec("average_step_s", "average step time per sequence [ms]", milliseconds),
        *columns(prefixed, tokens_per_s="tokens/s", tokens_per_s_rank="tokens/s per rank"),
        ColumnSpec("scaling", "scaling"),
        *_ratios(speedup="speedup"),
        ColumnSpec("reference", "reference"),
        ColumnSpec("efficiency", "efficiency", percent),
    ),
    in_latex=(
        *("run", "ranks", "step_s", "scaling", "speedup", "speedup_low", "speedup_high"),
        *("reference", "efficiency"),
    ),
)
_GAINS = TableSpec(
    "gains",
    "Gain over 1-D and 2-D",
    (
        RUN,
        ColumnSpec("family", "tensor parallelism"),
        ColumnSpec("average_step_s", "average step time per sequence [ms]", milliseconds),
        *_ratios(over_1d="over 1-D", over_2d="over 2-D"),
        *times("step"),
        *_ratios(step_over_1d="step over 1-D", step_over_2d="step over 2-D"),
    ),
    in_latex=(
        *("run", "family", "average_step_s", "over_1d", "over_2d"),
        *("step_s", "step_over_1d", "step_over_2d"),
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
        *columns(milliseconds, seconds="first run [ms]", other_seconds="this run [ms]"),
        *times("difference"),
        *columns(milliseconds, low="from [ms]", high="to [ms]"),
    ),
    rows_shown=10,
)


def over_runs(labels: Sequence[str]) -> tuple[TableSpec, ...]:
    """Return the specifications of the tables that compare the runs labeled `labels`."""
    return _RUNS, _SEEDS, _received(labels), _SCALING, _GAINS, _DIFFERENCES


def _received(labels):
    """Return the specification of the received-bytes table, which has columns for every run.

    Text tables show only the columns for the first _RUNS_SHOWN runs, and LaTeX tables only their
    bytes.
    """
    fields = [AXIS, OP]
    for number, label in enumerate(labels, 1):
        fields.append(ColumnSpec(f"bytes_{number}", f"{label} [B]", prefixed))
        if number > 1:
            fields.append(ColumnSpec(f"difference_{number}", "difference", change))
        fields.append(ColumnSpec(f"seconds_{number}", "time [ms]", milliseconds))
    shown = len(_RECEIVED.fields) + 3 * _RUNS_SHOWN - 1
    printed = "axis", "op", *(f"bytes_{number}" for number in range(1, _RUNS_SHOWN + 1))
    return _RECEIVED._replace(fields=tuple(fields), columns_shown=shown, in_latex=printed)
