"""A table as it is shown: headings with units, how values are written; as Markdown, LaTeX, CSV.

A table file in CSV has the values themselves, in SI units, under the names of the columns.  What a
cell says is text in all of them: no HTML, no macro, no formula.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class ColumnSpec(NamedTuple):
    """A column that is shown: the key of the rows, the heading, and how to write a value."""

    key: str
    heading: str
    write: Callable = str

    @property
    def is_text(self) -> bool:
        return self.write is str

    def text(self, row: dict[str, Any]) -> str:
        """The value of a row, written; a dash for what is not known."""
        value = row.get(self.key)
        return "-" if value is None else self.write(value)


class TableSpec(NamedTuple):
    """A kind of table: the name of its files, its title and its columns.

    `rows_shown` is how many rows a terminal shows, `columns_shown` how many columns; 0 are all.
    """

    name: str
    title: str
    fields: tuple
    rows_shown: int = 0
    columns_shown: int = 0

    def known(self, rows: Sequence[dict[str, Any]]) -> list[ColumnSpec]:
        """The columns that have a value in any row."""
        return [each for each in self.fields if any(row.get(each.key) is not None for row in rows)]

    def narrowed(self) -> TableSpec:
        """With the columns that a terminal shows."""
        return self._replace(fields=self.fields[: self.columns_shown or None])


# Ways to write a number


def digits(value: float) -> str:
    """Three significant digits, no exponent: 18,500, 12.3, 0.00123."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    behind = 2 - math.floor(math.log10(abs(float(f"{value:.3g}"))))
    return f"{round(value, behind):,.{max(0, behind)}f}"


def seconds(value: float) -> str:
    """A time with the unit that fits it."""
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
    """By which part something is more, or less."""
    return f"{value:+.1%}" if value else "0%"


def count(value: float) -> str:
    return f"{value:,.1f}"


def integer(value: int) -> str:
    return f"{value:,d}"


def number(value: int) -> str:
    """A number that names something, such as a rank; negative ones name nothing."""
    return f"{value:d}" if value >= 0 else "-"


def layer(value: int) -> str:
    """The number of a layer; what is before the first and after the last one are the ends."""
    return "ends" if value == -1 else str(value)


def ratio(value: float) -> str:
    return f"{value:.3f}"


def prefixed(value: float) -> str:
    """Three digits and an SI prefix: 12345678 is 12.3 M."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{digits(value / size)} {prefix}"
    return f"{value:.3g}" if value != int(value) else f"{value:.0f}"


# Ways to write a table


_MARKDOWN = str.maketrans({char: rf"\{char}" for char in "\\`*[]<>|&"})


def in_markdown(text: str) -> str:
    """A text without what Markdown would take for HTML, a link, a mark or the end of a cell."""
    return text.translate(_MARKDOWN)


def markdown(fields: Sequence[ColumnSpec], rows: Sequence[dict[str, Any]]) -> str:
    """A table that reads well as plain text, too."""
    columns = [_column(field, [field.text(row) for row in rows]) for field in fields]
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns))


def _column(field, values):
    """Heading, rule and cells of one width, text to the left and numbers to the right."""
    cells = [field.heading, *map(in_markdown, values)]
    width = max(map(len, cells))
    if field.is_text:
        rule, adjust = "-" * width, str.ljust
    else:
        rule, adjust = "-" * (width - 1) + ":", str.rjust
    heading, *cells = [adjust(cell, width) for cell in cells]
    return [heading, rule, *cells]


_LATEX = str.maketrans(
    {char: rf"\{char}" for char in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)


def latex(fields: Sequence[ColumnSpec], rows: Sequence[dict[str, Any]]) -> str:
    """A tabular with the rules of the package booktabs."""
    lines = [[field.heading for field in fields]]
    lines += [[field.text(row) for field in fields] for row in rows]
    heading, *body = [
        " & ".join(text.translate(_LATEX) for text in line) + r" \\" for line in lines
    ]
    adjust = "".join("l" if field.is_text else "r" for field in fields)
    parts = [rf"\begin{{tabular}}{{{adjust}}}", r"\toprule", heading, r"\midrule"]
    return "\n".join([*parts, *body, r"\bottomrule", r"\end{tabular}"]) + "\n"


_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def in_csv(value: Any) -> Any:
    """A value for a cell: a text that a spreadsheet would take for a formula begins with '."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def write(spec: TableSpec, rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write a table as NAME.csv, NAME.md and NAME.tex."""
    fields = spec.known(rows)
    name = folder / spec.name
    name.with_suffix(".md").write_text(markdown(fields, rows) + "\n", encoding="utf-8")
    name.with_suffix(".tex").write_text(latex(fields, rows), encoding="utf-8")
    with name.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row))
        writer.writeheader()
        writer.writerows({key: in_csv(value) for key, value in row.items()} for row in rows)
