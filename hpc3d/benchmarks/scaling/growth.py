"""Exponents with which time, communication and memory grow, and their theoretical values.

A rank receives a M h + b h^2 bytes per step, where M is the number of tokens and h is the hidden
size. The factors a and b depend on the number of ranks P as P^-s and P^-t:

    scheme      s      t
    1d          0      -    (weights are not communicated)
    2d-summa    1/2    1/2
    2.5d        2/3    1/3  (for a cube)
    3d          2/3    2/3

If one quantity grows, the exponent of the received bytes is between those of the two terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from hpc3d.analyze.report.table_format import ColumnSpec, markdown
from hpc3d.benchmarks.scaling.points import Point

_KEYS = {"tokens": "batch", "hidden": "hidden", "layers": "layers", "ranks": "ranks"}
QUANTITIES = tuple(_KEYS)
_FACTORS = (1, 2, 4, 8)
_SHARDED = {"1d": (0, 0), "2d-summa": (1 / 2, 1 / 2), "2.5d": (2 / 3, 1 / 3)}
_CUBE = 2 / 3, 2 / 3
_EXPONENTS = (
    ColumnSpec("kind", "values"),
    ColumnSpec("scheme", "scheme"),
    ColumnSpec("seconds", "forward + backward", "{:.2f}".format),
    ColumnSpec("received_bytes", "received", "{:.2f}".format),
    ColumnSpec("theory", "received, theory"),
    ColumnSpec("peak_bytes", "peak memory", "{:.2f}".format),
)


def grown(point: Point, quantity: str) -> list[Point]:
    """Return copies of a point in which the tokens, hidden size or layers are multiplied."""
    key = _KEYS[quantity]
    return [point._replace(**{key: getattr(point, key) * factor}) for factor in _FACTORS]


def theory(scheme: str, quantity: str) -> tuple[float, float]:
    """Return the minimum and maximum exponent of the received bytes.

    In weak scaling over ranks, M and h are proportional to the cube root of the number of ranks.
    """
    both = {"tokens": (1, 0), "hidden": (1, 2), "layers": (1, 1)}.get(quantity)
    if both is None:
        both = tuple(2 / 3 - each for each in _SHARDED.get(scheme, _CUBE))
    if scheme == "1d":
        both = both[:1] * 2
    return min(both), max(both)


def exponents(rows: Sequence[dict[str, Any]], quantity: str) -> list[dict[str, Any]]:
    """Fit one exponent per series and measure, by least squares of the logarithms.

    A series is the rows of one kind and scheme. Series with fewer than two values of the quantity,
    and measures that are 0, have no exponent.
    """
    found = []
    for (kind, scheme), group in groupby(rows, lambda row: (row["kind"], row["scheme"])):
        series = [*group]
        values = [row[_KEYS[quantity]] for row in series]
        if len({*values}) > 1:
            low, high = theory(scheme, quantity)
            text = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
            slopes = {
                "seconds": _slope(values, [row["forward_s"] + row["backward_s"] for row in series])
            }
            for key in ("received_bytes", "peak_bytes"):
                slopes[key] = _slope(values, [row[key] for row in series])
            found.append({"kind": kind, "scheme": scheme, "theory": text, **slopes})
    return found


def _slope(values, measured):
    if min(measured) <= 0:
        return None
    return float(np.polyfit(np.log(values), np.log(measured), 1)[0])


def table(rows: Sequence[dict[str, Any]]) -> str:
    return markdown(_EXPONENTS, rows)
