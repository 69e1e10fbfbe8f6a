"""All segments of a run in one trace file, sorted by (rank, t_start).

One rank at a time: the memory it takes is the events of one rank and one sorted column.
"""

from pathlib import Path

import numpy as np

from hpc3d.trace import events as schema
from hpc3d.trace.clock import IDENTITY, fit
from hpc3d.trace.file import append_rows, create, write_table
from hpc3d.trace.segment import TABLES, count_segments, read_segment, replacing, segment_path

WHERE = {"samples": "clock/samples"}  # tables that lie elsewhere in the file than in a segment


def merge(run_dir):
    """Merge the segments of a run into RUN/trace.h5 and return its path.

    An enclosing event comes before those inside it.  What is missing or damaged is left out; then
    the attribute `complete` is False and `missing` says what, a line each.  ValueError if no
    segment can be read.
    """
    path = Path(run_dir) / "trace.h5"
    count = count_segments(run_dir)
    if not count:
        raise ValueError(f"{run_dir}: no trace; set enabled = true in [trace] and run again")
    with replacing(path) as temporary, create(temporary) as file:
        merged = _Merge(file)
        for rank in count:
            merged.add(rank, [segment_path(run_dir, rank, n) for n in range(count[rank])])
        merged.finish()
    return path


class _Merge:
    """The tables of the file as they grow, rank by rank."""

    def __init__(self, file):
        self.file = file
        self.strings, self.groups = {}, {}
        self.headers, self.n_events, self.last_step, self.missing = {}, {}, {}, []
        self.clocks, self.leaders = {}, {}  # host -> Model, first rank of a host -> Model
        for table, columns in TABLES.items():
            write_table(file, WHERE.get(table, table), columns)

    def add(self, rank, paths):
        parts = list(self._read(rank, paths))
        if not parts:
            return
        for part in parts:
            self._renumber(part)
        self._add_clock(parts)
        events = [part.events for part in parts]
        order = _nesting_order(events)
        _move_parents(events, order, first_row=sum(self.n_events.values()))
        append_rows(self.file, "events", events, order)
        append_rows(self.file, "steps", [part.steps for part in parts])
        append_rows(self.file, "memory", [part.memory for part in parts])
        self.headers[rank] = parts[-1].header
        self.n_events[rank] = len(order)
        self.last_step[rank] = max(part.steps["step"].max(initial=-1) for part in parts)

    def _add_clock(self, parts):
        """Give the events of a rank the time of rank 0.

        The leader of a host, who has the samples, is its first rank.
        """
        header, samples = parts[-1].header, np.concatenate([part.samples for part in parts])
        append_rows(self.file, WHERE["samples"], [samples])
        if len(samples):
            above = self.leaders.get(samples["peer"][0], IDENTITY)
            self.leaders[header["rank"]] = self.clocks[header["host"]] = fit(samples, above)
        clock = self.clocks.setdefault(header["host"], IDENTITY)
        for part in parts:
            part.events["t_global"] = clock.to_global(part.events["t_start"])

    def _read(self, rank, paths):
        for path in paths:
            try:
                part = read_segment(path, rank)
                self._check_run(part.header, path)
                yield part
            except ValueError as error:
                self.missing.append(f"rank {rank}: {error}")

    def _check_run(self, header, path):
        first = next(iter(self.headers.values()), header)
        if any(header[key] != first[key] for key in ("run_id", "world_size")):
            raise ValueError(f"{path.name} belongs to another run")

    def _renumber(self, part):
        """Names and groups from the numbers of the segment to those of the file, in place."""
        groups = [(group["axis"], tuple(group["members"])) for group in part.header["groups"]]
        for column, table, keys in (
            ("name", self.strings, part.header["strings"]),
            ("group", self.groups, groups),
        ):
            part.events[column] = _numbers(table, keys)[part.events[column]]

    def finish(self):
        """Write what is known only at the end; ValueError if no segment could be read."""
        if not self.headers:
            raise ValueError(f"no segment of the trace can be read: {self.missing[0]}")
        first = next(iter(self.headers.values()))
        ranks = range(first["world_size"])
        self._find_missing(ranks)
        self._write_ranks(ranks, axes=len(first["axes"]))
        self._write_groups()
        self._write_clock()
        write_table(self.file, "strings", schema.STRINGS, {"name": list(self.strings)})
        self.file.attrs.update(_attributes(first, self.headers.values(), self.missing))

    def _find_missing(self, ranks):
        end = max(self.last_step.values())
        for rank in ranks:
            if rank not in self.headers:
                self.missing.append(f"rank {rank}: no segment")
                continue
            if self.last_step[rank] < end:
                self.missing.append(f"rank {rank}: nothing after step {self.last_step[rank]}")
            host = self.headers[rank]["host"]
            if self.clocks[host] is IDENTITY and host != self.headers[min(self.headers)]["host"]:
                self.missing.append(
                    f"rank {rank}: its clock, which was not compared with rank 0's"
                )
            if dropped := self.headers[rank]["dropped"]:
                self.missing.append(f"rank {rank}: {dropped} events, its buffer was full")

    def _write_ranks(self, ranks, axes):
        unknown = {"host": "", "local_rank": -1, "device": "", "pid": -1, "dropped": 0}
        unknown["coords"] = [-1] * axes
        headers = [self.headers.get(rank, unknown) for rank in ranks]
        columns = {key: [header[key] for header in headers] for key in unknown}
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
        hosts = [(rank, header["host"]) for rank, header in self.headers.items()]
        rows = np.concatenate([self.clocks[host].rows(rank) for rank, host in hosts])
        write_table(self.file, "clock/model", schema.CLOCK_MODEL, rows)


def _numbers(table, keys):
    """The number of each key in `table`, which grows by the new ones; then -1, for index -1."""
    return np.array([table.setdefault(key, len(table)) for key in keys] + [-1])


def _nesting_order(parts):
    """Rows by start; of those with one start the longest first, for it encloses the others."""
    start, duration = (np.concatenate([part[key] for part in parts]) for key in ("t_start", "dur"))
    return np.lexsort((-duration, start))


def _move_parents(parts, order, first_row):
    """Parents from rows of a segment to rows of /events, in place."""
    row = np.empty_like(order)
    row[order] = np.arange(first_row, first_row + len(order))
    for part in parts:
        own, row = row[: len(part)], row[len(part) :]
        part["parent"] = np.append(own, -1)[part["parent"]]


def _attributes(first, headers, missing):
    same = "run_id created_utc world_size axis_sizes time_unit config git mpi"
    return {key: first[key] for key in same.split()} | {
        "format": schema.FORMAT,
        "version": schema.VERSION,
        "hpc3d_version": first["version"],
        "kind": "measured",
        "axes": " ".join(first["axes"]),
        "device": ", ".join(sorted({str(header["device"]) for header in headers})),
        "complete": not missing,
        "missing": "\n".join(missing),
    }
