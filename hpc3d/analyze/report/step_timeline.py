"""Timeline of a training step: plot data for the events of all ranks or a subset of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.analyze.metrics.columns import cell_values, event_values, labels, with_label
from hpc3d.analyze.metrics.critical_path import PathSegment, critical_path
from hpc3d.analyze.metrics.step import slowest_seconds
from hpc3d.analyze.report.palette import WORK as KINDS
from hpc3d.console.sanitize import sanitized_tree

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.wait_states import CallInstances
    from hpc3d.trace.reader import Trace

log = logging.getLogger(__name__)

_EVENTS = 100_000  # maximum number of events of one step on an HTML page
OTHERS = 400_000  # maximum total number of events of all other steps on the page
_STEPS, _MIN_EVENTS = 40, 5_000  # maximum number of timelines; minimum event limit per timeline

_KIND_INDEX = {kind: number for number, kind in enumerate(KINDS)}
DETAILS = (
    *("name", "op", "phase", "axis", "layer", "microbatch", "stage", "chunk"),
    *("seq", "bytes", "flops"),
)


class Timeline(NamedTuple):
    """Events of a training step on the ranks in `shown`, a subset of all ranks.

    Attributes
    ----------
    events
        Dict from column name to an array with one value per event. Times are in ms since the first
        rank started the step: `start`, `until` (end of the wait for the last arrival; equal to
        `start` without a wait), `end`, and `posted` (time of the call). `kind` is an index into
        KINDS. `meeting` is the index of the call instance, and `by` is the rank that the call
        waited for, or -1 if it did not wait. The other columns are `rank`, `stream` and DETAILS.
    names
        For each column that contains codes, a dict from code to name.
    path
        Segments of the critical path.
    extents
        Start and end of the step on each shown rank in ms, shape [ranks, 2].
    peak
        Peak FLOP/s of one rank, or None if unknown.
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
    limit: int = _EVENTS,
    peak: float | None = None,
) -> Timeline:
    """Return the timeline of a step for as many ranks as fit within `limit` events.

    Parameters
    ----------
    calls
        Result of `calls_of(trace)`.
    path
        Critical path of the step.
    limit
        Maximum number of events.
    peak
        Peak FLOP/s of a rank.
    """
    rows = np.flatnonzero(trace.events["step"] == step)
    ranks = trace.events["rank"][rows]
    shown = _representatives(trace, calls, path, np.bincount(ranks), limit)
    rows = rows[np.isin(ranks, shown)]
    names = {key: labels(trace, key) for key in ("op", "phase", "axis", "name")}
    of_step, begin, end = _step_bounds(trace, step)
    extents = np.stack([begin, end], -1)[np.searchsorted(of_step, shown)] - begin.min()
    columns = _times(trace, calls, begin.min(), rows) | {"kind": _kinds(trace, rows)}
    columns |= {key: event_values(trace, key, rows) for key in ("rank", "stream", *DETAILS)}
    axes = list(zip(trace.attrs["axes"].split(), trace.attrs["axis_sizes"]))
    if prod(size for _, size in axes) != trace.attrs["world_size"]:
        axes = []  # no mesh coordinates exist if stages have different numbers of replicas
    axes, names = sanitized_tree((axes, names))
    ranks = trace.attrs["world_size"]
    return Timeline(step, shown, ranks, axes, columns, names, path, extents * 1e-6, peak)


def other_steps(
    trace: Trace, calls: CallInstances, step: int, peak: float | None = None, limit: int = OTHERS
) -> list[Timeline]:
    """Return the timelines of all completed steps except `step`.

    If there are more than _STEPS steps, only the first, the longest, the last and evenly spaced
    steps are included.
    """
    steps, length = np.unique(trace.steps["step"]), slowest_seconds(trace)
    recorded = np.isin(steps, trace.events["step"])
    steps, length = steps[recorded], length[recorded]
    if len(steps) > _STEPS:
        even = np.linspace(0, len(steps) - 1, _STEPS - 1).astype(int)
        steps = np.unique(np.append(steps[even], steps[length.argmax()]))
    each = max(_MIN_EVENTS, limit // max(1, len(steps)))
    found = []
    with trace.events.keeping():
        for number, other in enumerate(steps[steps != step].tolist(), 1):
            log.info("computing timelines: step %d of %d", number, len(steps) - 1)
            path = critical_path(trace, calls, other)
            found.append(timeline(trace, calls, other, path, min(each, _EVENTS), peak))
    return found


def boxes(chart: Timeline) -> dict[str, Any]:
    """Return the boxes of a timeline as a dict from kind to [left, right, vertical position].

    `left` and `right` are times in ms. The vertical position is the index of the rank in
    `chart.shown`, plus the offset of the stream. A call has two boxes: one for its wait, and one
    for the remaining time.
    """
    events = chart.events
    row = np.searchsorted(chart.shown, events["rank"]) + lanes(events)[0]
    found = {}
    for kind, number in _KIND_INDEX.items():
        these = events["kind"] == number
        found[kind] = [events["until"][these], events["end"][these], row[these]]
    waited = events["until"] > events["start"]
    waits = [events["start"][waited], events["until"][waited], row[waited]]
    found["wait"] = [np.concatenate(parts) for parts in zip(found["wait"], waits)]
    return {kind: parts for kind, parts in found.items() if len(parts[0])}


def lanes(events: Mapping[str, np.ndarray]) -> tuple[np.ndarray, float]:
    """Return the vertical offset of each event from the center of its row, and the lane height.

    The row of a rank has height 1 and consists of one lane per stream.
    """
    streams, lane = np.unique(events["stream"], return_inverse=True)
    return ((lane - (len(streams) - 1) / 2) / len(streams)).astype("f4"), 1 / len(streams)


def rest(chart: Timeline) -> str:
    """Return the legend text for the background color, which fills the time between events.

    If ranks have several streams, a stream may be idle during this time.
    """
    return "unrecorded" if lanes(chart.events)[1] == 1 else "idle or unrecorded"


def path(chart: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """Return the critical path as two arrays: times in ms and timeline rows.

    The row is NaN for ranks that are not shown.
    """
    times = [time * 1e3 for each in chart.path for time in (each.start, each.end)]
    row = {rank: index for index, rank in enumerate(chart.shown)}
    rows = [row.get(each.rank, np.nan) for each in chart.path for _ in range(2)]
    return np.array(times), np.array(rows)


def _representatives(
    trace: Trace, calls: CallInstances, path: Sequence[PathSegment], events: np.ndarray, limit: int
) -> list[int]:
    """Return the sorted ranks to show in a timeline: all ranks or, if necessary, a selection.

    `events` is the number of events of each rank. If their sum exceeds `limit`, ranks are selected
    in this order until `limit` is reached: the first rank, the rank that causes the longest waits,
    the first rank of each stage, the ranks on the critical path, and evenly spaced ranks.
    """
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


def _times(trace, calls, first, rows):
    """Compute the columns `start`, `until`, `end`, `posted`, `meeting` and `by` for `rows`.

    `first` is the time at which the first rank starts the step, in ns on the clock of rank 0.
    """
    start = trace.events["t_global"][rows]
    end = start + trace.events["dur"][rows]
    until, meeting, by = start.copy(), np.full(len(rows), -1), np.full(len(rows), -1)
    mine, call = calls.among(rows)
    until[mine], meeting[mine] = start[mine] + calls.wait[call], calls.instance[call]
    by[mine] = np.where(calls.wait[call] > 0, calls.by[call], -1)
    posted = trace.events["posted"][rows] + start - trace.events["t_start"][rows]
    times = {"start": start, "until": until, "end": end, "posted": posted}
    times = {key: ((value - first) * 1e-6).astype("f4") for key, value in times.items()}
    return times | {"meeting": meeting, "by": by}


def _step_bounds(trace, step):
    """Return the ranks with events in a step, and the step's start and end time on each rank.

    Times are in ns on the clock of rank 0. The clock offset of a rank is taken from its first
    event in the step.
    """
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
    """Return the kind of each event as an index into KINDS.

    The kind is the phase for computation, and the category for all other events.
    """
    events = trace.events
    phase, category = (_kind_of_code(events.labels(key)) for key in ("phase", "category"))
    working = with_label(events, "category", ["compute"])[rows]
    return np.where(working, phase[events["phase"][rows]], category[events["category"][rows]])


def _kind_of_code(names):
    """Return an array of 256 indices into KINDS, one for each code of an enumerated column."""
    kinds = {"comm": "transfer", "compute": "other", "io": "host", "marker": "host"}
    number = np.full(256, _KIND_INDEX["other"])
    for code, name in names.items():
        number[code] = _KIND_INDEX.get(kinds.get(name, name), _KIND_INDEX["other"])
    return number
