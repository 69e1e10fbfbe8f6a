"""The settings of a run, read from the configuration that its trace keeps as text."""

from hpc3d.files import toml
from hpc3d.renamed import use_new_names


def tables_of(config):
    """The tables of a configuration in TOML, with the names of today; ValueError or TypeError if
    it is not TOML."""
    tables = toml(config)
    use_new_names(tables)
    return tables


def configured(config, section, key):
    """A value of a configuration in TOML, None where it has none; `config` may be any text."""
    try:
        return tables_of(config)[section][key]
    except (ValueError, KeyError, TypeError):
        return None


def one_time(trace):
    """Whether the clocks of the ranks tell the same time: not those that count CPU time."""
    return configured(trace.attrs["config"], "trace", "clock") != "cpu"
