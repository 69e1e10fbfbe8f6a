"""The tables over several runs, in the order of a report."""

from __future__ import annotations

from hpc3d.analyze.report.run_tables import AXIS, CATEGORY, OP, PHASE
from hpc3d.analyze.report.table_format import (
    Field,
    Sheet,
    count,
    integer,
    milliseconds,
    percent,
    prefixed,
    ratio,
)

RUN = Field("run", "run")


def between(key: str) -> tuple[Field, Field]:
    """The columns of a ratio's 95 % interval."""
    return Field(f"{key}_low", "from", ratio), Field(f"{key}_high", "to", ratio)


RUNS = Sheet(
    "runs",
    "Runs",
    (
        RUN,
        Field("ranks", "ranks", integer),
        Field("steps", "steps", integer),
        Field("step_s_25", "25 % [ms]", milliseconds),
        Field("step_s_median", "step [ms]", milliseconds),
        Field("step_s_75", "75 % [ms]", milliseconds),
        Field("tokens_per_s", "tokens/s", prefixed),
        Field("communication_share", "communication", percent),
        Field("communication_calls", "calls", count),
        Field("communication_bytes", "received [B]", prefixed),
        Field("loss_step", "loss after step", integer),
        Field("loss", "loss [nat]", "{:.6f}".format),
        Field("loss_difference", "largest difference [nat]", "{:.1e}".format),
    ),
)
SCALING = Sheet(
    "scaling",
    "Scaling",
    (
        RUN,
        Field("ranks", "ranks", integer),
        Field("batch", "batch", integer),
        Field("hidden", "hidden", integer),
        Field("heads", "heads", integer),
        Field("forward_s", "forward [ms]", milliseconds),
        Field("backward_s", "backward [ms]", milliseconds),
        Field("average_step_s", "average step time [ms]", milliseconds),
        Field("tokens_per_s", "tokens/s", prefixed),
        Field("tokens_per_s_rank", "tokens/s a rank", prefixed),
        Field("scaling", "scaling"),
        Field("speedup", "speed-up", ratio),
        *between("speedup"),
        Field("efficiency", "efficiency", percent),
    ),
)
GAINS = Sheet(
    "gains",
    "Schemes",
    (
        RUN,
        Field("family", "loops cut"),
        Field("average_step_s", "average step time [ms]", milliseconds),
        Field("over_1d", "over 1-D", ratio),
        *between("over_1d"),
        Field("over_2d", "over 2-D", ratio),
        *between("over_2d"),
        Field("step_s", "step [ms]", milliseconds),
        Field("step_over_1d", "step over 1-D", ratio),
        *between("step_over_1d"),
        Field("step_over_2d", "step over 2-D", ratio),
        *between("step_over_2d"),
    ),
)
DIFFERENCES = Sheet(
    "differences",
    "Differences from the first run",
    (
        RUN,
        CATEGORY,
        PHASE,
        AXIS,
        OP,
        Field("seconds", "first run [ms]", milliseconds),
        Field("other_seconds", "this run [ms]", milliseconds),
        Field("difference_s", "difference [ms]", milliseconds),
        Field("low", "from [ms]", milliseconds),
        Field("high", "to [ms]", milliseconds),
    ),
    brief=10,
)

OVER_RUNS = (RUNS, SCALING, GAINS, DIFFERENCES)
