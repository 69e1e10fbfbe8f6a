"""What the ranks did in one training step, event by event, as the figures show it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.analyze.metrics.columns import cell_values, event_values, labelled, labels
from hpc3d.analyze.metrics.critical_path import critical_path
from hpc3d.analyze.report.palette import WORK as KINDS
from hpc3d.plain import plain_in

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.critical_path import PathSegment
    from hpc3d.analyze.metrics.wait_states import CallInstances
    from hpc3d.trace.reader import Trace

log = logging.getLogger(__name__)

EVENTS = 100_000  # events of a step that a page draws at most
OTHERS = 400_000  # and events of all other steps together
_STEPS, _FEW = 40, 5_000  # other steps at most, and events of one of them at least

_NUMBER = {kind: number for number, kind in enumerate(KINDS)}
DETAILS = (
    "name",
    "op",
    "phase",
    "axis",
    "layer",
    "microbatch",
    "stage",
    "chunk",
    "seq",
    "bytes",
    "flops",
)


class Timeline(NamedTuple):
    """The events of a step on the `shown` ranks, of `ranks` in all on a mesh of `axes`.

    `events` are columns: `start` and `end` in ms from the first begin of the step on any rank,
    between them `until`, where the wait for the last arrival ends (`start` if there was none),
    and `posted`, when a call was made; `rank`, `stream`, `kind` (a number in KINDS), `instance` (a
    number that calls have in common which belong together, -1 for none), `by` (the rank that was
    waited for, -1 for none), and DETAILS.  `names` are {code: name} of those columns that hold
    codes.  `path` are the Segments of the critical path, `extents` when the step began and ended
    on each of `shown`, [ranks, 2] in ms, and `peak` the FLOP/s of a rank at best, if known.
    """

    step: int
    shown: list
    ranks: int
    axes: list
    events: dict
    names: dict
    path: list
    extents: np.ndarray
    peak: float | None = None


def timeline(
    trace: Trace,
    calls: CallInstances,
    step: int,
    path: Sequence[PathSegment],
    limit: int = EVENTS,
    peak: float | None = None,
) -> Timeline:
    """The Timeline of a step; of more events than `limit` those of representative ranks only.

    `calls` are `waits.calls_of(trace)` and `path` the critical path of the step.
    """
    rows = np.flatnonzero(trace.events["step"] == step)
    ranks = trace.events["rank"][rows]
    shown = _representatives(trace, calls, path, np.bincount(ranks), limit)
    rows = rows[np.isin(ranks, shown)]
    names = {key: labels(trace, key) for key in ("op", "phase", "axis")}
    names["name"] = dict(enumerate(trace.strings))
    columns = _times(trace, calls, step, rows) | {"kind": _kinds(trace, rows)}
    columns |= {key: event_values(trace, key, rows) for key in ("rank", "stream", *DETAILS)}
    axes = list(zip(trace.attrs["axes"].split(), trace.attrs["axis_sizes"]))
    if prod(size for _, size in axes) != trace.attrs["world_size"]:
        axes = []  # stages have different numbers of replicas: a rank goes by its number
    axes, names = plain_in((axes, names))
    extents = _extents(trace, step, shown)
    return Timeline(
        step, shown, trace.attrs["world_size"], axes, columns, names, path, extents, peak
    )


def other_steps(
    trace: Trace, calls: CallInstances, step: int, peak: float | None = None, limit: int = OTHERS
) -> list[Timeline]:
    """The Timelines of the other steps; of many steps the first, the longest, the last and others
    at even distances."""
    steps, length = _lengths(trace)
    if len(steps) > _STEPS:
        even = np.linspace(0, len(steps) - 1, _STEPS - 1).astype(int)
        steps = np.unique(np.append(steps[even], steps[length.argmax()]))
    each = max(_FEW, limit // max(1, len(steps)))
    found = []
    with trace.events.keeping():
        for number, other in enumerate(steps[steps != step].tolist(), 1):
            log.info("its timelines: step %d of %d", number, len(steps) - 1)
            path = critical_path(trace, calls, other)
            found.append(timeline(trace, calls, other, path, min(each, EVENTS), peak))
    return found


def _lengths(trace):
    """The completed steps of which there are events, and how long each took [ns]."""
    steps, place = np.unique(trace.steps["step"], return_inverse=True)
    length = np.zeros(len(steps))
    np.maximum.at(length, place, trace.steps["t_end"] - trace.steps["t_start"])
    there = np.isin(steps, trace.events["step"])
    return steps[there], length[there]


def boxes(chart: Timeline) -> dict[str, Any]:
    """What there is to draw: {kind: (left, right, row)}, times in ms and the rows of `shown`.

    A call is two boxes: its wait, and the rest.
    """
    events = chart.events
    row = np.searchsorted(chart.shown, events["rank"]) + lanes(events)[0]
    found = {}
    for kind, number in _NUMBER.items():
        these = events["kind"] == number
        found[kind] = [events["until"][these], events["end"][these], row[these]]
    waited = events["until"] > events["start"]
    waits = [events["start"][waited], events["until"][waited], row[waited]]
    found["wait"] = [np.concatenate(parts) for parts in zip(found["wait"], waits)]
    return {kind: parts for kind, parts in found.items() if len(parts[0])}


def lanes(events: Mapping[str, np.ndarray]) -> tuple[np.ndarray, float]:
    """How far below the middle of its rank's row each event lies, and what part of a row is high:
    the streams of a rank share its row, one under the other."""
    streams, lane = np.unique(events["stream"], return_inverse=True)
    return ((lane - (len(streams) - 1) / 2) / len(streams)).astype("f4"), 1 / len(streams)


def rest(chart: Timeline) -> str:
    """What the rest of a row is: a stream that waits for work has no event, either."""
    return "unrecorded" if lanes(chart.events)[1] == 1 else "idle or unrecorded"


def path(chart: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """The critical path as a line: times in ms, and rows of `shown`, none for other ranks."""
    times = [time * 1e3 for each in chart.path for time in (each.start, each.end)]
    row = {rank: place for place, rank in enumerate(chart.shown)}
    rows = [row.get(each.rank, np.nan) for each in chart.path for _ in range(2)]
    return np.array(times), np.array(rows)


def _representatives(
    trace: Trace, calls: CallInstances, path: Sequence[PathSegment], events: np.ndarray, limit: int
) -> list[int]:
    """The ranks that are shown, sorted: all, or until they have `limit` of the `events` [ranks]
    the first one, the one most waited for, the first of each stage, those on the critical path,
    and then others at even distances."""
    if events.sum() <= limit:
        return np.flatnonzero(events).tolist()
    imposed = np.bincount(calls.by, calls.wait * calls.inside, len(events))
    _, first = np.unique(cell_values(trace, "stage"), return_index=True)
    stages = trace.steps["rank"][first].tolist()
    strides = (1 << bit for bit in reversed(range(len(events).bit_length())))
    others = (rank for stride in strides for rank in range(0, len(events), stride))
    wanted = [0, int(imposed.argmax()), *stages, *(each.rank for each in path), *others]
    wanted = [rank for rank in dict.fromkeys(wanted) if rank < len(events) and events[rank]]
    fitting = np.searchsorted(np.cumsum(events[wanted]), limit, "right")
    return sorted(wanted[: max(1, fitting)])


def _times(trace, calls, step, rows):
    """When each row began, had waited and ended, its meeting, and for whom it waited."""
    start = trace.events["t_global"][rows]
    end = start + trace.events["dur"][rows]
    until, meeting, by = start.copy(), np.full(len(rows), -1), np.full(len(rows), -1)
    place = np.full(len(trace.events), -1)
    place[calls.row] = np.arange(len(calls.row))
    mine = np.flatnonzero(place[rows] >= 0)
    call = place[rows[mine]]
    until[mine], meeting[mine] = start[mine] + calls.wait[call], calls.instance[call]
    by[mine] = np.where(calls.wait[call] > 0, calls.by[call], -1)
    first = _begin(trace, step)
    posted = trace.events["posted"][rows] + start - trace.events["t_start"][rows]
    times = {"start": start, "until": until, "end": end, "posted": posted}
    times = {key: ((value - first) * 1e-6).astype("f4") for key, value in times.items()}
    return times | {"meeting": meeting, "by": by}


def _begin(trace, step):
    """The first begin of a step on any rank, in ns on rank 0's clock."""
    return _moved(trace, step)[1].min()


def _extents(trace, step, shown):
    """When a step begins and ends on some ranks, in ms from the first begin."""
    ranks, begin, end = _moved(trace, step)
    place = np.searchsorted(ranks, shown)
    return (np.stack([begin, end], -1)[place] - begin.min()) * 1e-6


def _moved(trace, step):
    """The ranks that have events of a step, and its begin and end there in ns on rank 0's clock:
    moved to it as the rank's first event is."""
    rows = np.flatnonzero(trace.events["step"] == step)
    ranks, first = np.unique(trace.events["rank"][rows], return_index=True)
    shift = trace.events["t_global"][rows[first]] - trace.events["t_start"][rows[first]]
    here = np.flatnonzero(trace.steps["step"] == step)
    here = here[np.isin(trace.steps["rank"][here], ranks)]
    here = here[np.argsort(trace.steps["rank"][here], kind="stable")]
    rank = trace.steps["rank"][here]
    moved = shift[np.searchsorted(ranks, rank)]
    return rank, trace.steps["t_start"][here] + moved, trace.steps["t_end"][here] + moved


def _kinds(trace, rows):
    """The number in KINDS of each row: the phase of computation, else what the category says."""
    events = trace.events
    phase, category = (_numbers(events.labels(key)) for key in ("phase", "category"))
    working = labelled(events, "category", ["compute"])[rows]
    return np.where(working, phase[events["phase"][rows]], category[events["category"][rows]])


def _numbers(names):
    """The kind of each code of an enumeration."""
    kinds = {"comm": "transfer", "compute": "other", "io": "host", "marker": "host"}
    number = np.full(256, _NUMBER["other"])
    for code, name in names.items():
        number[code] = _NUMBER.get(kinds.get(name, name), _NUMBER["other"])
    return number
