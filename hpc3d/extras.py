"""Packages that only some inputs need: they are asked for before anything starts.

A training rank does not import them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from hpc3d.plain import Problems

# The extra of hpc3d that installs a package.  The others come with hpc3d.
EXTRAS = {
    "otf2": "otf2",
    "pyarrow": "parquet",
    "scipy": "exact",
    "tensorboardX": "tensorboard",
    "tokenizers": "bpe",
    "torch": "torch",
}


def lacking(what: str, *packages: str) -> Iterator[str]:
    """A line for each of `packages` that `what` needs and that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            source = f"'hpc3d[{EXTRAS[package]}]'" if package in EXTRAS else package
            yield f"{what} needs {package}: pip install {source}"


def need(what: str, *packages: str) -> None:
    """ValueError with a line for each package that is lacking."""
    if lines := [*lacking(what, *packages)]:
        raise Problems(lines)
