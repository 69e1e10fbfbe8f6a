"""Loader of the CUDA kernels in `kernels/*.cu`, compiled by CuPy's NVRTC.

A source file is compiled when one of its kernels is first launched. CuPy caches the compiled code
on disk, so that it is compiled only once per node.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from hpc3d.cuda import launch_table

if TYPE_CHECKING:
    from hpc3d.cuda.launch_table import Kernel

_ADDED = "--device-as-default-execution-space"  # CuPy adds this option; NVRTC rejects duplicates
_NULL = np.uint64(0)
_BFLOAT16 = 80  # minimum compute capability of bfloat16


class Kernels:
    """Compiled CUDA kernels, launched by calling kernels(name, rows, columns, **parameters).

    launch_table.Kernel.launch documents `rows` and `columns`; launch_table.Kernel.bind documents
    the parameters.
    """

    def __init__(self) -> None:
        self.functions = {}
        self.reals = [*launch_table.REALS]
        if int(cupy.cuda.Device().compute_capability) < _BFLOAT16:
            self.reals.remove("bfloat16")

    def __call__(self, name: str, rows: int, columns: int, /, **given: Any) -> None:
        """Launch a kernel on the current stream, with a grid that covers the given size."""
        kernel = launch_table.kernels()[name]
        real, values = kernel.bind(lambda array: array.dtype.name, given)
        launch = kernel.launch(real, rows, columns)
        if launch.grid[0]:
            self.function(kernel, real)(*launch, tuple(map(_in_register, values)))

    def function(self, kernel: Kernel, real: str | None) -> Callable[..., None]:
        expression = kernel.expression(real)
        if expression not in self.functions:
            self.load(kernel.source)
        return self.functions[expression]

    def load(self, source: str) -> None:
        """Compile all kernels of a source file."""
        ours = [kernel for kernel in launch_table.kernels().values() if kernel.source == source]
        names = [*dict.fromkeys(k.expression(real) for k in ours for real in self.reals)]
        module = cupy.RawModule(
            code=launch_table.text(source), options=options(), name_expressions=names
        )
        self.functions |= {name: module.get_function(name) for name in names}


def options() -> tuple[str, ...]:
    """Return the compiler options for NVRTC.

    CuPy's cache key covers the source and the options, but not the headers. One option therefore
    contains a digest of our headers.
    """
    headers = "".join(path.read_text() for path in sorted(launch_table.FOLDER.glob("*.cuh")))
    digest = sha256(headers.encode()).hexdigest()
    ours = [option for option in launch_table.OPTIONS if option != _ADDED]
    return (*ours, f"-I{launch_table.FOLDER}", f"-DHEADERS_{digest}")


def _in_register(value: Any) -> np.generic:
    """Convert a kernel argument to a NumPy scalar: a number, or the address of an array."""
    if isinstance(value, np.generic):
        return value
    if value is None:
        return _NULL
    assert value.flags.c_contiguous
    return np.uint64(value.data.ptr)
