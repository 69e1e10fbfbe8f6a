"""Communication time by mesh axis during a live run, from the newest trace segments.

Each rank writes a segment every 30 seconds and when it exits (hpc3d.trace.segment). The newest
segments of two ranks may cover different steps. Only steps of all ranks count. Unreadable segments
are skipped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpc3d.trace.schema import CATEGORY, MESSAGE_CODES
from hpc3d.trace.segment import Segment, count_segments, read_segment, segment_path

_COMM = CATEGORY.index("comm")
_WITH_STEPS = "events", "steps"


class AxisShares(NamedTuple):
    """Shares of the step time spent in communication, by mesh axis.

    The shares are averages over `ranks` ranks and the range `steps` of training steps.

    Attributes
    ----------
    calls, waits
        Dicts from mesh axis to share of the step time: `calls` for all time spent in calls, and
        `waits` for the part spent waiting for late ranks.
    late
        Dict from rank to the number of collective calls at which this rank arrived last.
    """

    ranks: int
    steps: range
    calls: dict[str, float]
    waits: dict[str, float]
    late: Counter[int]


class NewestSegments:
    """Reader of the newest trace segments. Results are cached until new segments appear."""

    def __init__(self, run: Path) -> None:
        self.run, self.counts = run, dict[int, int]()
        self.found: AxisShares | None = None

    def axes(self) -> AxisShares | None:
        """Return the communication shares by axis, or None if no segment contains a step."""
        counts = count_segments(self.run)
        if counts != self.counts:
            self.counts = counts
            last = min((max(each.steps["step"]) for each in self._newest()), default=-1)
            self.found = _axis_shares(self._newest(last), int(last))
        return self.found

    def _newest(self, last: float = math.inf) -> list[Segment]:
        """Return the newest segment of each rank that contains a step up to `last`."""
        found = []
        for rank, count in self.counts.items():
            for number in reversed(range(count)):
                with suppress(ValueError):
                    segment = read_segment(segment_path(self.run, rank, number), rank)
                    if (segment.steps["step"] <= last).any():
                        found.append(segment)
                        break
        return found


def _axis_shares(segments: Sequence[Segment], last: int) -> AxisShares | None:
    """Return the shares of the steps up to `last` that all segments contain, or None."""
    first = max((int(min(each.steps["step"])) for each in segments), default=0)
    if first > last:
        return None
    segments = [
        each._replace(**{name: _rows(getattr(each, name), first, last) for name in _WITH_STEPS})
        for each in segments
    ]
    spent = sum(int((each.steps["t_end"] - each.steps["t_start"]).sum()) for each in segments)
    calls, waits, late = _calls(segments)
    return AxisShares(
        len(segments),
        range(first, last + 1),
        {axis: blocked / spent for axis, blocked in calls.items()},
        {axis: waits[axis] / spent for axis in calls},
        late,
    )


def _rows(table: np.ndarray, first: int, last: int) -> np.ndarray:
    return table[(table["step"] >= first) & (table["step"] <= last)]


def _calls(segments: Sequence[Segment]) -> tuple[Counter[str], Counter[str], Counter[int]]:
    """Return call and wait times in ns by axis, and the number of late arrivals by rank.

    In a collective, a rank waits until the last member has made the call. In a send or receive,
    the full duration counts as waiting.
    """
    calls, waits, late = Counter[str](), Counter[str](), Counter[int]()
    joined: dict[tuple, list[tuple[int, int, int]]] = {}
    for segment in segments:
        rows = segment.events[segment.events["category"] == _COMM]
        for number, group in enumerate(segment.header["groups"]):
            own = rows[rows["group"] == number]
            calls[group["axis"]] += int(own["dur"].sum())
            message = np.isin(own["op"], MESSAGE_CODES)
            waits[group["axis"]] += int(own["dur"][message].sum())
            key, rank = (group["axis"], *group["members"]), segment.header["rank"]
            own = own[~message & (own["seq"] >= 0)]
            times = own["seq"].tolist(), own["posted"].tolist(), own["t_start"].tolist()
            for seq, posted, start, dur in zip(*times, own["dur"].tolist(), strict=True):
                joined.setdefault((*key, seq), []).append((posted, rank, start, start + dur))
    for (axis, *members, _), arrivals in joined.items():
        if len(arrivals) < len(members):
            continue  # skip: other members' calls are in older or missing segments
        last, late_rank, *_ = max(arrivals)
        late[late_rank] += 1
        waits[axis] += sum(max(0, min(end, last) - start) for _, _, start, end in arrivals)
    return calls, waits, late
