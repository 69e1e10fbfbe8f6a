"""A measured trace beside what arrays without data count: what each stretch of time went into.

A rank on arrays without data (hpc3d.arrays.abstract) makes the rows of a real one, in the same
order, and records the products and kernels that lie in them and between them.  Where its recorder
counts these records instead of time, the times of a row say which of it belongs there.  Rows of
category copy and io have none: the former come and go with time, the latter with data.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.arrays.abstract import AbstractPool, CostMeter
from hpc3d.comm.abstract_communicator import abstract_mesh
from hpc3d.config.load import stored
from hpc3d.pipeline.program import program_of
from hpc3d.predict.simulation.count import ZeroBatches
from hpc3d.predict.simulation.memory_recorder import MemoryRecorder
from hpc3d.trace.schema import CATEGORY, MESSAGES, OP
from hpc3d.training.trainer import Trainer

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.pipeline.program import Program
    from hpc3d.trace.reader import Trace

_COMM = CATEGORY.index("comm")
_EXTRA = [CATEGORY.index(name) for name in ("copy", "io")]
_SAME = ("category", "op", "phase", "layer", "microbatch", "chunk", "bytes", "flops")
_TIMES = ("t_start", "dur", "posted")
_REMEDY = (
    "{}: rank {} did not do in a step what the program would do; train again, with this version, "
    "for more than two steps"
)


class Product(NamedTuple):
    m: int
    n: int
    k: int
    dtype: str
    batch: int

    @property
    def flop(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.batch


class TimedKernel(NamedTuple):
    name: str
    bytes: int


class Call(NamedTuple):
    """What a trace says of a call, and how many ranks make it."""

    op: str
    bytes: int
    members: int


class TimedWork(NamedTuple):
    """What a rank does between the ends of two rows: its Products and Kernels, the Call of the
    second row (None if that is no call), and the seconds that it takes."""

    computed: tuple
    call: Call | None
    seconds: float


class _MeterLog(CostMeter):
    """All that the arrays of a rank record, in order."""

    def __init__(self) -> None:
        self.entries = []

    def product(self, m: int, n: int, k: int, dtype: np.dtype, batch: int = 1) -> None:
        self.entries.append(Product(m, n, k, dtype.name, batch))

    def kernel(self, name: str, nbytes: int) -> None:
        self.entries.append(TimedKernel(name, nbytes))


class _ExpectedRows(NamedTuple):
    """The rows of a rank in a step of the steady state, and the Products and Kernels between the
    ends of each two of them; the last entry has those after all rows."""

    rows: np.recarray
    computed: list


def _expected_rows(config: Config, coords: Mapping[str, int], program: Program) -> _ExpectedRows:
    """The Script of the rank at `coords` (axis -> coordinate)."""
    log = _MeterLog()
    mesh = abstract_mesh(config.mesh.sizes(), coords, AbstractPool(log))
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
    """The TimedWork of every rank of an open trace in a step, a list: medians over its steps,
    without the first `skip` of them.

    ValueError for a trace of another clock than CPU time (on the wall a rank also waits,
    and where ranks share a core the work of one is in the times of the other), or one that
    other code has made.
    """
    config = configuration(trace)
    program, grid, found = program_of(config), config.mesh.grid(), []
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
    """The TimedWork before a row and in it; what Python does before a call is part of this call,
    unless there is something else that it may be."""
    if call is None or not computed:
        return [TimedWork(computed, call, before + inside)]
    return [TimedWork(computed, None, before), TimedWork((), call, inside)]


def configuration(trace: Trace) -> Config:
    """The Config of a trace that can be aligned."""
    config = stored(trace.attrs["config"])
    if config.trace.clock != "cpu":
        raise ValueError(
            f"{trace.path}: its times are those on the wall, not of the work of each rank; record "
            "it with --trace.clock cpu"
        )
    return config


def _steps_of(trace: Trace, rank: int) -> list[tuple[int, ...]]:
    """Number, start and end of each step of a rank."""
    mine = trace.steps["rank"] == rank
    columns = (trace.steps[key][mine].tolist() for key in ("step", "t_start", "t_end"))
    return [*zip(*columns, strict=True)]


def _rows_of(trace: Trace, rank: int) -> np.recarray:
    """The rows of a rank in the order in which they ended."""
    mine, names = trace.rows(rank), ("step", *_SAME, *_TIMES)
    rows = np.rec.fromarrays([trace.events[name, mine] for name in names], names=[*names])
    return rows[np.argsort(rows.t_start + rows.dur, kind="stable")]


def _aligned(
    rows: np.recarray, expected: _ExpectedRows, step: int, begin: int, end: int
) -> np.ndarray | None:
    """Seconds before each row of a script, from the end of the row before, and in it, [2, rows];
    the end of the step is a row of no length.  None if the `rows` are others.

    The time in which a call was made that was waited for later (category copy) is time in this
    call, although other rows may lie between the two.
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
    """The Call of a row, or None."""
    if row["category"] != _COMM:
        return None
    op = OP[row["op"]]
    members = 2 if op in MESSAGES else len(trace.groups[row["group"]].members)
    return Call(op, int(row["bytes"]), members)
