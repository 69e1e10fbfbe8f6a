"""Input files and command lines that are rejected, with their error messages."""

from functools import partial

import pytest

from hpc3d.config.load import load
from hpc3d.config.resolve import resolve, violated

# Sizes that 8 and more ranks divide.
SIZES = {"--model.hidden": 144, "--model.heads": 24, "--train.batch": 144}
ON_2_2_2 = ["--mesh.x", "2", "--mesh.y", "2", "--mesh.z", "2"]


def sized(changes, *more):
    flat = [str(part) for item in {**SIZES, **changes}.items() for part in item]
    return [*flat, *more]


def problems(*options, ranks=8, text="", folder=None):
    """Return the error messages for a file with `text` and the command line `options`."""
    path = None
    if text:
        path = folder / "input.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as refused:
        resolve(load(path, options, rules=partial(violated, ranks=ranks)), ranks)
    return str(refused.value).splitlines()
