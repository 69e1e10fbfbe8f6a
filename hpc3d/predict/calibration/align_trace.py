"""Match the rows of a measured trace to the program's matrix products, kernels and calls.

A simulated rank on abstract arrays (hpc3d.arrays.abstract) records the same trace rows as a real
rank, in the same order. It also logs the matrix products and kernels that run between and during
the events of these rows. The simulated rank uses the length of the log as its clock, so the
timestamps of its rows are indices into the log. Rows of the categories copy and io are excluded,
because they depend on timing and data.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.arrays.abstract import AbstractPool, CostMeter
from hpc3d.comm.abstract_communicator import abstract_mesh
from hpc3d.config.load import stored
from hpc3d.pipeline.program import Program, program_of
from hpc3d.predict.simulation.count import ZeroBatches
from hpc3d.predict.simulation.memory_recorder import MemoryRecorder
from hpc3d.trace.schema import CATEGORY, MESSAGES, OP
from hpc3d.training.trainer import Trainer

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.trace.reader import Trace

_COMM = CATEGORY.index("comm")
_EXTRA = [CATEGORY.index(name) for name in ("copy", "io")]
_SAME = ("category", "op", "phase", "layer", "microbatch", "chunk", "bytes", "flops")
_TIMES = ("t_start", "dur", "posted")
_REMEDY = (
    "{}: the events of rank {} differ from the events that this version of hpc3d records; repeat "
    "the run with this version, for more than two steps"
)


class Product(NamedTuple):
    flop: float
    dtype: str


class TimedKernel(NamedTuple):
    name: str
    bytes: int


class Call(NamedTuple):
    """Communication call: operation, received bytes (as in traces), and group size."""

    op: str
    bytes: int
    members: int


class TimedWork(NamedTuple):
    """Work of a rank between the ends of two consecutive trace rows, and its duration in seconds.

    `computed` lists the matrix products (Product) and kernels (TimedKernel). `call` is the
    communication call that the second row records, or `None` if that row records no call.
    """

    computed: tuple
    call: Call | None
    seconds: float


class _MeterLog(CostMeter):
    def __init__(self) -> None:
        self.entries = []

    def product(self, m: int, n: int, k: int, dtype: np.dtype, batch: int = 1) -> None:
        self.entries.append(Product(2.0 * m * n * k * batch, dtype.name))

    def kernel(self, name: str, nbytes: int) -> None:
        self.entries.append(TimedKernel(name, nbytes))


class _ExpectedRows(NamedTuple):
    """Trace rows that a rank is expected to record in a steady-state step.

    For each row, `computed` contains the matrix products and kernels since the end of the previous
    row. An additional last entry contains the matrix products and kernels after the last row.
    """

    rows: np.recarray
    computed: list


def _expected_rows(config: Config, coords: Mapping[str, int], program: Program) -> _ExpectedRows:
    """Run the program of one rank on abstract arrays, and return the trace rows that it records.

    `coords` maps each mesh axis to the rank's coordinate.
    """
    log = _MeterLog()
    mesh = abstract_mesh(config.sizes(), coords, AbstractPool(log))
    ledger = MemoryRecorder(mesh.rank, lambda: len(log.entries))
    vocabulary = config.model.vocabulary
    trainer = Trainer(mesh.traced(ledger), config, vocabulary, None, program, feed=ZeroBatches)
    trainer.step(0)
    ledger.count, first = 0, len(log.entries)
    trainer.step(1)
    rows = ledger.rows()
    rows = rows[~np.isin(rows["category"], _EXTRA)]
    ends = [first, *rows["t_start"] + rows["dur"], len(log.entries)]
    return _ExpectedRows(rows, [tuple(log.entries[slice(*part)]) for part in pairwise(ends)])


def works(trace: Trace, skip: int = 2) -> list[TimedWork]:
    """Return the work items of a training step on all ranks, with their measured durations.

    Durations are medians over all steps except the first `skip`. Raises ValueError if a different
    version of the program wrote the trace, or if the trace does not contain CPU times. Wall-clock
    times are not suitable, because they include waiting and, on shared cores, the work of other
    ranks.
    """
    config = configuration(trace)
    program, grid, found = program_of(config), config.grid(), []
    for rank in range(grid.size):
        expected = _expected_rows(config, grid.coords(rank), program)
        rows, steps = _rows_of(trace, rank), _steps_of(trace, rank)[skip:]
        times = [_aligned(rows, expected, *step) for step in steps]
        if not times or any(each is None for each in times):
            raise ValueError(_REMEDY.format(trace.path, rank))
        calls = [*(_call_of(trace, row) for row in expected.rows), None]
        for computed, call, *spent in zip(expected.computed, calls, *np.median(times, 0).tolist()):
            found += _parts(computed, call, *spent)
    return found


def _parts(computed: tuple, call: Call | None, before: float, inside: float) -> list[TimedWork]:
    """Divide the time of a trace row between computation and the communication call.

    `before` is the time between the previous row and this one, and `inside` the time within this
    row, in seconds. If the row is a communication call without preceding computation, the time
    before it is Python overhead, which counts as part of the call.
    """
    if call is None or not computed:
        return [TimedWork(computed, call, before + inside)]
    return [TimedWork(computed, None, before), TimedWork((), call, inside)]


def configuration(trace: Trace) -> Config:
    """Return the Config of a trace.

    Raises ValueError if the trace contains wall-clock times instead of CPU times.
    """
    config = stored(trace.attrs["config"])
    if config.trace.clock != "cpu":
        raise ValueError(
            f"{trace.path}: the trace has wall-clock times, but calibration needs the CPU time of "
            "each rank; record it with --trace.clock cpu"
        )
    return config


def _steps_of(trace: Trace, rank: int) -> list[tuple[int, ...]]:
    """Return a (step number, start in ns, end in ns) tuple for each step of a rank."""
    mine = trace.steps["rank"] == rank
    columns = (trace.steps[key][mine].tolist() for key in ("step", "t_start", "t_end"))
    return [*zip(*columns, strict=True)]


def _rows_of(trace: Trace, rank: int) -> np.recarray:
    mine, names = trace.rows(rank), ("step", *_SAME, *_TIMES)
    rows = np.rec.fromarrays([trace.events[name, mine] for name in names], names=[*names])
    return rows[np.argsort(rows.t_start + rows.dur, kind="stable")]


def _aligned(
    rows: np.recarray, expected: _ExpectedRows, step: int, begin: int, end: int
) -> np.ndarray | None:
    """Return the times in seconds between and within the rows of a step.

    Returns `None` if the rows differ from the expected rows. Otherwise, the result has the shape
    [2, rows + 1], because the end of the step counts as a row of zero length. Entry [0, i] is the
    time from the end of row i-1 to the start of row i, and entry [1, i] the time within row i. If
    a call is posted first and waited for later, the time to post it (a row of category copy)
    counts as part of the call, even if other rows are in between.
    """
    rows = rows[rows.step == step]
    extra = np.isin(rows.category, _EXTRA)
    extra, rows = rows[extra], rows[~extra]
    same = len(rows) == len(expected.rows)
    if not same or any((rows[key] != expected.rows[key]).any() for key in _SAME):
        return None
    starts, inside = np.append(rows.t_start, end), np.append(rows.dur, 0)
    stops = starts + inside
    before = starts - np.append(begin, stops[:-1])
    np.subtract.at(before, np.searchsorted(stops, extra.t_start, "right"), extra.dur)
    early = np.flatnonzero((rows.category == _COMM) & (rows.posted < rows.t_start))
    made = dict(zip(extra.t_start.tolist(), extra.dur.tolist(), strict=True))
    lengths = [made.get(posted, 0) for posted in rows.posted[early].tolist()]
    inside[early] += np.array(lengths, "i8")
    return np.array([before, inside]) * 1e-9


def _call_of(trace: Trace, row: np.void) -> Call | None:
    if row["category"] != _COMM:
        return None
    op = OP[row["op"]]
    members = 2 if op in MESSAGES else len(trace.groups[row["group"]].members)
    return Call(op, int(row["bytes"]), members)
