"""Kernels, GEMMs and memory of a GPU, used by the CUDA implementations of primitives.

The implementation of a primitive for one backend is called a rule. All work is enqueued on the
current stream, without waiting for the device. Partial sums, the statistics of normalization
layers, and parameter gradients are float32. Losses and norms are float64 arrays of shape [1].
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.pool import contiguous
from hpc3d.arrays.primitive import add_backend
from hpc3d.cuda import launch_table
from hpc3d.cuda.cublaslt_library import Unsupported

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.arrays.primitive import Primitive
    from hpc3d.cuda.cudnn_attention import Flash
    from hpc3d.cuda.device import DevicePool

WORKSPACE = 32 << 20  # size of cuBLASLt's workspace in bytes, recommended for Hopper by NVIDIA


class Gpu:
    """Kernels, GEMMs and memory of one device.

    `launch(name, rows, columns, **arguments)` launches a kernel (kernel_loader.Kernels).
    `multiply` computes GEMMs (Lt.product) and `coded` float8 GEMMs (Lt.coded_product). `flash`
    computes fused attention with cuDNN, or is `None` if cuDNN is not available. `empty(shape,
    dtype)` allocates an array on the device, and `bring(array)` copies a host array to the device.
    """

    def __init__(
        self,
        launch: Callable[..., None],
        multiply: Callable[..., None],
        flash: Flash | None,
        empty: Callable[..., Any],
        bring: Callable[[np.ndarray | float], Any],
        coded: Callable[..., None] | None = None,
    ) -> None:
        self.launch, self.multiply, self.flash = launch, multiply, flash
        self.empty, self.bring, self.coded = empty, bring, coded
        self.unsupported = set()

    def strips(self, rows: int) -> int:
        """Return the number of partial sums computed by a kernel that sums over `rows` rows."""
        return launch_table.strips(rows)

    def blocks(self, name: str, size: int) -> int:
        """Return the number of thread blocks launched for a flat array of `size` elements."""
        return launch_table.kernels()[name].launch(None, 1, size).grid[0]

    def pieces(self, pieces: Iterable[Any], kind: Callable[[Any], Hashable]) -> Iterator[Any]:
        """Yield the pieces of a primitive's work.

        Pieces with equal `kind(piece)` launch identical kernels. `AbstractGpu`, which only
        predicts costs, therefore yields only one piece of each kind.
        """
        yield from pieces

    def by_arrays(self, primitive: Primitive, *arrays: Array) -> None:
        """Run a primitive that has no CUDA kernel, using its NumPy implementation through CuPy."""
        primitive.numpy(*arrays)

    def contiguous(self, x: Array) -> Array:
        return contiguous(x)

    def multiply_gelu(self, a: Array, b: Array, out: Array, **epilogue: Any) -> None:
        try:
            self.multiply(a, b, out, **epilogue)
        except Unsupported as error:
            raise ValueError(f"train.fused_gelu = true: {error}; use false") from None

    def multiply_coded(self, a: Any, b: Any, out: Array) -> None:
        assert self.coded
        try:
            self.coded(a, b, out)
        except Unsupported as error:
            raise ValueError(f"train.product_scale = tensor: {error}; set it to block") from None

    def multiply_with(
        self, a: Array, b: Array, out: Array, add: Array | None, **epilogue: Any
    ) -> bool:
        """Compute a GEMM with a fused epilogue and return True; return False if it is unsupported.

        Unsupported cases, such as a vector at an unaligned address, are remembered and not tried
        again.
        """
        (name, vector), *_ = epilogue.items()
        key = name, a.shape, a.strides, b.shape, b.dtype, vector.data.ptr % 16
        if key in self.unsupported:
            return False
        try:
            self.multiply(a, b, out, add=add, **epilogue)
        except Unsupported:
            self.unsupported.add(key)
        return key not in self.unsupported


def add_gpu(kind: type, gpu: Gpu) -> None:
    """Register the CUDA implementations of all primitives for arrays of class `kind` on `gpu`."""
    add_backend(kind, lambda primitive: primitive.cuda_rule and partial(primitive.cuda_rule, gpu))


def use(pool: DevicePool, tf32: bool = False) -> str:
    """Register the CUDA implementations of all primitives; `pool` allocates their workspaces.

    Returns a log line that names the attention implementation.
    """
    from hpc3d.cuda.cublaslt import Lt
    from hpc3d.cuda.cudnn_attention import Flash
    from hpc3d.cuda.kernel_loader import Kernels

    device, flash = pool.device, None
    workspace = pool.empty((WORKSPACE,), np.uint8, "workspace")
    lt = Lt(device.compute.ptr, (workspace.data.ptr, WORKSPACE), tf32)
    missing, empty = Flash.missing(), partial(pool.empty, kind="workspace")
    if not missing:
        flash = Flash(pool.empty, device.compute.ptr, device.capability, scratch=empty)
    gpu = Gpu(Kernels(), lt.product, flash, empty, pool.bring, lt.coded_product)
    gpu.workspace = workspace  # keep the buffer alive: lt holds only its address
    add_gpu(device.array_type, gpu)
    return f"attention uses GEMMs (no {missing})" if missing else "attention uses cuDNN"
