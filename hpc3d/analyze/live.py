"""A run as it goes: what its folder says now, in a few lines for a terminal.

The steps are those of metrics.jsonl, of which only what is new is read; what ranks do inside of a
step is that of the newest segment of each (hpc3d.analyze.newest_segments).  Files are only read.
"""

from __future__ import annotations

import math
import os
import platform
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hpc3d.analyze.newest_segments import Axes, NewestSegments
from hpc3d.plain import counted
from hpc3d.runtime.metrics_file import NAME, MetricsReader
from hpc3d.training.log import KEPT, duration

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", ".:-=+*%#"
_QUIET = 60  # seconds without a step, at least, after which a run is called silent
_TAIL = 2000  # bytes of a log that say how it ends
_RECENT = 20  # steps that tell how fast it is now
_LATE, _NAMED = 2, 3  # times its share of late calls that a rank is named for; ranks at most
_SHOWN = "seconds", "tokens_per_s", "communication", "peak_bytes", "time"  # of a step
_ENDS = (  # what stands in the log, and what it means
    ("stopped after step", "stopped"),
    (KEPT, "ended"),
    ("go on from the last checkpoint", "failed"),
    ("nothing was saved (checkpoint.every)", "failed"),
)
OVER = {meaning for _, meaning in _ENDS}


class LiveRun:
    """A run in a `folder`, as it is at each `update`; `bars` are eight letters of growing
    height."""

    def __init__(self, folder: Path, bars: str = BARS) -> None:
        self.folder, self.bars = folder, bars
        self.reader, self.segments = MetricsReader(folder), NewestSegments(folder)
        self._forget()

    def _forget(self) -> None:
        self.losses: list[float] = []
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self.evaluated: dict[str, Any] | None = None
        self.best: dict[str, Any] | None = None
        self.peak = self.incomplete = 0

    def update(self, now: float) -> None:
        """Read what is new; `now` are the seconds since 1970."""
        anew, records = self.reader.more()
        if anew:
            self._forget()
        for record in records:
            if "loss" in record and not _is_complete(record):
                self.incomplete += 1
            elif "loss" in record:
                self.losses.append(math.nan if record["loss"] is None else record["loss"])
                self.recent.append(record)
                self.peak = max(self.peak, record["peak_bytes"])
            elif (loss := record.get("validation_loss")) is not None:
                self.evaluated = record
                if self.best is None or loss < self.best["validation_loss"]:
                    self.best = record
        self.now, self.state = now, state(self.folder, self.recent, now)

    def line(self) -> str:
        """All of it in one line."""
        parts = [f"{self.folder.name}   {self.state}"]
        if self.recent:
            step, _, *left = self._progress()
            rate = f"{self.recent[-1]['tokens_per_s']:,.0f} tokens/s"
            parts = [f"{parts[0]}: {step}", f"loss {self.losses[-1]:.4f}", rate, *left[:1]]
        return ", ".join(parts)

    def screen(self, width: int) -> list[str]:
        """The lines about it, none wider than `width`; the first ends with its state."""
        name = self.folder.name[: max(8, width - len(self.state) - 3)]
        lines = [f"{name}   {self.state}"]
        if self.recent:
            lines += [*flow(self._progress(), width), *self._losses(width)]
            lines += [*flow(self._rates(), width), *flow(self._evaluations(), width)]
        if damaged := self.reader.damaged + self.incomplete:
            lines.append(f"{counted(damaged, 'damaged line')} of {NAME} left out")
        if axes := self.segments.axes():
            lines += ["", *self._axes(axes, width)]
        return [line[:width] for line in lines]

    def _progress(self) -> list[str]:
        last = self.recent[-1]
        done, steps = last["step"] + 1, last["steps"]
        parts = [f"step {done} of {steps}", f"{done / steps:.0%}"]
        seconds = median(record["seconds"] for record in [*self.recent][1:] or self.recent)
        if self.state not in OVER and done < steps:
            parts.append(f"{duration(seconds * (steps - done))} left")
            parts.append(f"the last {duration(max(0.0, self.now - last['time']))} ago")
        return parts

    def _losses(self, width: int) -> list[str]:
        text = f"loss {self.losses[-1]:.4f}, {self.losses[0]:.4f} at first"
        room = width - len(text) - 2
        if room < len(self.bars):
            return [text, sparkline(self.losses, width, self.bars)]
        return [f"{text}  {sparkline(self.losses, min(60, room), self.bars)}"]

    def _rates(self) -> list[str]:
        rate, seconds, share = (
            median(each[key] for each in self.recent)
            for key in ("tokens_per_s", "seconds", "communication")
        )
        return [
            f"{rate:,.0f} tokens/s",
            f"{duration(seconds)} a step",
            f"communication {share:.1%}",
            f"peak {self.peak / 1e6:,.1f} MB on the fullest rank",
        ]

    def _evaluations(self) -> list[str]:
        if not self.evaluated or not self.best:
            return []
        last, best = (
            f"{each['validation_loss']:.4f} after step {each['step']}"
            for each in (self.evaluated, self.best)
        )
        return [f"validation {last}", "the best so far" if last == best else f"best {best}"]

    def _axes(self, axes: Axes, width: int) -> Iterator[str]:
        first, last = axes.steps[0], axes.steps[-1]
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        yield f"{which}, means of {counted(axes.ranks, 'rank')}"
        yield "axis     in calls   waiting"
        for axis, share in sorted(axes.calls.items(), key=lambda each: -each[1]):
            bar = self.bars[-1] * round(min(40, width - 30) * axes.waits[axis])
            yield f"{axis:8s} {share:8.1%} {axes.waits[axis]:9.1%}  {bar}".rstrip()
        yield from flow(_late(axes), width)


def _is_complete(record: dict[str, Any]) -> bool:
    """Whether a step has every number that is shown of one."""
    return (record.get("steps") or 0) > 0 and all(record.get(key) is not None for key in _SHOWN)


def state(run: Path, steps: Sequence[dict[str, Any]], now: float) -> str:
    """Whether a run goes on; `steps` are its newest records."""
    log, lock = run / "train.log", run / "lock"
    works = _works(lock)
    begins = works and _changed(lock) > _changed(log)
    said = "" if begins else _tail(log)
    last = said.rfind("\nstep     loss")  # of the newest attempt
    for words, meaning in _ENDS:
        if said.find(words, max(last, 0)) >= 0:
            return meaning
    if works is False:
        return "failed"
    if begins or not steps:
        return "begins"
    silent = now - steps[-1]["time"]
    usual = median(record["seconds"] for record in steps)
    return "running" if silent < max(_QUIET, 5 * usual) else f"silent for {duration(silent)}"


def _works(lock: Path) -> bool | None:
    """Whether the process of rank 0 is alive; None if it is, or was, on another host."""
    match _tail(lock).split():
        case [_, number, _, host] if number.isdecimal() and host == platform.node():
            try:
                os.kill(int(number), 0)  # which sends nothing
            except (ProcessLookupError, OverflowError):
                return False
            except PermissionError:
                pass  # it is another user's
            return True
    return None


def _changed(path: Path) -> int:
    """When a file was written to last; long ago for a file that does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _tail(path: Path) -> str:
    """The end of a text."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _late(axes: Axes) -> list[str]:
    """Which ranks others waited for more often than for most."""
    total = axes.late.total()
    if not total:
        return []
    least = min(1.0, _LATE / axes.ranks) * total
    often = [each for each in axes.late.most_common(_NAMED) if each[1] >= least]
    if axes.ranks < _LATE or not often:
        return ["no rank is late more often than others"]
    parts = [f"rank {rank} in {count / total:.0%}" for rank, count in often]
    return [f"last to arrive: {parts[0]}", *parts[1:], f"of {total} calls"]


def flow(parts: Iterable[str], width: int) -> list[str]:
    """Parts with commas between them, in lines that end where the next part has no room."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return lines


def sparkline(values: Sequence[float], width: int, bars: str = BARS) -> str:
    """Values as bars of eight heights, at most `width`: each the mean of a stretch of them."""
    parts = np.array_split(np.asarray(values, float), min(width, len(values)))
    means = np.array([part.mean() for part in parts])
    low, high = np.nanmin(means, initial=np.inf), np.nanmax(means, initial=-np.inf)
    heights = np.nan_to_num((means - low) / ((high - low) or 1.0))
    found = (bars[round(7 * height)] for height in heights)
    return "".join(
        "?" if math.isnan(mean) else bar for mean, bar in zip(means, found, strict=True)
    )
