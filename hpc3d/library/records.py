"""Rows of a table as a list of dicts, which a notebook shows as a table."""

from __future__ import annotations

from html import escape
from numbers import Integral
from typing import TYPE_CHECKING, Any

from hpc3d.extras import need

if TYPE_CHECKING:
    from pandas import DataFrame

_SHOWN = 40  # rows in a notebook


class Records(list[dict[str, Any]]):
    """Rows, a dict each, with the same keys; numbers in SI units (s, B, FLOP/s)."""

    def frame(self) -> DataFrame:
        """The rows as a pandas DataFrame; ValueError where pandas is not installed."""
        need("a frame", "pandas")
        from pandas import DataFrame

        return DataFrame(list(self))

    def _repr_html_(self) -> str:
        """The table for a notebook, the first rows of many."""
        keys = list(dict.fromkeys(key for row in self for key in row))
        rows = [_line("td", [_written(row.get(key)) for key in keys]) for row in self[:_SHOWN]]
        more = len(self) - len(rows)
        rest = f"<p>and {more} more row{'s'[: more > 1]}</p>" if more else ""
        return f"<table>{_line('th', keys)}{''.join(rows)}</table>{rest}"


def _line(tag: str, cells: list[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _written(value: Any) -> str:
    """A cell: numbers with separators or four digits, nothing for what is not known."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Integral):
        return f"{int(value):,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
