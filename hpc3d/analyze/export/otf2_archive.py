"""Export to Open Trace Format 2, for Vampir and other tools of the Score-P ecosystem.

Each stream of a rank is an OTF2 location, each rank is a location group, and each host is a node
of the system tree. Events are written as regions; the region name of a call includes the mesh
axis. Each group of ranks is a communicator. A call that is followed immediately by its wait is
written with blocking MPI records. Any other call is written as nonblocking, with a request record
and a completion record. The tag of a message is its sequence number. A metric accumulates the
bytes and FLOP of each location. The attributes of an event contain its step, layer, microbatch,
stage, chunk and phase. MPI records are omitted if the trace contains CPU times, because the ranks
then have no common clock.

Python bindings: https://perftools.pages.jsc.fz-juelich.de/cicd/otf2/tags/latest/python/
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.analyze.export.pipit import region_names, visits
from hpc3d.analyze.metrics.columns import rows_of
from hpc3d.trace.schema import MESSAGES, STREAM, item_sizes

if TYPE_CHECKING:
    from hpc3d.analyze.export.events import Events

_COLLECTIVES = {
    "all_gather": "ALLGATHER",
    "reduce_scatter": "REDUCE_SCATTER",
    "all_reduce": "ALLREDUCE",
    "broadcast": "BCAST",
    "reduce": "REDUCE",
    "all_to_all": "ALLTOALL",
    "barrier": "BARRIER",
}
_ROLES = {
    **dict.fromkeys(_COLLECTIVES, "COLL_ALL2ALL"),
    "broadcast": "COLL_ONE2ALL",
    "reduce": "COLL_ALL2ONE",
    "barrier": "BARRIER",
    **dict.fromkeys(MESSAGES, "POINT2POINT"),
}
_ATTRIBUTES = ("step", "layer", "microbatch", "stage", "chunk")
_ENTER, _REQUEST, _LEAVE = range(3)  # kinds of event records


def write(events: Events, folder: Path) -> Path:
    """Write an OTF2 archive to the subfolder `otf2`, and return its path.

    The anchor file of the archive is trace.otf2.
    """
    import otf2

    path = folder / "otf2"
    with otf2.writer.open(str(path), "trace", timer_resolution=10**9) as archive:
        archive.creator = "hpc3d"
        if not events.one_time:
            archive.description = "Times are CPU times, measured separately by each rank."
        definitions = _Definitions(otf2, archive.definitions, events)
        for (rank, stream), location in definitions.locations.items():
            rows = events.rows[rank]
            own = rows.start + np.flatnonzero(events.columns["stream"][rows] == stream)
            writer = archive.event_writer_from_location(location)
            _Records(definitions, writer).write(own)
    return path


class _Definitions:
    """Definitions of an OTF2 archive: the locations, communicators, regions and attributes."""

    def __init__(self, otf2: Any, registry: Any, events: Events) -> None:
        self.otf2, self.registry, self.events = otf2, registry, events
        self.names = region_names(events)
        self.regions: dict[tuple, Any] = {}
        self.locations = dict(self._locations())
        self.communicators = self._communicators()
        self.rank_in_group = {
            (number, rank): index
            for number, group in enumerate(events.groups)
            for index, rank in enumerate(group.members)
        }
        self.attributes = {
            key: registry.attribute(key, "", otf2.Type.INT64) for key in _ATTRIBUTES
        }
        self.phase = registry.attribute("phase", "", otf2.Type.STRING)
        self.metric = self._metric()

    def _locations(self):
        registry, kinds = self.registry, self.otf2.LocationType
        machine = registry.system_tree_node("hosts", "machine")
        for rank, rows in enumerate(self.events.rows):
            host = self.events.hosts.get(rank) or "host"
            node = registry.system_tree_node(host, "node", machine)
            axes = (axis for axis, _ in self.events.axes)
            coords = [f"{axis}={index}" for axis, index in zip(axes, self.events.coords[rank])]
            name = " ".join([f"rank {rank}", *coords])
            process = registry.location_group(name, system_tree_parent=node)
            for stream in np.unique(self.events.columns["stream"][rows]).tolist() or [0]:
                kind = kinds.ACCELERATOR_STREAM if stream else kinds.CPU_THREAD
                name = STREAM[stream] if stream < len(STREAM) else f"stream {stream}"
                label = f"rank {rank}, {name}"
                yield (rank, stream), registry.location(label, type=kind, group=process)

    def _communicators(self):
        """Return one communicator per group of ranks in the trace.

        The parent of each communicator is the communicator of all ranks.
        """
        registry, kinds = self.registry, self.otf2.GroupType
        first: dict[int, Any] = {}
        for (rank, _), location in self.locations.items():
            first.setdefault(rank, location)
        mpi = self.otf2.Paradigm.MPI

        def communicator(name, members, parent):
            group = registry.group(name, kinds.COMM_GROUP, mpi, members=members)
            return registry.comm(name, group, parent)

        everyone = tuple(first.values())
        registry.group("ranks", kinds.COMM_LOCATIONS, mpi, members=everyone)
        world = communicator("all ranks", everyone, None)
        return [
            communicator(
                f"axis {axis}: {' '.join(map(str, members))}",
                tuple(first[rank] for rank in members),
                world,
            )
            for axis, members in self.events.groups
        ]

    def _metric(self):
        """Return the metric class for the accumulated bytes and FLOP of a location."""
        otf2 = self.otf2

        def sum_of(name, meaning, kind, unit):
            user, mode = otf2.MetricType.USER, otf2.MetricMode.ACCUMULATED_START
            return self.registry.metric_member(name, meaning, user, mode, kind, unit=unit)

        moved = sum_of("bytes", "received, sent or copied", otf2.Type.UINT64, "B")
        computed = sum_of("operations", "floating point", otf2.Type.DOUBLE, "FLOP")
        return self.registry.metric_class((moved, computed), otf2.MetricOccurrence.SYNCHRONOUS)

    def region(self, number: int, op: str) -> Any:
        """Return the region shared by all events with the same name and operation."""
        key = self.names[number], op
        if key not in self.regions:
            role = getattr(self.otf2.RegionRole, _ROLES.get(op, "FUNCTION"))
            paradigms = self.otf2.Paradigm
            paradigm = paradigms.MPI if op in _ROLES else paradigms.USER
            self.regions[key] = self.registry.region(key[0], region_role=role, paradigm=paradigm)
        return self.regions[key]


class _Records:
    """Writer for the event records of one location."""

    def __init__(self, definitions: _Definitions, writer: Any) -> None:
        self.definitions, self.writer = definitions, writer
        self.total = [0, 0.0]  # accumulated bytes and FLOP

    def write(self, own: np.ndarray) -> None:
        """Write the records of the events with indices `own`, in chronological order."""
        columns = _of_location(self.definitions.events, own)
        rows = rows_of(columns)
        actions = self._enter, self._request, self._leave
        for time, action, index in zip(*(each.tolist() for each in _sequence(columns))):
            actions[action](time, rows[index])

    def _enter(self, time, row):
        region = self.definitions.region(row["number"], row["name_of_op"])
        self.writer.enter(time, region, attributes=self._attributes(row))
        if row["is_call"] and not row["early"]:
            if row["name_of_op"] == "send":
                self.writer.mpi_send(time, *self._message(row))
            elif row["name_of_op"] in _COLLECTIVES:
                self.writer.mpi_collective_begin(time)

    def _request(self, time, row):
        if row["name_of_op"] == "send":
            self.writer.mpi_isend(time, *self._message(row), row["number"])
        elif row["name_of_op"] == "recv":
            self.writer.mpi_irecv_request(time, row["number"])
        elif row["name_of_op"] in _COLLECTIVES:
            self.writer.non_blocking_collective_request(time, row["number"])

    def _leave(self, time, row):
        if row["is_call"]:
            self._complete(time, row)
        if row["bytes"] or row["flops"]:
            self.total = [self.total[0] + row["bytes"], self.total[1] + row["flops"]]
            self.writer.metric(time, self.definitions.metric, self.total)
        self.writer.leave(time, self.definitions.region(row["number"], row["name_of_op"]))

    def _complete(self, time, row):
        op, early, request = row["name_of_op"], row["early"], (row["number"],) * row["early"]
        if op == "send" and early:
            self.writer.mpi_isend_complete(time, *request)
        elif op == "recv":
            receive = self.writer.mpi_irecv if early else self.writer.mpi_recv
            receive(time, *self._message(row), *request)
        elif op in _COLLECTIVES:
            writer = self.writer
            end = writer.non_blocking_collective_complete if early else writer.mpi_collective_end
            kind = getattr(self.definitions.otf2.CollectiveOp, _COLLECTIVES[op])
            communicator = self.definitions.communicators[row["group"]]
            end(time, kind, communicator, self._peer(row), row["sent"], row["bytes"], *request)

    def _message(self, row):
        communicator = self.definitions.communicators[row["group"]]
        return self._peer(row), communicator, row["seq"], row["bytes"]

    def _peer(self, row):
        """Return the peer's or root's rank within the group, or NONE if the call has neither."""
        none = self.definitions.otf2.CollectiveRoot.NONE
        return self.definitions.rank_in_group.get((row["group"], row["peer"]), none)

    def _attributes(self, row):
        known = self.definitions
        found = {known.attributes[key]: row[key] for key in _ATTRIBUTES if row[key] >= 0}
        return found | {known.phase: known.events.names["phase"].get(row["phase"], "")}


def _of_location(events, own):
    """Return the columns of the events with indices `own`, plus columns that _Records needs.

    The additional columns are the event index, the name of the operation, the bytes sent, and two
    flags: `is_call`, and `early` for calls that were posted before the wait started.
    """
    columns = {key: values[own] for key, values in events.columns.items()}
    columns["number"] = own
    columns["posted"] = np.clip(columns["posted"], 0, columns["start"])
    columns["is_call"] = (columns["group"] >= 0) & (columns["seq"] >= 0) & events.one_time
    columns["early"] = columns["is_call"] & (columns["posted"] < columns["start"])
    op = [events.names["op"].get(code, "") for code in columns["op"].tolist()]
    columns["name_of_op"] = np.array(op, object)
    columns["sent"] = columns["count"] * item_sizes(events.names["dtype"])[columns["dtype"]]
    return columns


def _sequence(columns):
    """Return the times, kinds (_ENTER, _REQUEST or _LEAVE) and event indices of all records.

    The three arrays are sorted by time.
    """
    times, enters, index = visits(columns["start"], columns["end"])
    early = np.flatnonzero(columns["early"])
    early = early[np.argsort(columns["posted"][early], kind="stable")]
    posted = columns["posted"][early]
    position = np.searchsorted(times, posted, "right")
    actions = np.where(enters, _ENTER, _LEAVE)
    return (
        np.insert(times, position, posted),
        np.insert(actions, position, _REQUEST),
        np.insert(index, position, early),
    )
