"""Export of trace events to the formats of other tools. Each exporter writes a file or folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.analyze.export import kineto, otf2_archive, perfetto, pipit
from hpc3d.analyze.export.events import Events
from hpc3d.analyze.metrics.columns import event_values, hosts, labels, recorded_steps, slices
from hpc3d.comm.grid import Grid
from hpc3d.console.sanitize import sanitized_tree
from hpc3d.trace.trace_config import one_time

if TYPE_CHECKING:
    from hpc3d.analyze.metrics.wait_states import CallInstances
    from hpc3d.trace.reader import Trace

COLUMNS = (
    *("rank", "step", "stream", "name", "category", "phase", "op", "axis", "layer", "microbatch"),
    *("stage", "chunk", "group", "seq", "peer", "bytes", "count", "dtype", "flops"),
)
_CODED = ("category", "phase", "op", "axis", "dtype", "name")
FORMATS = {
    "perfetto": perfetto.write,
    "pipit": pipit.write,
    "hta": kineto.write,
    "otf2": otf2_archive.write,
}


def events_of(
    trace: Trace, calls: CallInstances, first: int = 0, last: int | None = None
) -> Events:
    """Return the events of steps `first` to `last`, inclusive. The default is all steps.

    `calls` is the result of `calls_of(trace)`. Raises ValueError if these steps have no events.
    """
    step = trace.events["step"]
    chosen = (step >= first) & (step <= (step.max(initial=0) if last is None else last))
    rows = np.flatnonzero(chosen)
    if not len(rows):
        steps = f"{first} to {'the last one' if last is None else last}"
        raise ValueError(f"{trace.path}: no events of steps {steps}; {recorded_steps(trace)}")
    columns = {key: event_values(trace, key, rows) for key in COLUMNS}
    start = trace.events["t_global"][rows]
    shift, zero = start - trace.events["t_start"][rows], start.min()
    wait, shared = np.zeros(len(trace.events), "i8"), one_time(trace)
    wait[calls.row] = calls.wait * shared
    columns |= {
        "start": start - zero,
        "end": start + trace.events["dur"][rows] - zero,
        "posted": trace.events["posted"][rows] + shift - zero,
        "wait": wait[rows],
    }
    ranks = trace.attrs["world_size"]
    axes = list(zip(trace.attrs["axes"].split(), trace.attrs["axis_sizes"]))
    of_rank = slices(columns["rank"], ranks)
    return Events(
        columns=columns,
        names=sanitized_tree({key: labels(trace, key) for key in _CODED}),
        links=_links(calls, rows, len(trace.events)) if shared else np.zeros((0, 2), int),
        one_time=shared,
        steps=list(_steps(trace, first, last, shift, of_rank, zero)),
        rows=of_rank,
        groups=trace.groups,
        hosts=sanitized_tree(hosts(trace)),
        axes=sanitized_tree(axes),
        coords=_coords(trace, axes),
    )


def _coords(trace, axes):
    """Return the mesh coordinates of each rank.

    If the trace does not contain the coordinates, they are computed from the mesh sizes.
    """
    if "coords" in trace.ranks:
        return trace.ranks["coords"].tolist()
    grid = Grid(dict(axes))
    return [[*grid.coords(rank).values()] for rank in range(trace.attrs["world_size"])]


def _links(calls, rows, size):
    """Return pairs of dependent events as positions in `rows`, shape [pairs, 2].

    A pair consists of a send and the matching receive, or of two calls to a collective on
    different ranks, where the second call waited for the first.
    """
    ranks = calls.trace.attrs["world_size"]
    key = calls.instance.astype("i8") * ranks + calls.rank
    # A broadcast has two rows per rank, the call and its wait. A stable sort keeps their order.
    order = np.argsort(key, kind="stable")
    op = calls.trace.events["op"][calls.row]
    names = calls.trace.events.labels("op")
    receives = np.isin(op, [code for code, name in names.items() if name == "recv"])
    sender = calls.trace.events["peer"][calls.row]
    source = np.where(receives, sender, calls.by)
    wanted = np.flatnonzero((receives | (calls.wait > 0)) & (source != calls.rank))
    keys = calls.instance[wanted].astype("i8") * ranks + source[wanted]
    found = order[np.minimum(np.searchsorted(key[order], keys), max(0, len(order) - 1))]
    known = key[found] == keys
    index = np.full(size, -1)
    index[rows] = np.arange(len(rows))
    pairs = index[calls.row[np.stack([found[known], wanted[known]], -1)]]
    return pairs[(pairs >= 0).all(1)]


def _steps(trace, first, last, shift, of_rank, zero):
    """Yield (rank, step, start, end) for each completed step of each rank.

    Times are in ns since the start of the first exported event, on the clock of rank 0. The clock
    offset of a rank is taken from its first event.
    """
    table = [trace.steps[key].tolist() for key in ("rank", "step", "t_start", "t_end")]
    for rank, step, begin, end in zip(*table):
        own = shift[of_rank[rank]]
        if len(own) and first <= step and (last is None or step <= last):
            yield rank, step, begin + int(own[0]) - int(zero), end + int(own[0]) - int(zero)


def export(formats: Iterable[str], events: Events, folder: Path) -> list[Path]:
    """Write events in the given formats (keys of FORMATS), and return the output paths."""
    folder.mkdir(parents=True, exist_ok=True)
    return [FORMATS[name](events, folder) for name in formats]
