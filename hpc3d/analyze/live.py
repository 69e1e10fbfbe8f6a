"""A run as it goes: what its folder says now, in a few lines for a terminal.

The steps are those of metrics.jsonl.  What ranks do inside of a step is that of the newest
segment of each (hpc3d.trace.segment), which they write every half minute and when they end.  Files
are only read, and those that are being written are passed over.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from hpc3d.runtime import metrics_file
from hpc3d.trace.schema import CATEGORY, OP
from hpc3d.trace.segment import Segment, count_segments, read_segment, segment_path
from hpc3d.training.log import duration

_COMM = CATEGORY.index("comm")
_MESSAGES = [OP.index("send"), OP.index("recv")]
_BARS = "▁▂▃▄▅▆▇█"
_QUIET = 60  # seconds without a step, at least, after which a run is called silent
_ENDS = (  # what stands in the log, and what it means
    ("stopped after step", "stopped"),
    ("run kept in ", "ended"),
    ("go on from the last checkpoint", "failed"),
    ("nothing was saved (checkpoint.every)", "failed"),
)


class Axes(NamedTuple):
    """Shares of the time of a step, means of `ranks` in `steps`: axis -> the share in calls, and
    that of waiting for members that came later.  `late` counts of whom: rank -> calls that it was
    the last to join."""

    ranks: int
    steps: range
    calls: dict[str, float]
    waits: dict[str, float]
    late: Counter[int]


def screen(run: Path, width: int, now: float | None = None) -> list[str]:
    """The lines about a run, none wider than `width`."""
    records = metrics_file.read(run)
    steps = [record for record in records if "loss" in record]
    lines = [f"{run.name}   {state(run, steps, time.time() if now is None else now)}"]
    if steps:
        lines += [_progress(steps), _losses(steps, width), _rates(steps), *_evaluated(records)]
    if axes := inside(run):
        lines += ["", *_axes(axes, width)]
    return [line[:width] for line in lines]


def state(run: Path, steps: Sequence[dict[str, Any]], now: float) -> str:
    """Whether a run goes on."""
    log = run / "train.log"
    said = log.read_text(encoding="utf-8", errors="replace")[-2000:] if log.is_file() else ""
    last = said.rfind("\nstep     loss")  # of the newest attempt
    for words, meaning in _ENDS:
        if said.find(words, max(last, 0)) >= 0:
            return meaning
    if not steps:
        return "begins"
    silent = now - steps[-1]["time"]
    usual = median(record["seconds"] for record in steps[-20:])
    return "running" if silent < max(_QUIET, 5 * usual) else f"silent for {duration(silent)}"


def _progress(steps: Sequence[dict[str, Any]]) -> str:
    last = steps[-1]
    done, all_of_them = last["step"] + 1, last["steps"]
    seconds = median(record["seconds"] for record in steps[1:][-20:] or steps)
    left = seconds * (all_of_them - done)
    text = f"step {done} of {all_of_them}, {done / all_of_them:.0%}"
    return f"{text}, {duration(left)} left" if left else text


def _losses(steps: Sequence[dict[str, Any]], width: int) -> str:
    values = [math.nan if each["loss"] is None else each["loss"] for each in steps]
    text = f"loss {values[-1]:.4f}, {values[0]:.4f} at first  "
    return text + sparkline(values, max(8, min(60, width - len(text))))


def _rates(steps: Sequence[dict[str, Any]]) -> str:
    recent = steps[-20:]
    rate, seconds, share = (
        median(each[key] for each in recent)
        for key in ("tokens_per_s", "seconds", "communication")
    )
    peak = max(each["peak_bytes"] for each in steps)
    return (
        f"{rate:,.0f} tokens/s, {duration(seconds)} a step; communication {share:.1%}; "
        f"peak {peak / 1e6:,.1f} MB on the fullest rank"
    )


def _evaluated(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    found = [record for record in records if record.get("validation_loss") is not None]
    if found:
        best = min(found, key=lambda record: record["validation_loss"])
        yield (
            f"validation {found[-1]['validation_loss']:.4f} after step {found[-1]['step']}; "
            f"best {best['validation_loss']:.4f} after step {best['step']}"
        )


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as bars of eight heights, at most `width`: each the mean of a stretch of them."""
    parts = np.array_split(np.asarray(values, float), min(width, len(values)))
    means = np.array([part.mean() for part in parts])
    low, high = np.nanmin(means, initial=np.inf), np.nanmax(means, initial=-np.inf)
    heights = np.nan_to_num((means - low) / ((high - low) or 1.0))
    bars = (_BARS[round(7 * height)] for height in heights)
    return "".join("?" if math.isnan(mean) else bar for mean, bar in zip(means, bars, strict=True))


def _axes(axes: Axes, width: int) -> Iterator[str]:
    steps = axes.steps
    yield f"steps {steps[0]} to {steps[-1]}, means of {axes.ranks} ranks"
    yield "axis     in calls   waiting"
    for axis, share in sorted(axes.calls.items(), key=lambda each: -each[1]):
        bar = "█" * round(min(40, width - 30) * axes.waits[axis])
        yield f"{axis:8s} {share:8.1%} {axes.waits[axis]:9.1%}  {bar}".rstrip()
    if total := axes.late.total():
        (rank, count), *_ = axes.late.most_common(1)
        yield f"last to arrive: rank {rank}, in {count / total:.0%} of {total} calls"


# Inside of steps


def inside(run: Path) -> Axes | None:
    """The Axes of the newest segments, None where there are none with a step."""
    segments = [*_newest(run)]
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


def _newest(run: Path) -> Iterator[Segment]:
    """The last segment of each rank that can be read."""
    for rank, count in count_segments(run).items():
        try:
            yield read_segment(segment_path(run, rank, count - 1), rank)
        except ValueError:
            continue


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
            message = np.isin(own["op"], _MESSAGES)
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
