"""Events recorded before a run was resumed.

    RUN/trace-1.h5, RUN/trace-2.h5, ...     trace of an attempt, saved when the next one began

The first start of a run and each resumption are called attempts.  An attempt begins with the step
after the checkpoint that it loads.  Events that earlier attempts recorded in this step or later
steps are superseded, and remain only in the files of these attempts.  Events of earlier steps are
included in the merged trace if the layout is the same.  The sequence numbers of calls and the host
clock times then continue from the earlier attempt.  If the host was rebooted or replaced, a
constant offset is added to all times of the new attempt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpc3d.trace import schema
from hpc3d.trace.reader import Trace
from hpc3d.trace.schema import Column
from hpc3d.trace.segment import TABLES, Segment, read_segment, segment_path
from hpc3d.trace.table import Table
from hpc3d.trace.trace_config import tables_of

_ASIDE = re.compile(r"trace-(\d+)\.h5")
_TIMES = ("t_start", "t_end", "posted", "t_local")
_OF_TRAIN = "batch", "dtype", "orthogonalize", "product_dtype", "product_scale"
_NEVER = np.iinfo(np.int64).max  # sentinel: later than any event
_OF_RANK_0 = "evaluation", "validation"  # tables without a column `rank`
_SMALL = {name: TABLES[name] for name in ("steps", "memory", *_OF_RANK_0, "experts", "routers")}
_SMALL |= {"clock_samples": schema.CLOCK_SAMPLES, "clock_model": schema.CLOCK_MODEL}


@contextmanager
def earlier(run_dir: Path, count: Mapping[int, int]) -> Iterator[Earlier | Nothing]:
    """Yield the earlier trace to which the current attempt of a resumed run appends its events.

    `count[rank]` is the number of segments that the rank has written in the current attempt.  If
    there is no earlier trace to continue, a `Nothing` object is yielded.
    """
    with ExitStack() as stack:
        began: Any = _begin(run_dir, count) if earlier_traces(run_dir) else None
        try:
            found = began and _before(stack, run_dir, began)
        except ValueError as error:
            found = Nothing([f"steps before {began.step}: {error}"])
        yield found or Nothing()


def _before(stack: ExitStack, run_dir: Path, began: _Begin) -> Earlier | Nothing | None:
    """Return the earlier trace that the current attempt continues, or None if there is none.

    `began` describes the start of the current attempt.  Returns a `Nothing` object if the earlier
    trace has a different layout.  Raises ValueError if the trace cannot be read.  The trace file
    remains open until `stack` is closed.
    """
    for path in earlier_traces(run_dir):
        trace = stack.enter_context(Trace(path))
        if not (trace.steps["step"] < began.step).any():
            continue
        if _shared(trace.attrs) != _shared(began.header):
            return Nothing(aside=f"{path.name}, steps before {began.step}")
        found = Earlier(trace, began)
        for rank in found.ranks:
            found.parts(rank)
        return found
    return None


def earlier_traces(run_dir: Path) -> dict[Path, int]:
    """Return the trace files of earlier attempts, latest first, with the attempts' numbers."""
    found = {path: _ASIDE.fullmatch(path.name) for path in run_dir.glob("trace-*.h5")}
    numbers = {path: int(match[1]) for path, match in found.items() if match}
    return dict(sorted(numbers.items(), key=lambda each: each[1], reverse=True))


def latest_with_steps(run_dir: Path) -> Path | None:
    """Return the trace of the latest earlier attempt that completed a step, if any."""
    for path in earlier_traces(run_dir):
        with suppress(ValueError), Trace(path) as trace:
            if len(trace.steps):
                return path
    return None


def traced_steps(run_dir: Path) -> set[int]:
    """Return the steps that the traces of earlier attempts contain."""
    found: set[int] = set()
    for path in earlier_traces(run_dir):
        with suppress(ValueError), Trace(path) as trace:
            found.update(trace.steps["step"].tolist())
    return found


class _Begin(NamedTuple):
    """Start of an attempt: its first step, the start time of each rank, and one segment header.

    Times are in ns on the rank's own clock.
    """

    step: int
    times: dict
    header: dict


def _begin(run_dir: Path, count: Mapping[int, int]) -> _Begin | None:
    """Return the start of the current attempt.

    `count[rank]` is the number of segments that the rank has written in this attempt.
    Returns None if no readable segment contains an event within a step.
    """
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
    """Return the first readable segment of a rank that contains an event within a step."""
    for number in range(count):
        try:
            part = read_segment(segment_path(run_dir, rank, number), rank)
        except ValueError:
            continue
        if (part.events["step"] >= 0).any():
            return part
    return None


def _shared(attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the settings that must be equal in all attempts.

    `attrs` holds the attributes of a trace, or the header of a segment.
    """
    axes = attrs["axes"]
    mesh = axes.split() if isinstance(axes, str) else axes
    return attrs["world_size"], mesh, attrs["axis_sizes"], work(attrs["config"])


def work(config: str) -> Any:
    """Return the settings of a TOML configuration that determine the computation in a step.

    Missing keys get their default values, which reproduce the behavior of older versions.
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
    """Used in place of `Earlier` if there is no earlier trace that the run can continue.

    `missing` lists earlier steps that cannot be read, and `aside` names the file of earlier steps
    that were trained with another layout.
    """

    ranks, created = (), None

    def __init__(self, missing: Sequence[str] = (), aside: str = "") -> None:
        self.missing, self.aside = missing, aside

    def parts(self, rank: int) -> list[Segment]:
        """Return the earlier events of a rank as segments."""
        return []

    def followed(self, segment: Segment) -> Segment:
        """Return a segment of the current attempt, shifted to follow the earlier segments."""
        return segment

    def clock(self, rank: int) -> np.ndarray:
        """Return the rows of a rank's clock model in the earlier trace."""
        return np.zeros(0, schema.record_type(schema.CLOCK_MODEL))


class Earlier:
    """Events of an earlier trace that precede the first step of the current attempt.

    For each rank, `ends` holds the number of these events and the end time of the last event, on
    the rank's own clock in ns.  In the segments of the current attempt, the offset `shift` (in ns)
    is added to all times, and `number` is added to the sequence numbers of calls. `aside` names
    the file of still earlier steps, which were trained with another layout.
    """

    missing = ()

    def __init__(self, trace: Trace, began: _Begin) -> None:
        self.trace, self.first, self.now = trace, began.step, began.header
        self.created = trace.attrs.get("created_utc", "")
        self.aside = trace.attrs.get("other_layout", "")
        self.ranks = range(trace.attrs["world_size"])
        self.tables = {name: _records(getattr(trace, name), _SMALL[name]) for name in _SMALL}
        self.ends = [self.end(rank) for rank in self.ranks]
        self.number = 1 + max(self.column(rank, "seq").max(initial=-1) for rank in self.ranks)
        self.shift = self.moved(began)

    def column(self, rank: int, name: str) -> np.ndarray:
        """Return a column of a rank's events before the first step of the current attempt."""
        start, count = self.trace.rows(rank).start, self.ends[rank][0]
        return self.trace.events[name, start : start + count]

    def end(self, rank: int) -> tuple[int, int]:
        """Return the number of events of a rank before this attempt, and the time they ended.

        This is the end of the last event or completed step, in ns on the rank's own clock.
        """
        rows, steps = self.trace.rows(rank), self.of(rank, "steps")
        start, step, dur = (self.trace.events[name, rows] for name in ("t_start", "step", "dur"))
        undone = start[step >= self.first], steps["t_start"][steps["step"] >= self.first]
        count = np.searchsorted(start, np.concatenate(undone).min(initial=_NEVER))
        done = steps["t_end"][steps["step"] < self.first]
        last = max((start + dur)[:count].max(initial=0), done.max(initial=0))
        return int(count), int(last)

    def of(self, rank: int, name: str) -> np.ndarray:
        """Return the rows of a rank in the table `name`, which must not be the event table."""
        return self.tables[name][self.tables[name]["rank"] == rank]

    def moved(self, began: _Begin) -> int:
        """Return the offset in ns to add to the times of the current attempt.

        The offset is 0 if no rank's clock has restarted.  Otherwise, it is computed from the wall
        clock, and is always large enough that the new events follow the earlier events.
        """
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
        of_rank_0 = (self.tables[name][: None if rank == 0 else 0] for name in _OF_RANK_0)
        evaluation, validation = (rows[rows["step"] < self.first] for rows in of_rank_0)
        samples = self.of(rank, "clock_samples")
        others = steps, memory, samples, evaluation, *of_experts, validation
        return [Segment(self.header(rank), events, *others)] if count else []

    def header(self, rank: int) -> dict[str, Any]:
        """Return a header for a rank's earlier events, based on the current attempt's header."""
        names = "local_rank", "device", "pid", "coords", "dropped", "host_id"
        own = {name: self.trace.ranks[name, rank : rank + 1].tolist()[0] for name in names}
        groups = [{"axis": axis, "members": members} for axis, members in self.trace.groups]
        known = own["host_id"] >= 0
        own |= {"rank": rank, "host": self.trace.strings[own["host_id"]] if known else ""}
        own["node"] = None  # unknown: the rank may have run on another node
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
    rows = np.zeros(len(table), schema.record_type(columns))
    for column in columns:
        rows[column.name] = table[column.name]
    return rows


def _wall_seconds(before: str, after: str) -> int:
    """Return `after` - `before` (ISO 8601 times) in seconds, or 0 if one of them is invalid."""
    try:
        passed = datetime.fromisoformat(after) - datetime.fromisoformat(before)
    except ValueError:
        return 0
    return int(passed.total_seconds())
