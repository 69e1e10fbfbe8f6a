"""Packages that only some inputs need, with the extra of hpc3d that brings each: they are asked
for before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from hpc3d.plain import Problems

EXTRAS = {
    "bokeh": "report",
    "jinja2": "report",
    "matplotlib": "report",
    "networkx": "partition",
    "otf2": "otf2",
    "pandas": "report",
    "pyarrow": "parquet",
    "safetensors": "exchange",
    "scipy": "exact",
    "tensorboardX": "tensorboard",
    "tokenizers": "bpe",
    "torch": "torch",
}


def lacking(what: str, *packages: str) -> Iterator[str]:
    """A line for each of `packages` that `what` needs and that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            extra = EXTRAS[package]
            yield f"{what} needs {package}: pip install 'hpc3d[{extra}]'"


def need(what: str, *packages: str) -> None:
    """ValueError with a line for each package that is lacking."""
    if lines := [*lacking(what, *packages)]:
        raise Problems(lines)
