"""Input files and command lines that are refused, and the lines that say why."""

import pytest

from hpc3d.config.load import load
from hpc3d.config.rules import resolve


def problems(*options, ranks=8, text="", folder=None):
    """The lines that a file with `text` and the command line `options` are refused with."""
    path = None
    if text:
        path = folder / "input.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as refused:
        resolve(load(path, options), ranks)
    return str(refused.value).splitlines()
