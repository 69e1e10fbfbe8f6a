"""The settings of a run, read from the configuration that its trace keeps as text."""

from hpc3d.files import toml


def configured(config, section, key):
    """A value of a configuration in TOML, None where it has none; `config` may be any text."""
    try:
        return toml(config)[section][key]
    except (ValueError, KeyError, TypeError):
        return None


def one_time(trace):
    """Whether the clocks of the ranks tell the same time: not those that count processor time."""
    return configured(trace.attrs["config"], "trace", "clock") != "processor"
