"""Table, figure and findings of a scaling study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc3d.analyze.report.palette import RUNS, default_style
from hpc3d.analyze.report.plot_matplotlib import WIDTH, empty, save
from hpc3d.analyze.report.table_format import (
    ColumnSpec,
    TableSpec,
    columns,
    integer,
    markdown,
    milliseconds,
    prefixed,
    ratio,
    times,
)
from hpc3d.analyze.report.table_format import write as write_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = {"1d": 2.32, "2d-summa": 1.57}  # published speedup of 3-D over each scheme on 64 GPUs
_FIELDS = (
    ColumnSpec("kind", "times"),
    ColumnSpec("scheme", "scheme"),
    *columns(integer, ranks="ranks"),
    ColumnSpec("mesh", "mesh"),
    *columns(integer, hidden="hidden", batch="batch", heads="heads", layers="layers"),
    *times("forward", "backward"),
    ColumnSpec("sequence_s", "per sequence [ms]", milliseconds),
    ColumnSpec("low_s", "from", milliseconds),
    ColumnSpec("high_s", "to", milliseconds),
    *columns(ratio, growth="growth"),
    *columns(prefixed, received_bytes="received [B]", peak_bytes="peak memory [B]"),
)


def table(name: str) -> TableSpec:
    return TableSpec(name, "Scaling", _FIELDS)


def with_growth(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the time per sequence relative to the first row of the same scheme and kind."""
    found = []
    for _, group in _series(rows):
        series = [*group]
        first = series[0]["sequence_s"]
        found += [row | {"growth": row["sequence_s"] / first} for row in series]
    return found


def write(rows: Sequence[dict[str, Any]], name: str, folder: Path, figure: bool = True) -> None:
    """Write the table as CSV, Markdown and LaTeX, and the `figure` as SVG, PDF and PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    write_table(table(name), rows, folder)
    if not figure:
        return
    with default_style():
        save(_figure(rows), folder / name, ("png", "svg", "pdf"))


def _figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """Plot the time per sequence: dashed lines are predicted, solid lines are measured."""
    figure, (panel,) = empty(WIDTH, 4)
    colors = dict(zip(dict.fromkeys(row["scheme"] for row in rows), RUNS))
    for (kind, scheme), group in _series(rows):
        ranks, times, low, high = zip(*map(_bar, group), strict=True)
        style = {"color": colors[scheme], "marker": "o", "ms": 3, "lw": 1.4, "capsize": 2}
        dash = {"predicted": "--", "measured": "-"}[kind]
        panel.errorbar(ranks, times, (low, high), ls=dash, label=f"{scheme}, {kind}", **style)
    every = sorted({row["ranks"] for row in rows})
    panel.set_xscale("log")
    panel.set_xticks(every, every)
    panel.minorticks_off()
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter("{x:g}")
    panel.grid(color="0.9", linewidth=0.6)
    panel.set_xlabel("ranks")
    panel.set_ylabel("time per sequence [ms]")
    panel.legend(frameon=False, fontsize=8)
    return figure


def _bar(row):
    """Return the ranks, the time per sequence in ms, and the lengths of the error bar."""
    middle = row["sequence_s"]
    low, high = row.get("low_s", middle), row.get("high_s", middle)
    return row["ranks"], middle * 1e3, (middle - low) * 1e3, (high - middle) * 1e3


def _series(rows):
    return groupby(rows, lambda row: (row["kind"], row["scheme"]))


def text(rows: Sequence[dict[str, Any]], name: str) -> str:
    return markdown(table(name).known(rows), rows)


def findings(rows: Sequence[dict[str, Any]], weak: bool) -> Iterator[str]:
    """Yield sentences that compare the rows with the two claims of arXiv:2105.14450.

    The claims are that 3-D is faster than 1-D and 2-D on 64 ranks, and that its time per sequence
    grows slowest with the number of ranks in weak scaling.
    """
    for kind in dict.fromkeys(row["kind"] for row in rows):
        found = {(row["scheme"], row["ranks"]): row for row in rows if row["kind"] == kind}
        for ranks in sorted({ranks for scheme, ranks in found if scheme == "3d" and ranks > 1}):
            yield from _speedups(found, ranks, kind)
        if weak:
            yield from _slowest_growth(found, kind)


def _speedups(found, ranks, kind):
    cube, parts = found["3d", ranks]["sequence_s"], []
    for scheme, published in PAPER.items():
        if other := found.get((scheme, ranks)):
            over = other["sequence_s"] / cube
            paper = f" (paper: {published})" if ranks == 64 else ""
            parts.append(f"{over:.2f} times as fast as {scheme}{paper}")
    if parts:
        yield f"{kind}, {ranks} ranks: 3d is {' and '.join(parts)}"


def _slowest_growth(found, kind):
    last = {}
    for (scheme, ranks), row in found.items():
        if ranks >= last.get(scheme, row)["ranks"]:
            last[scheme] = row
    grown = {scheme: row for scheme, row in last.items() if scheme in (*PAPER, "3d")}
    if "3d" in grown and len(grown) > 1 and len({row["ranks"] for row in grown.values()}) == 1:
        least = min(grown, key=lambda scheme: grown[scheme]["growth"])
        each = ", ".join(f"{scheme} {row['growth']:.2f}" for scheme, row in last.items())
        holds = "holds" if least == "3d" else "does not hold"
        yield (
            f"{kind}, growth of the time per sequence: {each}; the claim that 3d grows slowest "
            f"of 1d, 2d and 3d {holds}"
        )
