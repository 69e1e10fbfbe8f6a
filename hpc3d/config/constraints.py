"""Constraints on single keys of an input file: markers for the annotations in input_file.py, and
the check of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from functools import cache
from operator import attrgetter, ge, gt, le, lt
from typing import Any, ClassVar, get_type_hints


@dataclass(frozen=True)
class Bound:
    """A bound of a number; `keyword` is its name in a JSON schema."""

    limit: float
    words: ClassVar[str]
    keyword: ClassVar[str]
    holds: ClassVar[Callable[[float, float], bool]]


class AtLeast(Bound):
    words, keyword, holds = "at least", "minimum", ge


class MoreThan(Bound):
    words, keyword, holds = "above", "exclusiveMinimum", gt


class AtMost(Bound):
    words, keyword, holds = "at most", "maximum", le


class LessThan(Bound):
    words, keyword, holds = "below", "exclusiveMaximum", lt


@cache
def bounds_of(table: type, section: str = "") -> dict[str, tuple[Bound, ...]]:
    """Return {key with its section: the bounds in its annotation} of a dataclass."""
    found = {}
    for name, kind in get_type_hints(table, include_extras=True).items():
        if is_dataclass(kind):
            found |= bounds_of(kind, f"{name}.")
        else:
            markers = getattr(kind, "__metadata__", ())
            found[section + name] = tuple(each for each in markers if isinstance(each, Bound))
    return found


def out_of_bounds(config: Any) -> Iterator[str]:
    """Report every number that is not within the bounds of its key."""
    for key, bounds in bounds_of(type(config)).items():
        value = attrgetter(key)(config)
        if isinstance(value, int | float) and not all(
            bound.holds(value, bound.limit) for bound in bounds
        ):
            words = " and ".join(f"{bound.words} {bound.limit}" for bound in bounds)
            yield f"{key} = {_shortened(value)}: must be {words}"


def _shortened(value: float) -> str:
    """The text of a number, or its first digits and their count if it is long."""
    text = str(value)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} digits)"
