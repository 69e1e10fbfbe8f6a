"""What a run recorded before the attempt that goes on with it now.

    RUN/trace-1.h5, RUN/trace-2.h5, ...     the trace as it was when the next attempt began

An attempt begins with the step after its checkpoint.  What was done from that step on is undone:
it stays in the file of its attempt.  What was done before is continued, where the work is shared
out in the same way: the numbers of calls go on, and so do times, by the clock of the host.  Where
that was started again, or it is another host, all times of the attempt are moved by the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.trace import schema
from hpc3d.trace.reader import Trace
from hpc3d.trace.segment import Segment, read_segment, segment_path
from hpc3d.trace.trace_config import tables_of

if TYPE_CHECKING:
    from hpc3d.trace.schema import Column
    from hpc3d.trace.table import Table

_ASIDE = re.compile(r"trace-(\d+)\.h5")
_TIMES = ("t_start", "t_end", "posted", "t_local")
_OF_TRAIN = "batch", "dtype", "orthogonalize", "product_dtype", "product_scale"
_NEVER = np.iinfo(np.int64).max  # later than any time
_SMALL = {
    "steps": schema.STEPS,
    "memory": schema.MEMORY,
    "clock_samples": schema.CLOCK_SAMPLES,
    "evaluation": schema.EVALUATION,
    "experts": schema.EXPERTS,
    "routers": schema.ROUTERS,
    "clock_model": schema.CLOCK_MODEL,
}


@contextmanager
def earlier(run_dir: Path, count: Mapping[int, int]) -> Iterator[Earlier | Nothing]:
    """What a run's segments, `count[rank]` of them, go on from: an Earlier, or Nothing."""
    with ExitStack() as stack:
        began: Any = _begin(run_dir, count) if aside(run_dir) else None
        try:
            found = began and _before(stack, run_dir, began)
        except ValueError as error:
            found = Nothing(f"steps before {began.step}: {error}")
        yield found or Nothing()


def _before(stack: ExitStack, run_dir: Path, began: _Begin) -> Earlier | Nothing | None:
    """What the attempt that `began` goes on from, all of which can be read; None without any.

    The `stack` closes its file.
    """
    for path in aside(run_dir):
        trace = stack.enter_context(Trace(path))
        if not (trace.steps["step"] < began.step).any():
            continue
        if _shared(trace.attrs) != _shared(began.header):
            return Nothing(f"steps before {began.step}: of another layout, in {path.name}")
        found = Earlier(trace, began)
        for rank in found.ranks:
            found.parts(rank)
        return found
    return None


def aside(run_dir: Path) -> list[Path]:
    """The traces of earlier attempts, the latest first."""
    found = {path: _ASIDE.fullmatch(path.name) for path in run_dir.glob("trace-*.h5")}
    numbers = {path: int(match[1]) for path, match in found.items() if match}
    return sorted(numbers, key=lambda path: numbers[path], reverse=True)


class _Begin(NamedTuple):
    """The first step of an attempt, when each rank began, raw in ns, and the header of a rank."""

    step: int
    times: dict
    header: dict


def _begin(run_dir: Path, count: Mapping[int, int]) -> _Begin | None:
    """The _Begin of the attempt with `count[rank]` segments; None if no part of a step is
    there."""
    steps, times = [], {}
    header: dict[str, Any] = {}
    for rank in count:
        part = _first_segment(run_dir, rank, count[rank])
        if part is None:
            continue
        step, header = part.events["step"], header or part.header
        steps.append(int(step[step >= 0].min()))
        times[rank] = int(part.events["t_start"].min())
    return _Begin(min(steps), times, header) if steps else None


def _first_segment(run_dir: Path, rank: int, count: int) -> Segment | None:
    """The first segment of a rank that has a part of a step and can be read."""
    for number in range(count):
        try:
            part = read_segment(segment_path(run_dir, rank, number), rank)
        except ValueError:
            continue
        if (part.events["step"] >= 0).any():
            return part
    return None


def _shared(attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """How work is shared out, by the attributes of a trace or the header of a segment."""
    axes = attrs["axes"]
    mesh = axes.split() if isinstance(axes, str) else axes
    return attrs["world_size"], mesh, attrs["axis_sizes"], work(attrs["config"])


def work(config: str) -> Any:
    """Return the settings of a configuration, TOML, that decide what a step computes.

    A key that the configuration lacks has its default: an older run did what the default does.
    """
    from hpc3d.config.input_file import Config, ModelConfig
    from hpc3d.config.load import to_toml
    from hpc3d.model.families import with_epsilon

    try:
        tree = tables_of(config)
        kind = tree.get("model", {}).get("kind", ModelConfig.kind)
        defaults = tables_of(to_toml(Config(model=with_epsilon(ModelConfig(kind=kind)))))
        mesh, parallel, model, train = (
            defaults[name] | tree.get(name, {}) for name in ("mesh", "parallel", "model", "train")
        )
        clock = tree.get("trace", {}).get("clock")
        return [mesh, parallel, model, *map(train.get, _OF_TRAIN), clock]
    except (ValueError, TypeError, AttributeError, KeyError):
        return config


class Nothing:
    """No trace to go on from; `missing` says what of the run is elsewhere."""

    ranks, created = (), None

    def __init__(self, *missing: str) -> None:
        self.missing = missing

    def parts(self, rank: int) -> list[Segment]:
        """What a rank did before, as segments."""
        return []

    def followed(self, segment: Segment) -> Segment:
        """A segment that comes after that."""
        return segment

    def clock(self, rank: int) -> np.ndarray:
        """The rows of its clock model."""
        return np.zeros(0, schema.record_type(schema.CLOCK_MODEL))


class Earlier:
    """The part of a trace that an attempt goes on from: `ends` of its ranks are how many rows they
    have and until when, raw in ns; what follows is moved by `shift` ns and by `number` calls."""

    missing = ()

    def __init__(self, trace: Trace, began: _Begin) -> None:
        self.trace, self.first, self.now = trace, began.step, began.header
        self.created = trace.attrs.get("created_utc", "")
        self.ranks = range(trace.attrs["world_size"])
        self.tables = {name: _records(getattr(trace, name), _SMALL[name]) for name in _SMALL}
        self.ends = [self.end(rank) for rank in self.ranks]
        self.number = 1 + max(self.column(rank, "seq").max(initial=-1) for rank in self.ranks)
        self.shift = self.moved(began)

    def column(self, rank: int, name: str) -> np.ndarray:
        """A column of the events of a rank that were not undone."""
        start, count = self.trace.rows(rank).start, self.ends[rank][0]
        return self.trace.events[name, start : start + count]

    def end(self, rank: int) -> tuple[int, int]:
        """How many events of a rank were not undone, and when the last of them ended."""
        rows, steps = self.trace.rows(rank), self.of(rank, "steps")
        start, step, dur = (self.trace.events[name, rows] for name in ("t_start", "step", "dur"))
        undone = start[step >= self.first], steps["t_start"][steps["step"] >= self.first]
        count = np.searchsorted(start, np.concatenate(undone).min(initial=_NEVER))
        done = steps["t_end"][steps["step"] < self.first]
        last = max((start + dur)[:count].max(initial=0), done.max(initial=0))
        return int(count), int(last)

    def of(self, rank: int, name: str) -> np.ndarray:
        """The rows of a rank in a table other than the events."""
        return self.tables[name][self.tables[name]["rank"] == rank]

    def moved(self, began: _Begin) -> int:
        """0 where the clock of every rank went on; else as much as the clock on the wall says, or
        as is needed."""
        late = max(self.ends[rank][1] - time for rank, time in began.times.items())
        if late < 0:
            return 0
        rank, time = next(iter(began.times.items()))
        wall = _wall_seconds(self.created, began.header["created_utc"]) * 10**9
        return max(late + 1, wall - time + int(self.column(rank, "t_start")[:1].sum()))

    def parts(self, rank: int) -> list[Segment]:
        count, _ = self.ends[rank]
        events = np.zeros(count, schema.record_type(schema.EVENTS))
        for column in schema.EVENTS:
            events[column.name] = self.column(rank, column.name)
        events["parent"] -= np.where(events["parent"] < 0, 0, self.trace.rows(rank).start)
        by_step = (self.of(rank, name) for name in ("steps", "memory", "experts", "routers"))
        steps, memory, *of_experts = (rows[rows["step"] < self.first] for rows in by_step)
        evaluation = self.tables["evaluation"] if rank == 0 else self.tables["evaluation"][:0]
        evaluation = evaluation[evaluation["step"] < self.first]
        others = steps, memory, self.of(rank, "clock_samples"), evaluation, *of_experts
        return [Segment(self.header(rank), events, *others)] if count else []

    def header(self, rank: int) -> dict[str, Any]:
        """The header of the attempt that goes on, as if that of a segment of a rank."""
        names = "local_rank", "device", "pid", "coords", "dropped", "host_id"
        own = {name: self.trace.ranks[name, rank : rank + 1].tolist()[0] for name in names}
        groups = [{"axis": axis, "members": members} for axis, members in self.trace.groups]
        known = own["host_id"] >= 0
        own |= {"rank": rank, "host": self.trace.strings[own["host_id"]] if known else ""}
        own["node"] = None  # of this attempt: nothing says that the rank is where it was
        return self.now | own | {"groups": groups, "strings": self.trace.strings}

    def followed(self, segment: Segment) -> Segment:
        for table in segment[1:]:
            for name in {*_TIMES} & {*(table.dtype.names or ())}:
                table[name] += self.shift
        segment.events["seq"] += np.where(segment.events["seq"] < 0, 0, self.number)
        return segment

    def clock(self, rank: int) -> np.ndarray:
        return self.of(rank, "clock_model")


def _records(table: Table, columns: Sequence[Column]) -> np.ndarray:
    """A table as a record array."""
    rows = np.zeros(len(table), schema.record_type(columns))
    for column in columns:
        rows[column.name] = table[column.name]
    return rows


def _wall_seconds(before: str, after: str) -> int:
    """From one time in ISO 8601 to another; 0 where one is not a time."""
    try:
        return int(
            (datetime.fromisoformat(after) - datetime.fromisoformat(before)).total_seconds()
        )
    except ValueError:
        return 0
