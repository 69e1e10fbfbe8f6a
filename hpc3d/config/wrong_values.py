"""Placeholder for invalid values of an input file; rules that use it are skipped.

Each invalid value is replaced by WRONG, and every operation on WRONG raises `WrongValueUsed`. A
rule is a generator that yields problems. The generator ends when the rule first uses an invalid
value, so the rule reports no problem caused by that value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, NoReturn

_OPERATIONS = (
    "getattr bool eq hash lt le gt ge add radd sub rsub mul rmul mod rmod floordiv rfloordiv "
    "truediv rtruediv neg index iter len contains getitem str format"
)


class WrongValueUsed(Exception):
    """Exception raised by every operation on WRONG."""


def _raise(*operands: Any) -> NoReturn:
    raise WrongValueUsed


_operations: dict[str, Any] = {f"__{name}__": _raise for name in _OPERATIONS.split()}
WRONG: Any = type("Wrong", (), {**_operations, "__deepcopy__": lambda self, memo: self})()


def mark_wrong(config: Any, names: Iterable[str]) -> Any:
    """Return a Config in which the named values are replaced by WRONG.

    `names` contains keys, sections, or messages that begin with a key. Other names are ignored.
    """
    for name in names:
        section, _, key = re.match(r"\w*(\.\w+)?", name)[0].partition(".")
        if section not in _names(config):
            continue
        value, marked = getattr(config, section), WRONG
        if is_dataclass(value):
            keys = {key} & _names(value) if key else _names(value)
            marked = replace(value, **dict.fromkeys(keys, WRONG))
        config = replace(config, **{section: marked})
    return config


def _names(table: Any) -> set[str]:
    return {item.name for item in fields(table)}


def reported(*rules: Iterator[str]) -> Iterator[str]:
    """Yield the problems found by all rules; end a rule when it first uses an invalid value."""
    for rule in rules:
        try:
            yield from rule
        except WrongValueUsed:
            continue
