"""Argument types of command-line options: bounded numbers, sizes and rates."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from hpc3d.config.limits import INT32, MOST_RANKS
from hpc3d.console.command_line import taken

_UNITS = {"B": 1, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
FIGURES = ("svg", "pdf", "png")  # formats of figure files
_NARROWEST, _WIDEST = 1, 40  # width of a figure in inches


def integer(least: int, most: int) -> Callable[[str], int]:
    """Return an argparse type for integers in the range [least, most]."""

    def number(text):
        digits = text.strip()
        sound = digits.isascii() and digits.isdecimal() and len(digits) <= len(str(most))
        if not (sound and least <= int(digits) <= most):
            wanted = f"must be an integer from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text:.40}: {wanted}")
        return int(digits)

    return number


def real(sound: Callable[[float], bool], wanted: str) -> Callable[[str], float]:
    """Return an argparse type for numbers that satisfy `sound`; `wanted` describes them."""

    def value(text):
        with suppress(ValueError):
            if sound(found := float(text)):
                return found
        raise argparse.ArgumentTypeError(f"{text:.40}: {wanted}")

    return value


def _bytes(text, bare):
    number = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?) ?([A-Za-z]*)", text)
    units = _UNITS | {"": bare}
    if not number or number[2] not in units or not float(number[1]):
        known = ", ".join(_UNITS)
        raise argparse.ArgumentTypeError(
            f"{text:.40}: must be a size such as 80GB (units: {known})"
        )
    return float(number[1]) * units[number[2]]


class Joined(argparse.Action):
    """Argparse action for lists. If the option is repeated, the lists are concatenated."""

    def __call__(self, parser: Any, options: Any, found: Any, option: str | None = None) -> None:
        """Replace the default, or append the new values to those of the same option."""
        earlier = getattr(options, self.dest)
        both = found if earlier is self.default else [*dict.fromkeys([*earlier, *(found or ())])]
        setattr(options, self.dest, both)


def several(kind: Callable[[str], Any], text: str) -> list[Any]:
    """Convert a comma-separated list; `kind` converts an element. Duplicates are removed."""
    return [*dict.fromkeys(kind(each) for each in text.split(","))]


def choice(names: Sequence[str], text: str) -> str:
    """Return `text` if it is one of `names`."""
    if text not in names:
        raise argparse.ArgumentTypeError(f"{text:.40}: must be one of {', '.join(names)}")
    return text


def width(text: str) -> float:
    """Convert a width such as 84mm, 8.4cm or 3.3in to inches."""
    for unit, inches in (("mm", 1 / 25.4), ("cm", 1 / 2.54), ("in", 1.0)):
        if text.endswith(unit):
            with suppress(ValueError):
                if _NARROWEST <= (found := float(text.removesuffix(unit)) * inches) <= _WIDEST:
                    return found
    limits = f"{_NARROWEST:g}in to {_WIDEST:g}in"
    raise argparse.ArgumentTypeError(f"{text}: must be a width of {limits}, such as 84mm")


figures = partial(several, partial(choice, FIGURES))
size = partial(_bytes, bare=1e9)  # converts 80GB or 40GiB to bytes; the default unit is GB
rate = partial(_bytes, bare=1)  # converts 10GB or 10GiB (per second) to bytes/s; default: B
positive = integer(1, INT32)
number_of_ranks = integer(1, MOST_RANKS)


def ranks_taken(words: list[str], option: str) -> Any:
    """Remove an option from `words`, and return the number of ranks that is its value.

    Returns `None` without the option.

    Raises
    ------
    ValueError
        If the value is missing, or is not a valid number of ranks.
    """
    given = taken(words, option)
    try:
        return None if given is None else number_of_ranks(given)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{option} {error}") from None
