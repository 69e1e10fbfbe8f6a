"""The settings of a run, read from the configuration that its trace keeps as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc3d.files import toml
from hpc3d.renamed import use_new_names

if TYPE_CHECKING:
    from hpc3d.trace.reader import Trace


def tables_of(config: str) -> dict[str, Any]:
    """The tables of a configuration in TOML, with the names of today; ValueError or TypeError if
    it is not TOML."""
    tables = toml(config)
    use_new_names(tables)
    return tables


def configured(config: str, section: str, key: str) -> Any:
    """A value of a configuration in TOML, None where it has none; `config` may be any text."""
    try:
        return tables_of(config)[section][key]
    except (ValueError, KeyError, TypeError):
        return None


def one_time(trace: Trace) -> bool:
    """Whether the clocks of the ranks tell the same time: not those that count CPU time."""
    return configured(trace.attrs["config"], "trace", "clock") != "cpu"
