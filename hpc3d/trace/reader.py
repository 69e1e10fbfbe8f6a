"""Reader of trace files.

    with hpc3d.trace.open("results/RUN") as trace:     # or the path of a trace.h5
        trace.events["dur"]                            # a column, as a NumPy array
        trace.events["dur", trace.rows(3)]             # the rows of rank 3 in this column
        trace.events.frame(["rank", "op", "dur"])      # columns as a pandas DataFrame

Files are treated as untrusted input: hpc3d.trace.file checks their structure, hpc3d.trace.table
checks their values, and this module checks the references between tables.
"""

from __future__ import annotations

from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from hpc3d.trace import schema
from hpc3d.trace.file import REMEDY, attributes, explained, find, open_file
from hpc3d.trace.table import Table


class Group(NamedTuple):
    """Group of ranks that communicate along a mesh axis."""

    axis: str
    members: tuple


def open(path: Path | str) -> Trace:
    """Open a trace; use it in a `with` statement, or close it.

    Parameters
    ----------
    path
        Run folder, or the path of its trace.h5.

    Returns
    -------
    Trace
        The trace, whose columns are read on access.

    Raises
    ------
    ValueError
        If the file is damaged, or if the folder has no trace.h5 yet.
    """
    path = Path(path)
    if not path.is_dir():
        return Trace(path)
    if not (path / "trace.h5").is_file():
        raise ValueError(f"{path}: no trace.h5; {REMEDY}")
    return Trace(path / "trace.h5")


class Trace:
    """Trace file opened for reading.

    Unknown tables and columns are ignored.  A table missing from the file is empty.  Access to a
    damaged table raises ValueError.

    Parameters
    ----------
    path
        Path of the trace.h5.

    Attributes
    ----------
    attrs : dict
        Attributes of the root group of the file.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._file = open_file(self.path)
        try:
            with explained(self.path):
                self.attrs = attributes(self._file)
            self._check()
        except ValueError:
            self.close()
            raise

    def _check(self):
        """Raise ValueError if the format version is unsupported or an attribute is missing."""
        version = self.attrs.get("version")
        if self.attrs.get("format") != schema.FORMAT or not isinstance(version, int):
            raise ValueError(
                f"{self.path}: not an hpc3d trace; specify a run folder or its trace.h5"
            )
        if version > schema.VERSION:
            raise ValueError(
                f"{self.path}: trace version {version} is newer than the supported version "
                f"{schema.VERSION}; update hpc3d"
            )
        wrong = [
            known.name
            for known in schema.ATTRIBUTES
            if known.required and not isinstance(self.attrs.get(known.name), known.type)
        ]
        self._require(not wrong, f"attributes {', '.join(wrong)} are damaged")
        rows = len(self._table("ranks", schema.RANKS))
        self._require(self.attrs["world_size"] == rows, "/ranks does not have one row per rank")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @cached_property
    def events(self) -> Table:
        """Events of all ranks, sorted by (rank, t_start), with the columns `schema.EVENTS`."""
        return self._table("events", schema.EVENTS)

    @cached_property
    def steps(self) -> Table:
        """One row per rank and completed step, with the columns `schema.STEPS`."""
        return self._table("steps", schema.STEPS)

    @cached_property
    def memory(self) -> Table:
        """One row per rank, step and memory kind, with the columns `schema.MEMORY`."""
        return self._table("memory", schema.MEMORY)

    @cached_property
    def evaluation(self) -> Table:
        """One row per evaluation, with the columns `schema.EVALUATION`."""
        return self._table("evaluation", schema.EVALUATION)

    @cached_property
    def validation(self) -> Table:
        """One row per evaluation and validation text, with the columns `schema.VALIDATION`."""
        return self._table("validation", schema.VALIDATION)

    @cached_property
    def experts(self) -> Table:
        """Numbers of routed and kept tokens per expert, with the columns `schema.EXPERTS`."""
        return self._table("experts", schema.EXPERTS)

    @cached_property
    def routers(self) -> Table:
        """Losses of the mixture-of-experts routers, with the columns `schema.ROUTERS`."""
        return self._table("routers", schema.ROUTERS)

    @cached_property
    def clock_model(self) -> Table:
        """Segments of the piecewise-linear clock models, with the columns `schema.CLOCK_MODEL`."""
        return self._table("clock/model", schema.CLOCK_MODEL)

    @cached_property
    def clock_samples(self) -> Table:
        """Message exchanges for clock synchronization, with the columns `schema.CLOCK_SAMPLES`."""
        return self._table("clock/samples", schema.CLOCK_SAMPLES)

    @cached_property
    def prediction(self) -> Table:
        """Predicted quantities, such as the step time, with the columns `schema.PREDICTION`."""
        return self._table("prediction", schema.PREDICTION)

    @cached_property
    def calibration(self) -> dict[tuple[str, str], Table]:
        """Dict that maps (op, axis) to a table of measured call times.

        The columns are `schema.CALIBRATION`. The `attrs` of each table contain the fitted alpha in
        s and beta in s/B.
        """
        found = {
            (op, axis): self._table(f"calibration/{op}/{axis}", schema.CALIBRATION)
            for op in self._groups_in("calibration")
            if op in schema.OP
            for axis in self._groups_in(f"calibration/{op}")
        }
        lines = [(table.attrs.get("alpha"), table.attrs.get("beta")) for table in found.values()]
        sound = all(isinstance(number, float) and isfinite(number) for number in sum(lines, ()))
        self._require(sound, "/calibration lacks the attributes alpha and beta")
        return found

    @cached_property
    def ranks(self) -> Table:
        """One row per rank, with the columns `schema.RANKS` and `schema.COORDS`."""
        return self._table("ranks", [*schema.RANKS, schema.COORDS])

    @cached_property
    def strings(self) -> list[str]:
        """Names of events and hosts, to which other tables refer by row index."""
        names = self._strings["name"].tolist()
        self._require(len({*names}) == len(names), "/strings contains duplicate names")
        return names

    @cached_property
    def groups(self) -> list[Group]:
        """List of communication groups; the values of `events["group"]` are indices into it."""
        table, members = self._groups, self._table("groups", [schema.MEMBERS])["members"].tolist()
        offset, end = table["offset"], np.cumsum(table["size"], dtype="i8")
        whole = end[-1:].sum() == len(members) and (offset == end - table["size"]).all()
        self._require(whole, "/groups and /groups/members are inconsistent")
        parts = zip(table["axis"], offset.tolist(), end.tolist())
        return [Group(axis, tuple(members[start:stop])) for axis, start, stop in parts]

    @cached_property
    def rank_ptr(self) -> np.ndarray:
        """Row pointers [ranks + 1]: rows rank_ptr[r] to rank_ptr[r + 1] belong to rank r."""
        pointers = self._table("index", [schema.RANK_PTR])["rank_ptr"]
        ends = len(pointers), *pointers[:1], *pointers[-1:]
        whole = (
            ends == (1 + len(self.ranks), 0, len(self.events)) and (np.diff(pointers) >= 0).all()
        )
        self._require(whole, "/index/rank_ptr does not match the rows of /events")
        return pointers

    def rows(self, rank: int) -> slice:
        """Return the range of a rank's rows in `events`.

        Parameters
        ----------
        rank
            Rank in the mesh.

        Returns
        -------
        slice
            Range of row indices.

        Raises
        ------
        ValueError
            If the trace has no such rank.
        """
        if not 0 <= rank < len(self.ranks):
            raise ValueError(f"{self.path} has ranks 0 to {len(self.ranks) - 1}, not {rank}")
        return slice(*self.rank_ptr[rank : rank + 2].tolist())

    @cached_property
    def _strings(self):
        return self._table("strings", schema.STRINGS)

    @cached_property
    def _groups(self):
        return self._table("groups", schema.GROUPS)

    def _table(self, path, columns):
        count = {"strings": lambda: self._strings, "groups": lambda: self._groups}
        count["ranks"] = lambda: range(self.attrs["world_size"])
        wanted = {column.into for column in columns} & count.keys() - {path}
        tables = {name: count[name]() for name in wanted}
        with explained(self.path):
            return Table(self.path, path, columns, find(self._file, path), tables)

    def _groups_in(self, path):
        with explained(self.path):
            return sorted(find(self._file, path) or ())

    def _require(self, sound, problem):
        if not sound:
            raise ValueError(f"{self.path}: {problem}; {REMEDY}")
