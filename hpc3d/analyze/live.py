"""Status of a live run for display in a terminal, read from the run folder.

Step records come from metrics.jsonl; each update reads only the new lines. Communication times
come from the newest trace segment of each rank (hpc3d.analyze.newest_segments). Nothing is
written to the folder.
"""

from __future__ import annotations

import math
import os
import platform
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hpc3d.analyze.newest_segments import AxisShares, NewestSegments
from hpc3d.console.sanitize import counted
from hpc3d.console.small_files import read
from hpc3d.runtime.metrics_file import NAME, VALIDATION_LOSS_OF, MetricsReader
from hpc3d.trace.trace_config import configured
from hpc3d.training.log import KEPT, STOPPED_AFTER, duration

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", ".:-=+*%#"
_QUIET = 60  # seconds without a new step after which the state contains the time
_TAIL = 2000  # number of bytes read from the end of the log to find the final state
_RECENT = 20  # number of recent steps used to compute the speed
# A rank is reported as a straggler if it is the last to arrive at a call at least _LATE times as
# often as the average rank. At most _NAMED stragglers are listed.
_LATE, _NAMED = 2, 3
_SHOWN = "seconds", "tokens_per_s", "communication", "peak_bytes", "time"  # step-record keys
_FAILED = (  # texts in the last line of train.log after a failure; the last one is in older logs
    "from the last checkpoint with --resume",
    "no checkpoint was saved; set checkpoint.every",
    "nothing was saved (checkpoint.every)",
)
OVER = {"ended", "stopped", "failed"}


class LiveRun:
    """State of the run in `folder` as of the last call to `update`.

    `bars` contains eight characters of increasing height, which are used to draw bar charts.
    """

    def __init__(self, folder: Path, bars: str = BARS) -> None:
        self.folder, self.bars = folder, bars
        self.reader, self.segments = MetricsReader(folder), NewestSegments(folder)
        self._reset()

    def _reset(self) -> None:
        self.losses: list[float] = []
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self.evaluated: dict[str, Any] | None = None
        self.best: dict[str, Any] | None = None
        self.peak = self.incomplete = 0

    def update(self, now: float) -> None:
        """Read the new records of metrics.jsonl. `now` is the Unix time in seconds."""
        restarted, records = self.reader.more()
        if restarted:
            self._reset()
        began = _began(self.folder)
        for record in records:
            if "loss" in record and not _is_complete(record):
                self.incomplete += 1
            elif "loss" in record:
                self.losses.append(math.nan if record["loss"] is None else record["loss"])
                if self.recent and self.recent[-1]["time"] < began <= record["time"]:
                    self.recent.clear()  # a resumed run may have another layout and speed
                    self.peak = 0
                self.recent.append(record)
                self.peak = max(self.peak, record["peak_bytes"])
            elif (loss := record.get("validation_loss")) is not None:
                self.evaluated = record
                if self.best is None or loss < self.best["validation_loss"]:
                    self.best = record
        self.now, self.state = now, state(self.folder, self.recent, now)

    def line(self) -> str:
        """Return the status of the run as a single line."""
        items = [f"{self.folder.name}   {self.state}"]
        if self.recent:
            done, _, *left = self._progress()
            rate = f"{self.recent[-1]['tokens_per_s']:,.0f} tokens/s"
            items = [f"{items[0]}: {done}", f"loss {self.losses[-1]:.4f}", rate, *left[:1]]
        return ", ".join(items)

    def screen(self, width: int) -> list[str]:
        """Return the status of the run as lines of at most `width` characters.

        The first line ends with the state, such as "running".
        """
        name = self.folder.name[: max(8, width - len(self.state) - 3)]
        lines = [f"{name}   {self.state}"]
        if self.recent:
            lines += [*flow(self._progress(), width), *self._losses(width)]
            lines += [*flow(self._rates(), width), *flow(self._evaluations(), width)]
        if damaged := self.reader.damaged + self.incomplete:
            lines.append(f"skipped {counted(damaged, 'damaged line')} of {NAME}")
        if axes := self.segments.axes():
            lines += ["", *self._axes(axes, width)]
        return [line[:width] for line in lines]

    def _progress(self) -> list[str]:
        last, starting = self.recent[-1], self.state.startswith("starting")
        done, steps = last["step"] + 1, last["steps"]
        if starting:  # the records are those of the previous attempt
            steps = _configured_steps(self.folder) or steps
        items = [f"{done:,} of {counted(steps, 'step')}", f"{done / steps:.0%}"]
        seconds = median(record["seconds"] for record in [*self.recent][1:] or self.recent)
        if not starting and self.state not in OVER and done < steps:
            items.append(f"{duration(seconds * (steps - done))} left")
            items.append(f"last step {duration(max(0.0, self.now - last['time']))} ago")
        return items

    def _losses(self, width: int) -> list[str]:
        text = f"loss {self.losses[-1]:.4f}, initially {self.losses[0]:.4f}"
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
            f"{duration(seconds)} per step",
            f"communication {share:.1%}",
            f"peak memory per rank up to {self.peak / 1e6:,.1f} MB",
        ]

    def _evaluations(self) -> list[str]:
        if not self.evaluated or not self.best:
            return []
        last, best = (
            f"{each['validation_loss']:.4f} after step {each['step']}"
            for each in (self.evaluated, self.best)
        )
        texts = [
            f"{key.removeprefix(VALIDATION_LOSS_OF)} {loss:.4f}"
            for key, loss in self.evaluated.items()
            if key.startswith(VALIDATION_LOSS_OF) and loss is not None
        ]
        best = "the best so far" if last == best else f"best {best}"
        return [f"validation {last}", best, *texts]

    def _axes(self, axes: AxisShares, width: int) -> Iterator[str]:
        first, last = axes.steps[0], axes.steps[-1]
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        yield f"{which}, mean of {counted(axes.ranks, 'rank')}"
        yield "axis     in calls   waiting"
        for axis, share in sorted(axes.calls.items(), key=lambda each: -each[1]):
            bar = self.bars[-1] * round(min(40, width - 30) * axes.waits[axis])
            yield f"{axis:8s} {share:8.1%} {axes.waits[axis]:9.1%}  {bar}".rstrip()
        yield from flow(_stragglers(axes), width)


def _is_complete(record: dict[str, Any]) -> bool:
    return (record.get("steps") or 0) > 0 and all(record.get(key) is not None for key in _SHOWN)


def state(run: Path, steps: Sequence[dict[str, Any]], now: float) -> str:
    """Return the state of a run, such as "running". `steps` contains its newest step records."""
    log, alive, began = run / "train.log", _is_alive(run / "lock"), _began(run)
    starting = alive and began > _modified(log)
    if final := not starting and _final_state(_tail(log)):
        return final
    if alive is False:
        return "failed"
    steps = [each for each in steps if each["time"] >= began]  # of the latest attempt
    if not steps:
        waited = now - began if began else 0.0
        return "starting" + f" for {duration(waited)}" * (waited >= _QUIET)
    silent = now - steps[-1]["time"]
    usual = median(record["seconds"] for record in steps)
    return "running" if silent < max(_QUIET, 5 * usual) else f"silent for {duration(silent)}"


def _final_state(log: str) -> str | None:
    """Return the final state of a run from the end of its log, or None if the run continues.

    The log of a resumed run contains the lines of all attempts.
    """
    last = log.rstrip("\n").rpartition("\n")[2]
    if any(text in last for text in _FAILED):
        return "failed"
    if not last.startswith(KEPT):
        return None
    begin = max(0, log.rfind("\nstep     loss"))  # of the latest attempt
    return "ended" if log.find(STOPPED_AFTER, begin) < 0 else "stopped"


def _began(run: Path) -> float:
    """Return the Unix time in seconds at which the latest attempt locked the folder, or 0."""
    return _modified(run / "lock")


def _configured_steps(run: Path) -> int | None:
    """Return train.steps of the configuration, or None if it is unknown."""
    with suppress(ValueError):
        steps = configured(read(run / "config.toml").decode(), "train", "steps")
        return steps if isinstance(steps, int) else None
    return None


def _is_alive(lock: Path) -> bool | None:
    """Return whether rank 0's process is alive, or None if unknown (remote host or no lock)."""
    match _tail(lock).split():
        case [_, number, _, host] if number.isdecimal() and host == platform.node():
            try:
                os.kill(int(number), 0)  # signal 0 only tests whether the process exists
            except (ProcessLookupError, OverflowError):
                return False
            except PermissionError:
                pass  # the process belongs to another user
            return True
    return None


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _tail(path: Path) -> str:
    """Return the last _TAIL bytes of a text file as a string, or "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _stragglers(axes: AxisShares) -> list[str]:
    """Return phrases that name the stragglers.

    A rank is a straggler if it is the last to arrive at a call at least _LATE times as often as
    the average rank.
    """
    total = axes.late.total()
    if not total:
        return []
    threshold = min(1.0, _LATE / axes.ranks) * total
    often = [each for each in axes.late.most_common(_NAMED) if each[1] >= threshold]
    if axes.ranks < _LATE or not often:
        return ["no rank is often the last to arrive"]
    items = [f"rank {rank} in {count / total:.0%}" for rank, count in often]
    return [f"last to arrive: {items[0]}", *items[1:], f"of {counted(total, 'call')}"]


def flow(items: Iterable[str], width: int) -> list[str]:
    """Join `items` with commas into lines of at most `width` characters."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 2 + len(item) <= width:
            lines[-1] += f", {item}"
        else:
            lines.append(item)
    return lines


def sparkline(values: Sequence[float], width: int, bars: str = BARS) -> str:
    """Return a bar chart of `values` as a string of at most `width` characters.

    Each character is a bar with one of eight heights. If there are more than `width` values, each
    bar shows the mean of several consecutive values.
    """
    runs = np.array_split(np.asarray(values, float), min(width, len(values)))
    means = np.array([run.mean() for run in runs])
    low, high = np.nanmin(means, initial=np.inf), np.nanmax(means, initial=-np.inf)
    heights = np.nan_to_num((means - low) / ((high - low) or 1.0))
    found = (bars[round(7 * height)] for height in heights)
    return "".join(
        "?" if math.isnan(mean) else bar for mean, bar in zip(means, found, strict=True)
    )
