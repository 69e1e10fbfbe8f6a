"""Constraints on individual keys of an input file.

The type annotations in input_file.py contain the constraints, and this module checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from math import isfinite
from operator import attrgetter, ge, gt, le, lt
from typing import Any, ClassVar, get_type_hints

from hpc3d.config.wrong_values import WrongValueUsed
from hpc3d.model.families import with_epsilon


@dataclass(frozen=True)
class Bound:
    """Lower or upper bound on a numeric key; `keyword` is its JSON Schema keyword."""

    limit: float
    words: ClassVar[str]
    keyword: ClassVar[str]
    holds: ClassVar[Callable[[float, float], bool]]

    def __str__(self) -> str:
        return f"{self.words} {self.limit}" if isfinite(self.limit) else "finite"


class AtLeast(Bound):
    words, keyword, holds = "at least", "minimum", ge


class MoreThan(Bound):
    words, keyword, holds = "above", "exclusiveMinimum", gt


class AtMost(Bound):
    words, keyword, holds = "at most", "maximum", le


class LessThan(Bound):
    words, keyword, holds = "below", "exclusiveMaximum", lt


class ValidFor:
    """Constraint that makes a key valid only for some values of another key.

    The key may differ from its default only if the value of the key `other` is one of `values`
    or, if `values` is empty, greater than 0.
    """

    def __init__(self, other: str, *values: Any) -> None:
        self.other, self.values = other, values

    def holds(self, config: Any) -> bool:
        value = attrgetter(self.other)(config)
        return value in self.values if self.values else value > 0

    def __str__(self) -> str:
        values = " or ".join(map(_text, self.values))
        return f"{self.other} = {values}" if values else f"{self.other} > 0"


@cache
def constraints_of(table: type, kind: type, section: str = "") -> dict[str, tuple[Any, ...]]:
    """Return a dict that maps section.key to a tuple of the key's constraints of class `kind`.

    Keys without such constraints are omitted. `table` is the dataclass of an input file or of a
    section.
    """
    found = {}
    for name, annotated in get_type_hints(table, include_extras=True).items():
        if is_dataclass(annotated):
            found |= constraints_of(annotated, kind, f"{name}.")
        else:
            markers = getattr(annotated, "__metadata__", ())
            if ours := tuple(each for each in markers if isinstance(each, kind)):
                found[section + name] = ours
    return found


def invalid_keys(config: Any) -> Iterator[str]:
    """Report every non-default key that is invalid for the values of other keys."""
    model = with_epsilon(type(config.model)(kind=config.model.kind))
    defaults, config = type(config)(model=model), replace(config, model=with_epsilon(config.model))
    for key, required in constraints_of(type(config), ValidFor).items():
        value, default = attrgetter(key)(config), attrgetter(key)(defaults)
        with suppress(WrongValueUsed):
            unmet = [each for each in required if not each.holds(config)]
            if unmet and value != default:
                conditions, others = map(str, unmet), (each.other for each in unmet)
                said = f"{key} = {_text(value)}: only valid for {' and '.join(conditions)}"
                yield f"{said}; leave it out, or change {' and '.join(others)}"


def out_of_bounds(config: Any) -> Iterator[str]:
    """Report every numeric key whose value is outside its bounds."""
    for key, bounds in constraints_of(type(config), Bound).items():
        value = attrgetter(key)(config)
        if isinstance(value, int | float) and not all(
            bound.holds(value, bound.limit) for bound in bounds
        ):
            words = " and ".join(map(str, bounds))
            yield f"{key} = {_text(value)}: must be {words}"


def _text(value: Any) -> str:
    """Format a value for a message, abbreviating long numbers."""
    if value is None:
        return "absent"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    long = isinstance(value, int | float) and len(text) > 40
    return f"{text[:20]}... ({len(text)} digits)" if long else text
