"""Merge the segments of a run into one trace file, sorted by (rank, t_start).

Ranks are merged one at a time.  Peak memory is twice the size of one rank's events, plus one chunk
per column.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np

from hpc3d.console import small_files
from hpc3d.console.sanitize import counted
from hpc3d.runtime import metrics_file
from hpc3d.trace import schema
from hpc3d.trace.annotations import add_supplements, supplements
from hpc3d.trace.clock import IDENTITY, fit
from hpc3d.trace.file import Growing, create, write_table
from hpc3d.trace.previous_attempts import earlier, traced_steps
from hpc3d.trace.segment import TABLES, count_segments, read_segment, segment_path
from hpc3d.trace.trace_config import configured

log = logging.getLogger(__name__)
_WHERE = {"samples": "clock/samples"}  # path in the trace file, if it differs from the table name
# Header fields that must be equal on all ranks.
_SAME = ("run_id", "world_size", "axes", "axis_sizes")
_OWN = ("host", "local_rank", "device", "pid", "coords", "dropped")
RUN = (*_SAME, "created_utc", "time_unit", "config", "git", "mpi", "version")
_OPTIONAL = {"kind": "measured", "cores": 0, "transport": "", "node": None}


def merge(run_dir: Path | str) -> Path:
    """Merge the segments of a run into RUN/trace.h5 and return its path.

    An enclosing event precedes the events inside it.  Missing or damaged data is omitted: the
    attribute `complete` is then False, and `missing` lists the omitted data, one item per line.
    The trace of a resumed run includes its earlier attempts (previous_attempts.py).  An existing
    calibration or prediction of the run is kept.  Raises ValueError if no segment can be read.
    """
    run_dir, path = Path(run_dir), Path(run_dir) / "trace.h5"
    count = count_segments(run_dir)
    if not count:
        raise ValueError(f"{run_dir}: no trace segments to merge; specify a run folder")
    with (
        earlier(run_dir, count) as before,
        small_files.replacing(path) as temporary,
        create(temporary) as (file, disk),
    ):
        merged = _Merge(file, before)
        for rank in sorted({*count, *before.ranks}):
            log.info("merging the segments of rank %d of %d", rank, len(count))
            merged.add(rank, [segment_path(run_dir, rank, n) for n in range(count.get(rank, 0))])
            disk.check()
        trained = {each["step"] for each in metrics_file.read(run_dir) if "loss" in each}
        merged.finish(trained, traced_steps(run_dir) if before.aside else set(), _hosts(run_dir))
        file.attrs["segments"] = sum(count.values())
        add_supplements(file, *supplements(path, merged.run_id))
    return path


class _Merge:
    """Builder of a merged trace file.

    `before` provides the events that were recorded before the run was resumed, if any
    (previous_attempts.py).
    """

    def __init__(self, file, before):
        self.file, self.before = file, before
        self.tables = {
            name: Growing(file, _WHERE.get(name, name), columns)
            for name, columns in TABLES.items()
        }
        self.strings, self.groups = {}, {}
        self.headers, self.n_events, self.missing = {}, {}, []
        self.steps, self.begun = {}, {}  # completed steps and last started step of each rank
        # Clock models, keyed by node and by the first rank of each node.
        self.clocks, self.leaders = {}, {}

    @property
    def first(self):
        """Header of the first rank; the fields in _SAME must be equal on all ranks."""
        return next(iter(self.headers.values()))

    @property
    def run_id(self):
        return self.first["run_id"]

    def add(self, rank, paths):
        """Append the events and other tables of a rank, read from its segments at `paths`."""
        now = [self.before.followed(part) for part in self._read(rank, paths)]
        parts = self.before.parts(rank) + now
        if not parts:
            return
        header = _OPTIONAL | parts[-1].header
        self.headers[rank] = {key: header[key] for key in (*RUN, *_OWN, *_OPTIONAL)}
        # The last segment of each attempt, because `dropped` is cumulative.
        last = parts[: len(parts) - len(now)] + now[-1:]
        self.headers[rank]["dropped"] = sum(part.header["dropped"] for part in last)
        self._set_time(rank, now)
        self._renumber(parts)
        events, *others = (np.concatenate(tables) for tables in zip(*(part[1:] for part in parts)))
        del parts, now
        rest = dict(zip([*TABLES][1:], others))
        self.n_events[rank], self.steps[rank] = len(events), np.unique(rest["steps"]["step"])
        self.begun[rank] = events["step"].max(initial=self.steps[rank].max(initial=-1))
        self.tables["events"].append(_nested(events, self.tables["events"].rows))
        for name, rows in rest.items():
            self.tables[name].append(rows)

    def _read(self, rank, paths):
        """Yield the valid segments of a rank; add a line to `missing` for each invalid one."""
        for path in paths:
            try:
                part = read_segment(path, rank)
                self._check(part.header, path)
            except ValueError as error:
                self.missing.append(f"rank {rank}: {error}")
            else:
                yield part

    def _check(self, header, path):
        """Raise ValueError if a segment's header is not valid for this run."""
        absent = [key for key in (*RUN, *_OWN) if key not in header]
        if absent:
            raise ValueError(f"{path.name} lacks the header fields {', '.join(absent)}")
        first = self.first if self.headers else header
        if any(header[key] != first[key] for key in _SAME):
            raise ValueError(f"{path.name} belongs to another run")
        ranks = {header["rank"]}.union(*(group["members"] for group in header["groups"]))
        if not 0 <= min(ranks) <= max(ranks) < header["world_size"]:
            raise ValueError(f"{path.name} contains ranks beyond rank {header['world_size'] - 1}")

    def _set_time(self, rank, parts):
        """Convert event times to rank 0's clock, using clock samples of the node's first rank."""
        node = _node(self.headers[rank])
        if samples := [row for part in parts for row in part.samples.tolist()]:
            above = self.leaders.get(samples[0][-1], IDENTITY)
            self.leaders[rank] = self.clocks[node] = fit(samples, above)
        clock = self.clocks.setdefault(node, IDENTITY)
        for part in parts:
            part.events["t_global"] = clock.to_global(part.events["t_start"])

    def _renumber(self, parts):
        """Convert the indices in the segments of a rank.

        Afterwards, name and group indices are row numbers in the tables of the merged file, and
        parent indices are row numbers in the concatenated events of the rank.
        """
        rows = 0
        for part in parts:
            groups = [(group["axis"], tuple(group["members"])) for group in part.header["groups"]]
            for column, table, keys in (
                ("name", self.strings, part.header["strings"]),
                ("group", self.groups, groups),
            ):
                part.events[column] = _numbers(table, keys)[part.events[column]]
            part.events["parent"] += np.where(part.events["parent"] < 0, 0, rows)
            rows += len(part.events)

    def finish(self, trained, aside, hosts):
        """Write the tables that depend on all ranks; raise ValueError if no segment is valid.

        `trained` is the set of the steps in metrics.jsonl, `aside` contains those in the traces of
        attempts with another layout, and `hosts` is the result of `_hosts`.
        """
        if not self.headers:
            raise ValueError(f"no segment of the trace can be read: {self.missing[0]}")
        for table in self.tables.values():
            table.close()
        self.missing += self.before.missing
        ranks = range(self.first["world_size"])
        steps = np.unique(np.concatenate([*self.steps.values()]))
        for rank in self.headers:
            self.missing += [f"rank {rank}: {what}" for what in self._missing(rank, steps)]
        lost, of_run = np.setdiff1d([*trained - aside], steps).astype(int), []
        if self.before.missing:  # describes the steps of earlier attempts
            lost = lost[lost > min(steps, default=-1)]
        if len(lost):
            of_run.append(f"{_named(lost)}: trained, but not in any segment of the trace")
        wanted = configured(self.first["config"], "train", "steps")
        done = 1 + max([int(steps.max(initial=-1)), *trained])
        if self.first["kind"] == "measured" and isinstance(wanted, int) and done < wanted:
            what = (
                f"not trained, because the run has completed {done} of {counted(wanted, 'step')}"
            )
            of_run.append(f"steps from {done} on: {what}")
        absent = [rank for rank in ranks if rank not in self.headers]
        severe = [*(f"rank {rank}: no segment" for rank in absent), *of_run]
        self.missing = [*severe, *self.missing]
        self._write_ranks(ranks, hosts)
        self._write_groups()
        self._write_clock()
        write_table(self.file, "strings", schema.STRINGS, {"name": [*self.strings]})
        first = self.first | {"created_utc": self.before.created or self.first["created_utc"]}
        self.file.attrs.update(_attributes(first, self.headers.values(), self.missing))
        self.file.attrs["other_layout"] = self.before.aside

    def _missing(self, rank, steps):
        """List the missing data of a rank; `steps` are the steps that any rank has completed."""
        own, node, found = self.steps[rank], _node(self.headers[rank]), []
        absent, last = np.setdiff1d(steps, own), own.max(initial=-1)
        if (absent < last).any():
            found.append(_named(absent[absent < last]))
        if self.begun[rank] < max(self.begun.values()) or (absent > last).any():
            found.append(f"nothing after step {last}" if last >= 0 else "no complete step")
        elif self.begun[rank] > last:
            found.append(f"the end of step {self.begun[rank]}")
        apart = self.clocks[node] is IDENTITY and node != _node(self.first)
        if apart and self.first["kind"] == "measured":
            found.append("the synchronization of its clock with rank 0's clock")
        if dropped := self.headers[rank]["dropped"]:
            found.append(f"{counted(dropped, 'event')} dropped because its event table was full")
        return found

    def _write_ranks(self, ranks, hosts):
        unknown = dict.fromkeys(_OWN, -1) | {"host": "", "device": "", "dropped": 0}
        unknown["coords"] = [-1] * len(self.first["axes"])
        known = hosts if len(hosts) == len(ranks) else [""] * len(ranks)
        headers = [
            self.headers.get(rank, unknown | {"host": host}) for rank, host in zip(ranks, known)
        ]
        columns = {key: [header[key] for header in headers] for key in _OWN}
        columns["rank"] = ranks
        columns["host_id"] = _numbers(self.strings, columns["host"])[:-1]
        columns["n_events"] = [self.n_events.get(rank, 0) for rank in ranks]
        write_table(self.file, "ranks", [*schema.RANKS, schema.COORDS], columns)
        rank_ptr = np.cumsum([0, *columns["n_events"]])
        write_table(self.file, "index", [schema.RANK_PTR], {"rank_ptr": rank_ptr})

    def _write_groups(self):
        size = [len(members) for _, members in self.groups]
        columns = {
            "group_id": range(len(size)),
            "axis": [axis for axis, _ in self.groups],
            "size": size,
            "offset": np.cumsum([0, *size])[:-1],
            "members": [rank for _, members in self.groups for rank in members],
        }
        write_table(self.file, "groups", [*schema.GROUPS, schema.MEMBERS], columns)

    def _write_clock(self):
        """Write each rank's clock models for the current and the earlier attempts."""
        nodes = {rank: _node(header) for rank, header in self.headers.items()}
        rows = [self.clocks[node].rows(rank) for rank, node in nodes.items()]
        rows += [self.before.clock(rank) for rank in nodes]
        write_table(self.file, "clock/model", schema.CLOCK_MODEL, np.unique(np.concatenate(rows)))


def _hosts(run_dir):
    """Return the host of each rank in environment.json, or an empty list if it is unknown."""
    try:
        found = json.loads(small_files.read(run_dir / "environment.json"))
        return [str(each["host"]) for each in found["ranks"]]
    except (ValueError, LookupError, TypeError):
        return []


def _node(header):
    """Return the node in a rank's header, or the host if an older version wrote the header."""
    return header["host"] if header["node"] is None else header["node"]


def _numbers(table, keys):
    """Add missing `keys` to `table`; return the indices of all `keys`, followed by -1.

    The array ends with -1 so that indexing it with -1, which stands for "none", gives -1.
    """
    return np.array([table.setdefault(key, len(table)) for key in keys] + [-1])


def _nested(events, first_row):
    """Sort events by start time, and by decreasing duration if they start at the same time.

    An enclosing event thus precedes the events inside it.  Parent indices are converted from row
    numbers in the unsorted `events` to row numbers in the table /events, in which the first of the
    sorted events is row `first_row`.
    """
    order = np.lexsort((-events["dur"], events["t_start"]))
    row = np.full(len(order) + 1, -1)
    row[order] = np.arange(first_row, first_row + len(order))
    events = events[order]
    events["parent"] = row[events["parent"]]
    return events


def _named(steps):
    """Format ascending step numbers as text, such as "steps 0 to 3, 7"."""
    runs = np.split(steps, np.flatnonzero(np.diff(steps) > 1) + 1)
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f"step{'s'[: len(steps) > 1]} {', '.join(parts)}"


def _attributes(first, headers, missing):
    same = "kind run_id created_utc world_size axis_sizes time_unit config git mpi cores transport"
    return {key: first[key] for key in same.split()} | {
        "format": schema.FORMAT,
        "version": schema.VERSION,
        "hpc3d_version": first["version"],
        "axes": " ".join(first["axes"]),
        "device": ", ".join(sorted({str(header["device"]) for header in headers})),
        "complete": not missing,
        "missing": "\n".join(missing),
    }
