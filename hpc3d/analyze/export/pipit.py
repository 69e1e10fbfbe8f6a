"""The CSV that Pipit reads: a row where a rank enters and a row where it leaves an event.

    pipit.Trace.from_csv("pipit.csv")

A process is a rank, and where ranks have several streams a thread is one of them, for events of
two streams do not lie in each other.  Pipit sorts by time and may swap rows of one time, so no two
rows of a stream have the same: a row that would is some nanoseconds late.
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
    places = [events.columns["rank"]]
    if events.columns["stream"].any():
        places.append(events.columns["stream"])
    where = np.transpose(places).tolist()
    words = {True: "Enter", False: "Leave"}
    lines = zip(times.tolist(), enters.tolist(), rows.tolist())
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        heading = ["Timestamp (s)", "Event Type", "Name", "Process", "Thread"]
        writer.writerow(heading[: 3 + len(places)])
        for time, enter, row in lines:
            seconds = f"{time // 10**9}.{time % 10**9:09}"
            writer.writerow([seconds, words[enter], names[row], *where[row]])
    return path


def _sequence(events):
    """Time, whether it is an entry, and the event, of each row of the file, in order of time."""
    streams = events.columns["stream"]
    found = [
        _of_stream(events.columns, rows.start + np.flatnonzero(streams[rows] == stream))
        for rows in events.rows
        for stream in np.unique(streams[rows])
    ]
    times, enters, rows = (np.concatenate(parts) for parts in zip(*found))
    order = np.argsort(times, kind="stable")
    return times[order], enters[order], rows[order]


def _of_stream(columns, own):
    """The rows of a rank's stream, whose events are `own`, each at a time of its own."""
    times, enters, places = visits(columns["start"][own], columns["end"][own])
    count = np.arange(len(times))
    return np.maximum.accumulate(times - count) + count, enters, own[places]


def visits(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The order in which events that lie in each other, sorted by start, are entered and left.

    Returns the times [2 events], whether each is an entry, and the place of the event.  Where two
    have one time, leaving comes first and inner events leave before outer ones, but an event of
    no duration is entered before it is left.
    """
    place, empty = np.arange(len(start)), start == end
    times = np.concatenate([start, end])
    enters = np.arange(len(times)) < len(start)
    leaves_first = ~enters & ~np.tile(empty, 2)
    turn = np.where(leaves_first, -np.tile(place, 2), np.tile(place, 2))
    order = np.lexsort((~enters, turn, ~leaves_first, times))
    return times[order], enters[order], np.tile(place, 2)[order]


def region_names(events: Events) -> list[str]:
    """What each event is called: a call with the axis that it goes along."""
    columns, names = events.columns, events.names
    pairs = zip(columns["name"].tolist(), columns["axis"].tolist())
    axes = {code: f" {axis}" if axis else "" for code, axis in names["axis"].items()}
    return [names["name"].get(name, "") + axes.get(axis, "") for name, axis in pairs]
