"""Tables of a trace file, whose columns are read on access as NumPy arrays or a DataFrame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.runtime.optional_packages import need
from hpc3d.trace.file import REMEDY, attributes, explained, labels, read, sound

if TYPE_CHECKING:
    from pandas import DataFrame

    from hpc3d.trace.file import Group
    from hpc3d.trace.schema import Column

_ALL = slice(None)
_KEPT = 2**28  # maximum total size of the cached columns in bytes
_MOST_INTEGER = 2**60  # largest valid integer (36 years in ns): sums of a few values fit in int64


class Table:
    """Table of a trace file, which consists of columns of equal length.

    `table["dur"]` is a NumPy array, and `table["dur", 10:20]` a slice of its rows.  A table
    missing from the file has no rows.  Values are checked when they are read: a ValueError is
    raised if a code has no name, an index is out of range, or a number is not finite.

    Attributes
    ----------
    attrs : dict
        Attributes of the table.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        columns: Sequence[Column],
        group: Group | None,
        tables: Mapping[str, Any],
    ) -> None:
        self._path, self._name, self._tables = path, name, tables
        self._columns = {column.name: column for column in columns}
        self._absent = group is None
        self._kept: dict[str, np.ndarray] | None = None
        found = {} if group is None else {c.name: sound(group, c) for c in columns}
        self._datasets = {name: dataset for name, dataset in found.items() if dataset is not None}
        self.attrs = {} if group is None else attributes(group)
        if len({*map(len, self._datasets.values())}) > 1:
            raise ValueError(f"/{name} has columns of different lengths")

    def __contains__(self, name: object) -> bool:
        return name in self._datasets

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the columns."""
        return iter(self._datasets)

    def __len__(self) -> int:
        """Return the number of rows."""
        return next(map(len, self._datasets.values()), 0)

    def __getitem__(self, key: str | tuple[str, slice]) -> np.ndarray:
        """Return a column, or a slice of its rows, as an array (of str if the column is text)."""
        name, rows = key if isinstance(key, tuple) else (key, _ALL)
        if self._absent and name in self._columns:
            return self._columns[name].empty
        if self._kept is None or rows is not _ALL:
            return self._read(name, rows)
        values = self._kept.pop(name, None)
        if values is None:
            values = self._read(name, rows)
            values.flags.writeable = False
        self._kept[name] = values
        while sum(each.nbytes for each in self._kept.values()) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return values

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Cache the most recently used full columns, as read-only arrays, within this context."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def _read(self, name, rows):
        dataset = self._dataset(name)
        with explained(self._path):
            values = read(dataset, rows)
            self._check(self._columns[name], values)
        return values

    def columns(self) -> dict[str, np.ndarray]:
        """Return all columns as a dict that maps column names to arrays."""
        return {name: self[name] for name in self}

    def labels(self, name: str) -> dict[int, str]:
        """Return the names of the codes in an enumerated column.

        Parameters
        ----------
        name
            Name of the column.

        Returns
        -------
        dict
            Maps codes to names, as stored in the file. Empty if the column is not enumerated.
        """
        if self._absent:
            return {}
        return labels(self._dataset(name))

    def frame(self, columns: Iterable[str] | None = None, rows: slice = _ALL) -> DataFrame:
        """Return columns as a pandas DataFrame.

        Parameters
        ----------
        columns
            Names of columns. The default is all columns.
        rows
            Range of rows. The default is all rows.

        Returns
        -------
        pandas.DataFrame
            One column per name. Enumerations and event names are converted to categories.
        """
        need("a DataFrame", "pandas")
        from pandas import DataFrame

        series = {name: self._series(name, rows) for name in columns or self}
        return DataFrame(series)

    def _series(self, name, rows):
        """Convert a column for a DataFrame: codes become categories, and 2D rows become tuples."""
        from pandas import Categorical

        values, column = self[name, rows], self._columns[name]
        if column.into == "strings":
            return Categorical.from_codes(values.astype("i8"), self._tables["strings"]["name"])
        if column.unit == "enum":
            known = sorted(self.labels(name).items())
            codes, names = zip(*known)
            return Categorical.from_codes(np.searchsorted(codes, values), names)
        return values if values.ndim == 1 else [*map(tuple, values.tolist())]

    def _dataset(self, name):
        if name not in self._columns:
            known = ", ".join(self._columns)
            raise ValueError(f"/{self._name} has no column {name}; it has {known}")
        if name not in self:
            raise ValueError(f"{self._path}: the column {name} is missing; {REMEDY}")
        return self._datasets[name]

    def _check(self, column, values):
        """Raise ValueError if a value is invalid.

        Numbers must be finite and in range, codes must have names, and indices must be valid rows
        of the referenced table.
        """
        wrong = np.zeros(values.shape, bool)
        if column.unit == "enum":
            wrong = ~np.isin(np.arange(256), [*self.labels(column.name)])[values]
        elif column.into:
            table = self if column.into == self._name else self._tables[column.into]
            wrong = (values < column.least) | (values >= len(table))
        elif column.type == "i8":
            wrong = (values > _MOST_INTEGER) | (values < -_MOST_INTEGER)
        elif column.type == "f8" and not column.optional:
            wrong = ~np.isfinite(values)
        if wrong.any():
            problem = "contains an invalid row index" if column.into else "has an invalid value"
            raise ValueError(f"{self._name}/{column.name} {problem}: {values[wrong][0]}")
