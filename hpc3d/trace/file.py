"""HDF5 format of the trace file: one dataset per column, with a unit and a description.

Only this module of the package needs h5py.  Its functions import h5py locally, because most ranks
never open a trace.  Files are treated as untrusted input: external links are not followed, and a
dataset is read only if its type is known and its declared size is plausible for its stored size.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.console.small_files import Hdf5Output, replacing
from hpc3d.runtime import host_memory
from hpc3d.trace.heaps import check_heaps
from hpc3d.trace.schema import COORDS, ENUMS, LAYOUT, TEXT, Column

if TYPE_CHECKING:
    from h5py import Dataset, File, Group


_CHUNK = 64 * 1024  # rows per chunk
_COMPRESSION = {"shuffle": True, "compression": "gzip", "compression_opts": 1, "fletcher32": True}
_FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32"}  # names of the supported HDF5 filters by id
_SHRINKS = 1100  # upper bound on the compression ratio; deflate reaches 1032 on zeros
# Errors of file systems without lock support. Locks are not needed for correctness: a trace is
# written by a single process under a temporary name.
_WITHOUT_LOCKS = errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS
_LONGEST, _MOST_TEXT = 4096, 1 << 26  # maximum number of characters in a string and in a column
# maximum size in bytes of an attribute and of a chunk
_ATTRIBUTE_BYTES, _CHUNK_BYTES = 1 << 16, 1 << 28
REMEDY = "merge the run again: python -m hpc3d.report RUN_DIR --merge"


@contextmanager
def create(path: Path) -> Iterator[tuple[File, Hdf5Output]]:
    """Create a trace file. HDF5's chunk cache is disabled, because only full chunks are written.

    Yields the h5py file, and the `Hdf5Output` that it writes to, whose method `check` raises an
    exception if a write has failed.
    """
    import h5py

    with (
        Hdf5Output(path, "w+") as disk,
        h5py.File(disk, "w", rdcc_nbytes=0, locking=False) as file,
    ):
        file.attrs["description"] = LAYOUT["/"].description
        yield file, disk


def write_table(file: Group, path: str, columns: Sequence[Column], data: Any = None) -> Group:
    """Write a table and return its HDF5 group.

    `data` maps column names to values.  If it is `None`, the table is created empty, and rows can
    be appended later.
    """
    import h5py

    group = _require_group(file, path)
    for column in columns:
        values = np.asarray([] if data is None else data[column.name])
        dtype: Any = column.type
        if column.unit == "enum":
            codes = {name: code for code, name in enumerate(ENUMS[column.name])}
            dtype = h5py.enum_dtype(codes, column.type)
        if column.type == TEXT:  # HDF5 cannot filter variable-length strings
            how = {"data": values.astype(object), "dtype": h5py.string_dtype()}
        else:
            sizes = {"chunks": (_CHUNK, *values.shape[1:]), "maxshape": (None, *values.shape[1:])}
            how = {"data": values.astype(column.type), "dtype": dtype, **sizes, **_COMPRESSION}
        dataset = group.create_dataset(column.name, **how)
        dataset.attrs["units"] = column.unit
        dataset.attrs["description"] = column.description
    return group


def _require_group(file, path):
    """Return the group at `path`, creating and describing missing groups along the path."""
    names = path.split("/")
    for depth, name in enumerate(names, 1):
        file = _child(file, name) if _has(file, name) else file.create_group(name)
        file.attrs["description"] = _describe(names[:depth])
    return file


def _describe(names: Sequence[str]) -> str:
    if names[0] == "calibration":
        names = ("calibration", "<op>", "<axis>")[: len(names)]
    return LAYOUT["/".join(names)].description


class Growing:
    """Table to which record arrays can be appended.

    Only full chunks are written, because appending to a partial chunk would compress it again.
    """

    def __init__(self, file: Group, path: str, columns: Sequence[Column]) -> None:
        group = write_table(file, path, columns)
        self.datasets = {column.name: group[column.name] for column in columns}
        self.rows = 0
        self.waiting: list[np.ndarray] = []

    def append(self, part: np.ndarray) -> None:
        self.rows += len(part)
        self.waiting.append(part)
        waiting = sum(map(len, self.waiting))
        if waiting >= _CHUNK:
            self._write(waiting - waiting % _CHUNK)

    def close(self) -> None:
        """Write the remaining rows as a partial chunk."""
        if self.waiting:
            self._write(sum(map(len, self.waiting)))

    def _write(self, count):
        rows = np.concatenate(self.waiting)
        for name, dataset in self.datasets.items():
            written = len(dataset)
            dataset.resize(written + count, axis=0)
            dataset[written:] = rows[name][:count]
        self.waiting = [rows[count:].copy()]


@contextmanager
def changing(path: Path) -> Iterator[File]:
    """Open a copy of a trace file for modification; on success, the copy replaces the file."""
    import h5py

    with replacing(path) as temporary:
        shutil.copyfile(path, temporary)
        with (
            Hdf5Output(temporary, "r+") as disk,
            h5py.File(disk, "r+", locking=False) as file,
            explained(path, "nothing was written"),
        ):
            yield file


def remove(group: Group, path: str) -> None:
    """Remove the group at `path` if it exists."""
    name, _, rest = path.partition("/")
    if _has(group, name):
        if rest:
            remove(_child(group, name), rest)
        else:
            del group[name]


@contextmanager
def explained(path: Path, remedy: str = REMEDY) -> Iterator[None]:
    """Convert exceptions in the block to a one-line ValueError with the path and a remedy."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: {reason}; {remedy}") from error


def open_file(path: Path) -> File:
    """Open an HDF5 file for reading; the caller must close it."""
    import h5py

    if not path.is_file():
        raise ValueError(f"{path}: no such file; specify a run folder or its trace.h5")
    if not h5py.is_hdf5(path):
        raise ValueError(
            f"{path}: not an HDF5 file; specify a run folder or its trace.h5. If this is the "
            f"trace of a run, {REMEDY}"
        )
    with explained(path):
        check_heaps(path)
        try:
            return h5py.File(path, "r")
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            return h5py.File(path, "r", locking=False)
    raise ValueError(f"{path}: another process is writing this file; try again later")


def attributes(node: Group) -> dict[str, Any]:
    """Return the attributes of a group as a dict of Python values, omitting oversized ones."""
    return {key: _plain(node.attrs[key]) for key in node.attrs if _small(node.attrs.get_id(key))}


def _small(attribute):
    """Return True if an attribute is within the size limit, and is a scalar or numeric array."""
    number = np.issubdtype(attribute.dtype, np.number)
    return attribute.get_storage_size() <= _ATTRIBUTE_BYTES and (number or attribute.shape == ())


def _plain(value):
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _has(group: Group, name: str) -> bool:
    return group.id.links.exists(name.encode())


def _child(group: Group, name: str) -> Group:
    """Return the subgroup `name`; reject soft and external links, which may open other files."""
    import h5py

    node = _linked(group, name)
    if not isinstance(node, h5py.Group):
        raise ValueError(f"{name} is not a group")
    return node


def find(file: Group, path: str) -> Group | None:
    """Return the group at a path, or None if it does not exist."""
    for name in path.split("/"):
        if not _has(file, name):
            return None
        file = _child(file, name)
    return file


def _linked(group, name):
    import h5py

    if not _has(group, name):
        raise ValueError(f"{name} is missing")
    if group.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
        raise ValueError(f"{name} is a soft or external link, which is not allowed")
    return group[name]


def sound(group: Group, column: Column) -> Dataset | None:
    """Return the dataset of a column, or None if it is missing.

    Raises ValueError if the dataset is not stored in this file or has a wrong type or shape.
    """
    import h5py

    if not _has(group, column.name):
        return None
    dataset = _linked(group, column.name)
    if not isinstance(dataset, h5py.Dataset) or dataset.is_virtual or dataset.external:
        raise ValueError(f"{column.name} is not a dataset stored in this file")
    text = h5py.check_string_dtype(dataset.dtype)
    if not (text if column.type == TEXT else dataset.dtype == column.type):
        raise ValueError(f"{column.name} has the type {dataset.dtype}, not {column.type}")
    if dataset.ndim != (2 if column == COORDS else 1) or not _fits(dataset):
        shape = f"{dataset.shape}, which is invalid or does not fit in memory"
        raise ValueError(f"{column.name} has the shape {shape}")
    return dataset


def _fits(dataset):
    """Return True if a dataset fits in memory and its size is plausible for its size on disk."""
    plan = dataset.id.get_create_plist()
    filters = {plan.get_filter(number)[0] for number in range(plan.get_nfilters())}
    if not filters <= _FILTERS.keys():
        raise ValueError(f"{dataset.name} has filters other than {', '.join(_FILTERS.values())}")
    chunk = prod(dataset.chunks or ()) * dataset.dtype.itemsize
    stored = dataset.id.get_storage_size() * (_SHRINKS if filters else 1)
    return chunk <= _CHUNK_BYTES and dataset.nbytes <= min(host_memory.total(), stored)


def read(dataset: Dataset, rows: slice) -> np.ndarray:
    """Return a slice of a column as an array; string columns become arrays of str.

    Strings are read a few rows at a time, because a string may be as long as the file.
    """
    import h5py

    if not h5py.check_string_dtype(dataset.dtype):
        return dataset[rows]
    numbers, texts, size = range(len(dataset))[rows], [], 0
    step = max(1, _MOST_TEXT // dataset.file.id.get_filesize())
    for part in (numbers[i : i + step] for i in range(0, len(numbers), step)):
        texts += dataset.asstr()[part.start : part.stop : part.step].tolist()
        lengths = [*map(len, texts[-len(part) :])]
        size += sum(lengths)
        if max(lengths) > _LONGEST or size > _MOST_TEXT:
            raise ValueError(
                f"{dataset.name} has strings of {max(lengths)} characters, {size} in total; at "
                f"most {_LONGEST} and {_MOST_TEXT} are read"
            )
    return np.array(texts, object)


def labels(dataset: Dataset) -> dict[int, str]:
    """Return a dict that maps codes to names for an enumerated column, else an empty dict."""
    import h5py

    codes = h5py.check_enum_dtype(dataset.dtype) or {}
    return {code: label for label, code in codes.items()}
