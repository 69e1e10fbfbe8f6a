"""What ranks of a run that goes on do inside of its steps, from the newest segment of each.

They write one every half minute and when they end (hpc3d.trace.segment).  Files are only read, and
those that cannot be are passed over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpc3d.trace.schema import CATEGORY, MESSAGE_CODES
from hpc3d.trace.segment import Segment, count_segments, read_segment, segment_path

_COMM = CATEGORY.index("comm")


class Axes(NamedTuple):
    """Shares of the time of a step, means of `ranks` in `steps`: axis -> the share in calls, and
    that of waiting for members that came later.  `late` counts of whom: rank -> calls that it was
    the last to join."""

    ranks: int
    steps: range
    calls: dict[str, float]
    waits: dict[str, float]
    late: Counter[int]


class NewestSegments:
    """The newest segments of a run, which are read again when there are others."""

    def __init__(self, run: Path) -> None:
        self.run, self.counts = run, dict[int, int]()
        self.found: Axes | None = None

    def axes(self) -> Axes | None:
        """The Axes of these segments, None without any with a step."""
        counts = count_segments(self.run)
        if counts != self.counts:
            self.counts = counts
            self.found = _inside([*self._readable()])
        return self.found

    def _readable(self) -> Iterator[Segment]:
        for rank, count in self.counts.items():
            try:
                yield read_segment(segment_path(self.run, rank, count - 1), rank)
            except ValueError:
                continue


def _inside(segments: Sequence[Segment]) -> Axes | None:
    if not any(len(segment.steps) for segment in segments):
        return None
    spent = sum(int((each.steps["t_end"] - each.steps["t_start"]).sum()) for each in segments)
    calls, waits, late = _calls(segments)
    numbers = np.concatenate([segment.steps["step"] for segment in segments])
    return Axes(
        len(segments),
        range(int(numbers.min()), int(numbers.max()) + 1),
        {axis: blocked / spent for axis, blocked in calls.items()},
        {axis: waits[axis] / spent for axis in calls},
        late,
    )


def _calls(segments: Sequence[Segment]) -> tuple[Counter[str], Counter[str], Counter[int]]:
    """Nanoseconds in calls and of waiting, by axis, and who was last.  A call of a group waits
    until the last of its members has made it; a message is waited for as long as it takes."""
    calls, waits, late = Counter[str](), Counter[str](), Counter[int]()
    joined: dict[tuple, list[tuple[int, int, int]]] = {}
    for segment in segments:
        rows = segment.events[
            (segment.events["category"] == _COMM) & (segment.events["step"] >= 0)
        ]
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
            continue  # another segment has the others
        last, who, *_ = max(arrivals)
        late[who] += 1
        waits[axis] += sum(max(0, min(end, last) - start) for _, _, start, end in arrivals)
    return calls, waits, late
