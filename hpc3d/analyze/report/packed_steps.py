"""Compact encoding of the timelines on the HTML page. The decoder is page/steps.js.

A column is an array of integers or floats. Its bytes are shuffled (the first byte of all
values, then the second byte, and so on), compressed with zlib and encoded in base64. All steps
repeat the same work, so most columns are identical in several steps. Therefore, each distinct
column is stored only once.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpc3d.analyze.report.step_timeline import Timeline, lanes

_TICKS = 2**30  # maximum number of ticks (units of time) in a step
_FINEST = 1e-4  # minimum duration of a tick in ms


def packed(charts: Sequence[Timeline]) -> dict[str, Any]:
    """Encode timelines as JSON data.

    Returns
    -------
    dict
        "pool" contains the distinct arrays. "steps" is a dict from step to its data, in which
        columns are indices into the pool. "first" is the step that the page shows initially.
    """
    pool: dict[tuple[str, str], int] = {}
    steps = {str(chart.step): _step(chart, pool) for chart in charts}
    return {"first": str(charts[0].step), "pool": [[*each] for each in pool], "steps": steps}


def _step(chart, pool):
    end = float(chart.extents.max())
    tick = max(_FINEST, end / _TICKS)
    times = [time * 1e3 for each in chart.path for time in (each.start, each.end)]
    ranks = np.repeat([each.rank for each in chart.path], 2)
    line = {"time": _ticks(times, tick), "rank": ranks}
    begin, finish = chart.extents.T
    rest = {
        "rank": np.array(chart.shown),
        "start": _ticks(begin, tick),
        "end": _ticks(finish, tick),
    }
    return {
        "tick": tick,
        "end": end,
        "ranks": chart.shown,
        "columns": _stored(_columns(chart, tick), pool),
        "path": _stored(line, pool),
        "rest": _stored(rest, pool),
    }


def _stored(columns: Mapping[str, np.ndarray], pool):
    """Add new columns to the pool, and return a dict from column name to index in the pool."""
    texts = {key: _text(_small(values)) for key, values in columns.items()}
    return {key: pool.setdefault(text, len(pool)) for key, text in texts.items()}


def _text(values):
    """Return an array's type code, such as "u2", and its shuffled, compressed bytes in base64."""
    planes = values.astype(values.dtype.newbyteorder("<")).view("u1").reshape(-1, values.itemsize)
    data = zlib.compress(planes.T.tobytes(), 9)
    return f"{values.dtype.kind}{values.itemsize}", base64.b64encode(data).decode()


def _columns(chart, tick):
    """Return the event columns of a timeline, with times converted to integer ticks.

    Times and sequence numbers are stored as differences, because small values compress better.
    """
    events = dict(chart.events)
    start, until, end, posted = (events.pop(key) for key in ("start", "until", "end", "posted"))
    begun = _ticks(start, tick)
    times = {
        "after": np.diff(begun, prepend=0),
        "took": _ticks(end, tick) - begun,
        "wait": _ticks(until, tick) - begun,
        "early": begun - _ticks(posted, tick),
    }
    seq = np.diff(events.pop("seq"), prepend=0)
    return {**events, **times, "seq": seq, "lane": lanes(chart.events)[0]}


def _ticks(times, tick):
    return np.rint(np.asarray(times, "f8") / tick).astype("i8")


def _small(values):
    """Convert an array to the smallest dtype that holds its values and exists in JavaScript."""
    if values.dtype.kind == "f":
        return values.astype("f4")
    bounds = (int(values.min(initial=0)), int(values.max(initial=0)))
    small = np.result_type(*map(np.min_scalar_type, bounds))
    return values.astype("f8" if small.itemsize == 8 else small)
