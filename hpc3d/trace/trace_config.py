"""Settings of a run, read from the configuration text in its trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc3d.config.deprecated_keys import use_new_names
from hpc3d.console.small_files import toml

if TYPE_CHECKING:
    from hpc3d.trace.reader import Trace


def tables_of(config: str) -> dict[str, Any]:
    """Parse a TOML configuration, and convert deprecated keys to their new names.

    Raises ValueError or TypeError if `config` is not valid TOML.
    """
    tables = toml(config)
    use_new_names(tables)
    return tables


def configured(config: str, section: str, key: str) -> Any:
    """Return a value of a TOML configuration, or None if `config` is invalid or lacks the key."""
    try:
        return tables_of(config)[section][key]
    except (ValueError, KeyError, TypeError):
        return None


def one_time(trace: Trace) -> bool:
    """Return True if event times can be compared between ranks: wall-clock, not CPU, times."""
    return configured(trace.attrs["config"], "trace", "clock") != "cpu"
