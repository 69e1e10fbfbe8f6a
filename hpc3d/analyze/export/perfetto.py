"""Export to the Trace Event Format, for ui.perfetto.dev and chrome://tracing.

Each rank is a process, and each of its streams is a thread. Each event is a slice whose arguments
contain the columns of the event. Arrows connect a send to its receive, and the last call posted in
a collective to the calls that waited for it. Perfetto's documentation describes the format under
"Trace Event Format" (docs/getting-started/other-formats).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.trace.schema import STREAM

if TYPE_CHECKING:
    from hpc3d.analyze.export.events import Events

_STEPS = -1  # thread ID of the row that shows the training steps


def write(events: Events, folder: Path) -> Path:
    """Write perfetto.json and return its path."""
    path = folder / "perfetto.json"
    write_records(path, {"displayTimeUnit": "ms"}, _lines(events))
    return path


def write_records(path: Path, head: dict[str, Any], lines: Iterable[dict[str, Any]]) -> None:
    """Write a JSON object: the items of `head` and a list "traceEvents", one event per line."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        for number, line in enumerate(lines):
            file.write(("," if number else "") + json.dumps(line) + "\n")
        file.write("]}\n")


def _lines(events):
    yield from _processes(events)
    for rank, step, begin, end in events.steps:
        yield _slice(f"step {step}", "step", begin, end, rank, _STEPS, {"step": step})
    for rows in events.rows:
        yield from _slices(events, rows)
    yield from _arrows(events)


def _processes(events):
    for rank, rows in enumerate(events.rows):
        # Show only coordinates along mesh axes with more than one rank.
        coords = zip(events.axes, events.coords[rank])
        shown = " ".join(f"{axis}={index}" for (axis, size), index in coords if size > 1)
        name = f"rank {rank} ({shown})" if shown else f"rank {rank}"
        clock = "" if events.one_time else "CPU time of this rank"
        labels = filter(None, (name, events.hosts.get(rank), clock))
        yield _meta("process_name", rank, 0, name=", ".join(labels))
        yield _meta("process_sort_index", rank, 0, sort_index=rank)
        yield _meta("thread_name", rank, _STEPS, name="steps")
        streams = np.unique(events.columns["stream"][rows]).tolist()
        for stream in streams:
            role = f", {STREAM[stream]}" if any(streams) and stream < len(STREAM) else ""
            yield _meta("thread_name", rank, stream, name=f"stream {stream}{role}")


def _meta(what, rank, thread, **values):
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": values}


def _slice(name, category, begin, end, rank, thread, values):
    """Return the record of a slice, with the times converted from ns to microseconds."""
    times = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
    lane = {"pid": rank, "tid": thread}
    return {"name": name, "cat": category, "ph": "X", **times, **lane, "args": values}


def _slices(events, rows):
    names = events.names
    for row in records(events, rows):
        values = {key: names[key].get(row[key], "") for key in ("phase", "op", "axis")}
        indices = ("step", "stage", "chunk", "layer", "microbatch", "seq", "peer")
        values |= {key: row[key] for key in indices if row[key] >= 0}
        values |= {key: row[key] for key in ("bytes", "flops") if row[key] > 0}
        if row["seq"] >= 0:
            values["posted_us"] = row["posted"] / 1e3
        if row["wait"] > 0:
            values["wait_us"] = row["wait"] / 1e3
        category = names["category"].get(row["category"], "")
        name = names["name"].get(row["name"], "")
        yield _slice(name, category, row["start"], row["end"], row["rank"], row["stream"], values)


def records(events: Events, rows: slice) -> Iterator[dict[str, Any]]:
    """Iterate over the events in a range of rows. Each event is a dict from column to value."""
    columns = {key: values[rows].tolist() for key, values in events.columns.items()}
    return (dict(zip(columns, values)) for values in zip(*columns.values()))


def _arrows(events):
    """For each arrow, yield a start record and an end record with the same ID.

    An arrow starts when the first call is posted, and ends just before the second call returns.
    """
    columns = events.columns
    source, target = events.links.T
    ends = np.maximum(columns["end"][target] - 1, columns["start"][target])
    tail = [columns[key][source].tolist() for key in ("posted", "rank", "stream")]
    head = [ends.tolist(), *(columns[key][target].tolist() for key in ("rank", "stream"))]
    ops = columns["op"][target].tolist()
    for number, (op, *ends) in enumerate(zip(ops, *tail, *head), 1):
        arrow = {"name": events.names["op"].get(op, ""), "cat": "flow", "id": number}
        yield {**arrow, "ph": "s", "ts": ends[0] / 1e3, "pid": ends[1], "tid": ends[2]}
        yield {**arrow, "ph": "f", "bp": "e", "ts": ends[3] / 1e3, "pid": ends[4], "tid": ends[5]}
