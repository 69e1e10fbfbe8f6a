"""Check, without importing them, that the optional packages a command needs are installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from hpc3d.console.sanitize import Problems

# Maps each optional package to the extra of hpc3d that installs it.
EXTRAS = {
    "mlflow": "mlflow",
    "otf2": "otf2",
    "pyarrow": "parquet",
    "scipy": "exact",
    "tensorboardX": "tensorboard",
    "torch": "torch",
    "wandb": "wandb",
}


def lacking(what: str, *packages: str) -> Iterator[str]:
    """Yield an error message for each of the `packages` that is missing.

    `what` is the subject of the message, such as the option that requires the packages.
    """
    for package in packages:
        if find_spec(package) is None:
            source = f"'hpc3d[{EXTRAS[package]}]'" if package in EXTRAS else package
            yield f"{what} needs {package}: pip install {source}"


def need(what: str, *packages: str) -> None:
    """Raise ValueError if any package is missing; the message has one line per missing package."""
    if lines := [*lacking(what, *packages)]:
        raise Problems(lines)
