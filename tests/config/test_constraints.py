"""Bounds of keys: values on both sides of each bound, and the table in docs/limits.md."""

import re
from dataclasses import is_dataclass
from math import inf, isfinite, nan
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from hpc3d.config.constraints import (
    AtLeast,
    AtMost,
    Bound,
    MoreThan,
    constraints_of,
    out_of_bounds,
)
from hpc3d.config.input_file import Config
from hpc3d.config.load import validate
from tests.elided import elided

TABLE = Path(__file__).parents[2] / "docs" / "limits.md"
BOUNDS = constraints_of(Config, Bound)
RANGES = {  # inclusive, of whole numbers
    key: [bound.limit for bound in bounds]
    for key, bounds in BOUNDS.items()
    if [type(bound) for bound in bounds] == [AtLeast, AtMost]
}


def edges():
    """Yield each finite bound with a value within it and one beyond it."""
    for key, bounds in BOUNDS.items():
        for bound in bounds:
            kind = int if key in RANGES or key == "seed" else float
            limit, step = kind(bound.limit), 1 if kind is int else abs(bound.limit) / 100 or 0.01
            inside = limit + step if isinstance(bound, MoreThan) else limit - step
            outside = limit - step if isinstance(bound, AtLeast) else limit + step
            inclusive = isinstance(bound, AtLeast | AtMost)
            if isfinite(bound.limit):
                yield key, *((limit, outside) if inclusive else (inside, limit))


def with_value(key, value):
    tree = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return validate(tree)


@pytest.mark.parametrize(("key", "within", "beyond"), [*edges()])
def test_number_outside_its_bounds_is_rejected(key, within, beyond):
    assert not [*out_of_bounds(with_value(key, within))]
    (line,) = out_of_bounds(with_value(key, beyond))
    limits = " ... ".join(
        "finite" if each.limit == inf else str(each.limit) for each in BOUNDS[key]
    )
    assert re.fullmatch(elided(f"{key} = {beyond}: ... {limits}"), line)


@pytest.mark.parametrize("key", [key for key in BOUNDS if key not in RANGES])
def test_nan_is_out_of_bounds(key):
    if key != "seed":
        (line,) = out_of_bounds(with_value(key, nan))
        assert line.startswith(f"{key} = nan: ")


def test_every_numeric_key_has_bounds():
    kinds = get_type_hints(Config)
    for section in [name for name, kind in kinds.items() if is_dataclass(kind)]:
        keys = get_type_hints(kinds.pop(section)).items()
        kinds |= {f"{section}.{key}": kind for key, kind in keys}
    numbers = [key for key, kind in kinds.items() if {int, float} & {kind, *get_args(kind)}]
    assert sorted(numbers) == sorted(BOUNDS)


def test_long_numbers_are_shortened_in_messages():
    (line,) = out_of_bounds(with_value("train.batch", 10**400))
    found, bounds = line.split(": ")
    assert found == "train.batch = 10000000000000000000... (401 digits)"
    assert re.fullmatch(".* 1 .* 1048576", bounds)


def test_documentation_lists_the_bounds():
    rows = {}
    for row in TABLE.read_text(encoding="utf-8").splitlines():
        names, *bounds = [cell.strip() for cell in row.strip("|").split("|")][:3]
        for key in re.findall(r"`([a-z.0-9_]+)`", names):
            rows.setdefault(key, bounds)
    for key, limits in RANGES.items():
        assert rows[key] == [*map(str, limits)], key
