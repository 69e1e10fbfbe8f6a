"""Deprecated keys and values of input files, which are still accepted.

This module imports no other module of hpc3d, because the readers of input files, machine files and
traces all import it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

KEYS = {  # section -> {old key: new key}
    "guard": {"products_every": "abft_every", "spike": "loss_spike_sigma"},
    "parallel": {"stages": "layers_per_stage"},
    "run": {"tensorboard": "trackers"},
    "train": {"graph": "cuda_graph"},
}
VALUES: Mapping[
    str, Mapping[str, Mapping[Any, Any]]
] = {  # section -> {key: {old value: new value}}
    "mesh": {"transport": {"staged": "host-staged"}},
    "run": {"trackers": {False: [], True: ["tensorboard"]}},  # of the old key
    "trace": {"clock": {"processor": "cpu"}},
}


def use_new_names(tree: dict[str, Any]) -> list[str]:
    """Rename the deprecated keys and values of a parsed input file in place.

    Returns one notice per renamed key or value. Raises ValueError if a key is given under both its
    old and its new name.
    """
    notices = []
    for section, table in tree.items():
        if isinstance(table, dict):
            notices += rename_keys(table, KEYS.get(section, {}), f"{section}.")
            for key, values in VALUES.get(section, {}).items():
                old = table.get(key)
                if isinstance(old, str | bool) and old in values:
                    table[key] = values[old]
                if isinstance(old, str) and old in values:
                    notices.append(f'{section}.{key} = "{old}" is now called "{values[old]}"')
    return notices


def rename_keys(table: dict[str, Any], names: Mapping[str, str], prefix: str = "") -> list[str]:
    """Rename the deprecated keys of one table in place; return one notice per renamed key.

    In the notices, `prefix` is prepended to each key. Raises ValueError if a key is given under
    both its old and its new name.
    """
    found = [(old, new) for old, new in names.items() if old in table]
    for old, new in found:
        _refuse_both(prefix + old, prefix + new, table=[prefix + key for key in table])
        table[new] = table.pop(old)
    return [f"{prefix}{old} is now called {prefix}{new}" for old, new in found]


def rename_options(keys: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace deprecated names in a list of `section.key` names.

    Returns the new list, and one notice per replaced name.

    Raises ValueError if a key is given under both its old and its new name.
    """
    new_names, notices = [], []
    for old in keys:
        section, _, key = old.partition(".")
        new = f"{section}.{KEYS[section][key]}" if key in KEYS.get(section, {}) else old
        if new != old:
            _refuse_both(old, new, keys)
            notices.append(f"{old} is now called {new}")
        new_names.append(new)
    return new_names, notices


def _refuse_both(old: str, new: str, table: Collection[str]) -> None:
    if new in table:
        raise ValueError(f"{old} is the old name of {new}, which is also set; leave {old} out")


def warn(notices: Iterable[str]) -> None:
    """Print each distinct notice once to standard error, as a warning."""
    for notice in dict.fromkeys(notices):
        print(f"warning: {notice}", file=sys.stderr)
