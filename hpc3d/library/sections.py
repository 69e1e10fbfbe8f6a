"""Values of an input file, given from Python, as the options of a command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import Any

from hpc3d.config.load import literal


def options_of(values: Mapping[str, Any]) -> list[str]:
    """`--section.key value` words for values by their key, and for sections as dicts.

    options_of({"seed": 1, "mesh": {"x": 2}})  ->  ["--seed", "1", "--mesh.x", "2"]

    They are understood and refused as those of a command line are; None leaves a value as it is.
    """
    return [word for key, value in _flat(values) for word in (f"--{key}", _text(value))]


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Each key with its sections, and its value."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        elif value is not None:
            yield f"{above}{key}", value


def _text(value: Any) -> str:
    """A value as TOML has it: what is no number, truth value or list is a text."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(int(value))  # NumPy's, too
    return literal(value if isinstance(value, bool | float | list | tuple) else str(value))
