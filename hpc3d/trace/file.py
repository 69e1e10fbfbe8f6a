"""The trace file, version 1: HDF5, one dataset a column, all ranks in one table.

The only module of the package that needs h5py, and imports it where it does: most ranks never
open a trace.
"""

import os
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpc3d.trace import events as schema

CHUNK = 64 * 1024
REMEDY = "merge the run again: python -m hpc3d.report RUN_DIR --merge"
REQUIRED = {
    "run_id": str,
    "world_size": int,
    "axes": str,
    "axis_sizes": list,
    "config": str,
    "complete": bool,
    "missing": str,
}


# Write


def create(path):
    """A new HDF5 file, to be used in a `with`."""
    import h5py

    return h5py.File(path, "w")


def write_table(file, table, columns, data=None):
    """Write the columns of a table from a mapping; without data they are empty and can grow."""
    group = file.require_group(table)
    for column in columns:
        values = np.asarray([] if data is None else data[column.name])
        write = _write_text if column.type == "text" else _write_numbers
        dataset = write(group, column, values)
        dataset.attrs["units"] = column.unit
        dataset.attrs["description"] = column.description


def append_rows(file, table, parts, order=slice(None)):
    """Append record arrays, one after the other and then in `order`, to a table."""
    rows = sum(map(len, parts))
    for name in parts[0].dtype.names:
        dataset = file[table][name]
        dataset.resize(len(dataset) + rows, axis=0)
        values = np.concatenate([part[name] for part in parts])[order]
        dataset[len(dataset) - rows :] = values


def _write_text(group, column, values):
    """Text of variable length, which HDF5 lets no filter touch."""
    import h5py

    return group.create_dataset(column.name, data=values.astype(object), dtype=h5py.string_dtype())


def _write_numbers(group, column, values):
    return group.create_dataset(
        column.name,
        data=values.astype(column.type),
        dtype=_stored_type(column),
        maxshape=(None, *values.shape[1:]),
        chunks=(CHUNK, *values.shape[1:]),
        shuffle=True,
        compression="gzip",
        compression_opts=1,
        fletcher32=True,
    )


def _stored_type(column):
    import h5py

    if column.unit != "enum":
        return np.dtype(column.type)
    codes = {name: code for code, name in enumerate(schema.ENUMS[column.name])}
    return h5py.enum_dtype(codes, column.type)


# Read


class Group(NamedTuple):
    """Ranks that communicate along an axis."""

    axis: str
    members: tuple


def open(path):
    """A trace, to be used in a `with` or closed; ValueError if the file is not a sound one."""
    return Trace(path)


class Trace:
    """A trace file: `trace.events["dur"]` reads one column of one table as a NumPy array.

    The file is not trusted: nothing outside of it is followed and no column is read before its
    shape and type are known to be sound; what is not raises ValueError.  Tables and columns that
    this version does not know are ignored.
    """

    def __init__(self, path):
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"{path}: no such file; give a run folder or its trace.h5")
        with _explained(self.path):
            self._file = _open_hdf5(self.path)
            self.attrs = {key: _plain(value) for key, value in self._file.attrs.items()}
        self._check_version()
        self._check_attributes()

    def _check_version(self):
        version = self.attrs.get("version")
        if self.attrs.get("format") != schema.FORMAT or not isinstance(version, int):
            raise ValueError(f"{self.path}: not an hpc3d trace; give a run folder or its trace.h5")
        if version > schema.VERSION:
            raise ValueError(
                f"{self.path}: trace version {version}, this hpc3d reads up to {schema.VERSION};"
                " update hpc3d"
            )

    def _check_attributes(self):
        wrong = [
            key for key, kind in REQUIRED.items() if not isinstance(self.attrs.get(key), kind)
        ]
        if wrong:
            raise ValueError(f"{self.path}: attributes {', '.join(wrong)} are damaged; {REMEDY}")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        self._file.close()

    @cached_property
    def events(self):
        """What the ranks did, sorted by (rank, t_start): columns `schema.EVENTS`."""
        return self._table("events", schema.EVENTS)

    @cached_property
    def steps(self):
        """A row a rank and step: columns `schema.STEPS`."""
        return self._table("steps", schema.STEPS)

    @cached_property
    def memory(self):
        """A row a rank, step and kind: columns `schema.MEMORY`."""
        return self._table("memory", schema.MEMORY)

    @cached_property
    def clock_model(self):
        """Pieces of the clocks' offsets from rank 0's: columns `schema.CLOCK_MODEL`."""
        return self._table("clock/model", schema.CLOCK_MODEL)

    @cached_property
    def clock_samples(self):
        """Exchanges between clocks: columns `schema.CLOCK_SAMPLES`."""
        return self._table("clock/samples", schema.CLOCK_SAMPLES)

    @cached_property
    def ranks(self):
        """A row a rank: columns `schema.RANKS`."""
        return self._table("ranks", schema.RANKS)

    @cached_property
    def strings(self):
        """Names of events and hosts, a list."""
        return self._table("strings", schema.STRINGS)["name"].tolist()

    @cached_property
    def groups(self):
        """The groups of ranks that `events["group"]` counts, a list of Group."""
        table = self._table("groups", schema.GROUPS)
        members = self._table("groups", [schema.MEMBERS])["members"].tolist()
        rows = zip(table["axis"], table["offset"], table["size"])
        return [Group(axis, tuple(members[start : start + size])) for axis, start, size in rows]

    @cached_property
    def rank_ptr(self):
        """[ranks + 1]: rank r owns the rows rank_ptr[r] to rank_ptr[r + 1] of `events`."""
        return self._table("index", [schema.RANK_PTR])["rank_ptr"]

    def _table(self, name, columns):
        with _explained(self.path):
            group = self._file
            for part in name.split("/"):
                group = _child(group, part)
            present = [column for column in columns if _has(group, column.name)]
            return Table(self.path, {c.name: _sound_column(group, c) for c in present})


class Table:
    """Columns of one length, each read when it is asked for."""

    def __init__(self, path, datasets):
        self._path, self._datasets = path, datasets
        lengths = {len(dataset) for dataset in datasets.values()}
        if len(lengths) > 1:
            raise ValueError(f"columns of different lengths: {', '.join(datasets)}")

    def __contains__(self, name):
        return name in self._datasets

    def __len__(self):
        return next(map(len, self._datasets.values()), 0)

    def __getitem__(self, name):
        """A column as an array; text as an array of str."""
        import h5py

        dataset = self._dataset(name)
        with _explained(self._path):
            text = h5py.check_string_dtype(dataset.dtype)
            return dataset.asstr()[:] if text else dataset[:]

    def labels(self, name):
        """{value: name} of an enumerated column, as the file has it."""
        import h5py

        codes = h5py.check_enum_dtype(self._dataset(name).dtype) or {}
        return {code: label for label, code in codes.items()}

    def _dataset(self, name):
        if name not in self:
            raise ValueError(f"{self._path}: the column {name} is missing; {REMEDY}")
        return self._datasets[name]


@contextmanager
def _explained(path):
    """Turn what is wrong inside of a file into one line with its name and the remedy."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:  # all h5py's
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: {reason}; {REMEDY}") from error


def _open_hdf5(path):
    import h5py

    return h5py.File(path, "r")


def _plain(value):
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _has(group, name):
    return group.id.links.exists(name.encode())


def _child(group, name):
    """What lies in a group under a name: asked of the link, for to follow one opens its file."""
    import h5py

    if not _has(group, name):
        raise ValueError(f"{name} is missing")
    if group.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
        raise ValueError(f"{name} is a link to elsewhere")
    return group[name]


def _sound_column(group, column):
    import h5py

    dataset = _child(group, column.name)
    if not isinstance(dataset, h5py.Dataset) or dataset.is_virtual or dataset.external:
        raise ValueError(f"{column.name} is not data of this file")
    text = h5py.check_string_dtype(dataset.dtype)
    if not (text if column.type == "text" else dataset.dtype == column.type):
        raise ValueError(f"{column.name} has the type {dataset.dtype}, not {column.type}")
    if dataset.ndim != 1 or dataset.nbytes > _physical_memory():
        raise ValueError(f"{column.name} has the shape {dataset.shape}, not one that fits memory")
    return dataset


def _physical_memory():
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
