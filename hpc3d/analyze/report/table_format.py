"""Formatting of tables as Markdown, LaTeX and CSV, including headings, units and number formats.

A CSV file contains the unformatted values in SI units, with the column keys as headings. Cells are
escaped, so that they are not interpreted as HTML, macros or formulas.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_ROUNDING = 1e-9  # relative rounding error of a mean


class ColumnSpec(NamedTuple):
    """Column of a table, defined by its key in a row, its heading and its format function.

    `half` is the key of the half-width of the confidence interval, if the value is a mean.
    """

    key: str
    heading: str
    write: Callable = str
    half: str = ""

    @property
    def is_text(self) -> bool:
        return self.write is str

    def text(self, row: dict[str, Any]) -> str:
        """Return the formatted value of this column in a row, or a dash if it is unknown."""
        value = row.get(self.key)
        return "-" if value is None else with_half_width(value, row.get(self.half), self.write)


class TableSpec(NamedTuple):
    """Table of a report: its file name, title and columns.

    A text report shows only the first `rows_shown` rows and the first `columns_shown` columns. The
    value 0 means no limit. If `rows_shown` is negative, text reports omit the table. A LaTeX file
    has the columns with the keys `in_latex`, or all columns if there are none.
    """

    name: str
    title: str
    fields: tuple
    rows_shown: int = 0
    columns_shown: int = 0
    in_latex: tuple[str, ...] = ()

    def known(self, rows: Sequence[dict[str, Any]]) -> list[ColumnSpec]:
        """Return the columns that have a known value in at least one row."""
        return [each for each in self.fields if any(row.get(each.key) is not None for row in rows)]

    def narrowed(self) -> TableSpec:
        """Return a specification of this table that is limited to the columns of a text report."""
        return self._replace(fields=self.fields[: self.columns_shown or None])


# Number formats


def digits(value: float) -> str:
    """Format a number with three significant digits, without an exponent: 18,500 or 0.00123."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    decimals = 2 - math.floor(math.log10(abs(float(f"{value:.3g}"))))
    return f"{round(value, decimals):,.{max(0, decimals)}f}"


def seconds(value: float) -> str:
    """Format a number of seconds with a suitable unit: s, ms or us."""
    for unit, size in (("s", 1), ("ms", 1e-3)):
        if abs(value) >= size:
            return f"{digits(value / size)} {unit}"
    return f"{digits(value / 1e-6)} us"


def milliseconds(value: float) -> str:
    return digits(value * 1e3)


def microseconds(value: float) -> str:
    return digits(value * 1e6)


def percent(value: float) -> str:
    return f"{value:.1%}"


def change(value: float) -> str:
    """Format a relative difference as a signed percentage."""
    return f"{value:+.1%}" if value else "0%"


def count(value: float) -> str:
    return f"{value:,.1f}"


def integer(value: int) -> str:
    return f"{value:,d}"


def number(value: int) -> str:
    """Format an index, such as a rank. A negative index is formatted as a dash."""
    return f"{value:d}" if value >= 0 else "-"


def layer(value: int) -> str:
    """Format the index of a layer. Index -1 is the embedding and head."""
    return "embedding, head" if value == -1 else str(value)


def ratio(value: float) -> str:
    return f"{value:.3f}"


def prefixed(value: float) -> str:
    """Format a number with three significant digits and an SI prefix: 12345678 as 12.3 M."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{digits(value / size)} {prefix}"
    return f"{value:.3g}" if value != int(value) else f"{value:.0f}"


def with_half_width(mean: Any, half: float | None, write: Callable[[Any], str]) -> str:
    """Format a mean and the half-width of its confidence interval, such as 5.32 ± 0.12.

    If the half-width is unknown or a rounding error, the result is `write(mean)`.
    """
    if not half or half < _ROUNDING * abs(mean):
        return write(mean)
    decimals = max(0, 1 - math.floor(math.log10(half)))
    return f"{mean:,.{decimals}f} ± {half:,.{decimals}f}"


# Columns of the same format


def columns(write: Callable, **headings: str) -> tuple[ColumnSpec, ...]:
    """Return one column per keyword argument KEY="HEADING", all formatted by `write`."""
    return tuple(ColumnSpec(key, heading, write) for key, heading in headings.items())


def times(*names: str) -> tuple[ColumnSpec, ...]:
    """Return columns in ms: the name "wait" gives key "wait_s" and heading "wait [ms]"."""
    return columns(milliseconds, **{f"{name}_s": f"{name} [ms]" for name in names})


# Table formats


_RULE = 2  # minimum width of a column: the rule of a column of numbers is at least -:
_MARKDOWN = str.maketrans({char: rf"\{char}" for char in "\\`*[]<>|&"})


def in_markdown(text: str) -> str:
    """Escape text so that Markdown renders it literally, even in a table cell."""
    return text.translate(_MARKDOWN)


def markdown(
    fields: Sequence[ColumnSpec],
    rows: Sequence[dict[str, Any]],
    escape: Callable[[str], str] = in_markdown,
) -> str:
    """Format a table as Markdown with aligned columns. For a terminal, set `escape` to str."""
    columns = [_column(field, [escape(field.text(row)) for row in rows]) for field in fields]
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns))


def _column(field, values):
    """Return the cells of a Markdown column (heading, rule and values), padded to equal width.

    Text is left-aligned, and numbers are right-aligned.
    """
    cells = [field.heading, *values]
    width = max(_RULE, *map(len, cells))
    if field.is_text:
        rule, align = "-" * width, str.ljust
    else:
        rule, align = "-" * (width - 1) + ":", str.rjust
    heading, *cells = [align(cell, width) for cell in cells]
    return [heading, rule, *cells]


_LATEX = str.maketrans(
    {char: rf"\{char}" for char in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)


def latex(fields: Sequence[ColumnSpec], rows: Sequence[dict[str, Any]]) -> str:
    """Format a table as a LaTeX tabular environment with booktabs rules."""
    lines = [[field.heading for field in fields]]
    lines += [[field.text(row) for field in fields] for row in rows]
    heading, *body = [_latex_row(line) for line in lines]
    align = "".join("l" if field.is_text else "r" for field in fields)
    parts = [rf"\begin{{tabular}}{{{align}}}", r"\toprule", heading, r"\midrule"]
    return "\n".join([*parts, *body, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex_row(values):
    """Format a row. LaTeX would read a leading "[" or "*" as an argument of the command above."""
    line = " & ".join(text.translate(_LATEX) for text in values)
    return ("{}" if line.lstrip().startswith(("[", "*")) else "") + line + r" \\"


_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def in_csv(value: Any) -> Any:
    """Prefix text with an apostrophe if a spreadsheet would interpret it as a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def write(spec: TableSpec, rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write a table as NAME.csv, NAME.md and NAME.tex."""
    fields = spec.known(rows)
    printed = [each for each in fields if each.key in spec.in_latex or not spec.in_latex]
    name = folder / spec.name
    name.with_suffix(".md").write_text(markdown(fields, rows) + "\n", encoding="utf-8")
    name.with_suffix(".tex").write_text(latex(printed, rows), encoding="utf-8")
    write_csv(name.with_suffix(".csv"), rows)


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a CSV file with one column per key, in the order of the first occurrence."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row))
        writer.writeheader()
        writer.writerows({key: in_csv(value) for key, value in row.items()} for row in rows)
