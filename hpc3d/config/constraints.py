"""Constraints on single keys of an input file.

They are markers in the annotations of input_file.py; the functions here check them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from math import isfinite
from operator import attrgetter, ge, gt, le, lt
from typing import Any, ClassVar, get_type_hints

from hpc3d.config.wrong_values import reported
from hpc3d.model.families import with_epsilon


@dataclass(frozen=True)
class Bound:
    """Bound of a number; `keyword` is its name in a JSON schema."""

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
    """Marks a key that may differ from its default only if the key `other` has one of `values`.

    Without `values`, `other` must be above 0.
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
    """Return a dict from section.key to constraints of type `kind`, from annotations."""
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
    """Report every key that is set although the values of other keys make it invalid."""
    model = with_epsilon(type(config.model)(kind=config.model.kind))
    defaults, config = type(config)(model=model), replace(config, model=with_epsilon(config.model))
    for key, required in constraints_of(type(config), ValidFor).items():
        yield from reported(_invalid(key, required, config, attrgetter(key)(defaults)))


def _invalid(key: str, required: tuple[ValidFor, ...], config: Any, default: Any) -> Iterator[str]:
    value = attrgetter(key)(config)
    unmet = [each for each in required if not each.holds(config)]
    if unmet and value != default:
        conditions, others = map(str, unmet), (each.other for each in unmet)
        said = f"{key} = {_text(value)}: only valid for {' and '.join(conditions)}"
        yield f"{said}; leave it out, or change {' and '.join(others)}"


def out_of_bounds(config: Any) -> Iterator[str]:
    """Report every number that is outside of the bounds of its key."""
    for key, bounds in constraints_of(type(config), Bound).items():
        value = attrgetter(key)(config)
        if isinstance(value, int | float) and not all(
            bound.holds(value, bound.limit) for bound in bounds
        ):
            words = " and ".join(map(str, bounds))
            yield f"{key} = {_text(value)}: must be {words}"


def _text(value: Any) -> str:
    """Return the text of a value; long numbers are abbreviated."""
    if value is None:
        return "absent"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    long = isinstance(value, int | float) and len(text) > 40
    return f"{text[:20]}... ({len(text)} digits)" if long else text
