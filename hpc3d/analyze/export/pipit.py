"""Export to a CSV file for Pipit, with one row for the start and one for the end of each event.

    pipit.Trace.from_csv("pipit.csv")

Each rank is a process. If ranks have several streams, each stream is a thread, because events of
different streams are not nested. Pipit sorts rows by timestamp and may swap rows with equal
timestamps. To avoid this, equal timestamps are increased by a few nanoseconds, so that all
timestamps of a stream are distinct.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.analyze.report.table_format import in_csv

if TYPE_CHECKING:
    from hpc3d.analyze.export.events import Events


def write(events: Events, folder: Path) -> Path:
    """Write pipit.csv and return its path."""
    path = folder / "pipit.csv"
    times, enters, rows = _sequence(events)
    names = [in_csv(name) for name in region_names(events)]
    lanes = [events.columns["rank"]]
    if events.columns["stream"].any():
        lanes.append(events.columns["stream"])
    lane = np.transpose(lanes).tolist()
    kinds = {True: "Enter", False: "Leave"}
    lines = zip(times.tolist(), enters.tolist(), rows.tolist())
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        heading = ["Timestamp (s)", "Event Type", "Name", "Process", "Thread"]
        writer.writerow(heading[: 3 + len(lanes)])
        for time, enter, row in lines:
            seconds = f"{time // 10**9}.{time % 10**9:09}"
            writer.writerow([seconds, kinds[enter], names[row], *lane[row]])
    return path


def _sequence(events):
    """Return the timestamp, entry flag and event index of each CSV row, in chronological order.

    Equal timestamps of a stream are increased until all of its timestamps are distinct.
    """
    columns, streams, found = events.columns, events.columns["stream"], []
    for rows in events.rows:
        for stream in np.unique(streams[rows]):
            own = rows.start + np.flatnonzero(streams[rows] == stream)
            times, enters, index = visits(columns["start"][own], columns["end"][own])
            count = np.arange(len(times))
            found.append((np.maximum.accumulate(times - count) + count, enters, own[index]))
    times, enters, rows = (np.concatenate(columns) for columns in zip(*found))
    order = np.argsort(times, kind="stable")
    return times[order], enters[order], rows[order]


def visits(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the entries and exits of nested events in chronological order.

    At equal times, exits precede entries, and inner events end before outer ones. An event of
    zero duration is entered before it is exited.

    Parameters
    ----------
    start, end
        Times of the events, sorted by start.

    Returns
    -------
    times, enters, index
        Time, flag (true for an entry, false for an exit), and index of the event. Each array has
        two elements per event.
    """
    index, empty = np.arange(len(start)), start == end
    times = np.concatenate([start, end])
    enters = np.arange(len(times)) < len(start)
    leaves_first = ~enters & ~np.tile(empty, 2)
    nesting = np.where(leaves_first, -np.tile(index, 2), np.tile(index, 2))
    order = np.lexsort((~enters, nesting, ~leaves_first, times))
    return times[order], enters[order], np.tile(index, 2)[order]


def region_names(events: Events) -> list[str]:
    """Return the name of each event. The name of a call includes its mesh axis."""
    columns, names = events.columns, events.names
    pairs = zip(columns["name"].tolist(), columns["axis"].tolist())
    axes = {code: f" {axis}" if axis else "" for code, axis in names["axis"].items()}
    return [names["name"].get(name, "") + axes.get(axis, "") for name, axis in pairs]
