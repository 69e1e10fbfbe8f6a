"""Read and write safetensors files, which cannot contain executable code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from hpc3d.console.sanitize import sanitized
from hpc3d.console.small_files import replacing
from hpc3d.runtime.optional_packages import need

_WIDE = {"F64": np.float64, "F32": np.float32, "F16": np.float32, "BF16": np.float32}


class Entry(NamedTuple):
    """Array in a weights file; `dtype` is the name of its data type in the safetensors format."""

    dtype: str
    shape: tuple


class Weights:
    """Weights file opened for reading; `entries` maps each array name to an `Entry`.

    Raises ValueError, with a one-line message, if the file is damaged or is not in safetensors
    format.
    """

    def __init__(self, path: Path) -> None:
        self.path, package = Path(path), _library()
        try:
            with package.safe_open(self.path, "np") as file:
                parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                self.entries = {
                    name: Entry(part.get_dtype(), tuple(part.get_shape()))
                    for name, part in parts.items()
                }
        except package.SafetensorError as error:
            what = sanitized(str(error))  # the message may contain text from the file
            raise ValueError(f"{path} is not a complete safetensors file: {what}") from None

    def read(self, name: str) -> np.ndarray:
        """Read an array by name, as float64 if it is stored as float64, otherwise as float32."""
        dtype = self.entries[name].dtype
        if dtype not in _WIDE:
            raise ValueError(
                f"{self.path}: {name!r} has type {dtype!r}; supported types: {', '.join(_WIDE)}"
            )
        with _library().safe_open(self.path, "np") as file:
            return file.get_tensor(name).astype(_WIDE[dtype], copy=False)


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a dict of arrays to `path` atomically: the file appears once all data is on disk."""
    package = _library()
    from safetensors.numpy import save_file

    try:
        with replacing(path) as temporary:
            temporary.touch()  # sets default permissions; safetensors would set 0600
            mode = temporary.stat().st_mode
            save_file(arrays, temporary, {"format": "pt"})
            temporary.chmod(mode)
    except package.SafetensorError as error:  # raised for disk errors
        raise ValueError(f"{path}: {error}") from None


def _library() -> ModuleType:
    need("exchanging weights", "safetensors")
    import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
    import safetensors

    return safetensors
