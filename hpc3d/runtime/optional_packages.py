"""Check for optional packages before a command starts, without importing them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from hpc3d.console.sanitize import Problems

# Package -> extra of hpc3d that installs the package.  hpc3d depends on all other packages.
EXTRAS = {
    "otf2": "otf2",
    "pyarrow": "parquet",
    "scipy": "exact",
    "tensorboardX": "tensorboard",
    "tokenizers": "bpe",
    "torch": "torch",
}


def lacking(what: str, *packages: str) -> Iterator[str]:
    """Yield a message for each missing package among the `packages` that `what` requires."""
    for package in packages:
        if find_spec(package) is None:
            source = f"'hpc3d[{EXTRAS[package]}]'" if package in EXTRAS else package
            yield f"{what} needs {package}: pip install {source}"


def need(what: str, *packages: str) -> None:
    """Raise ValueError with one line per missing package, if any package is missing."""
    if lines := [*lacking(what, *packages)]:
        raise Problems(lines)
