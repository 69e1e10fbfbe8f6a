"""What a run was told to do, read from the configuration that its trace keeps as text."""

import tomllib


def configured(config, section, key):
    """A value of a configuration in TOML, None where it has none; `config` may be any text."""
    try:
        return tomllib.loads(config)[section][key]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def one_time(trace):
    """Whether the clocks of the ranks tell the same time: not those that count processor time."""
    return configured(trace.attrs["config"], "trace", "clock") != "processor"
