"""What the CUDA rules of primitives run on: kernels, products and memory of a device.

All is posted on the current stream, and nothing waits for the device.  Sums, moments and the
gradients of parameters are float32, losses and norms float64 [1].
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

WORKSPACE = 32 << 20  # bytes that cuBLASLt may take for a product, as NVIDIA advises for Hopper


class Gpu:
    """`launch(name, rows, columns, **arguments)` starts a kernel (kernel_loader.Kernels),
    `multiply` is Lt.product and `coded` Lt.coded_product, `flash` a Flash or None, `empty(shape,
    dtype)` an array of the device, `bring(array)` one with a host's values."""

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
        """The partial sums in which kernels sum over `rows` rows."""
        return launch_table.strips(rows)

    def blocks(self, name: str, size: int) -> int:
        """The blocks of threads of a kernel on a flat array."""
        return launch_table.kernels()[name].launch(None, 1, size).grid[0]

    def pieces(self, pieces: Iterable[Any], kind: Callable[[Any], Hashable]) -> Iterator[Any]:
        """The pieces of a rule's work; those of one `kind` launch the same."""
        yield from pieces

    def by_arrays(self, primitive: Primitive, *arrays: Array) -> None:
        """What has no kernel, by the operations that arrays of a device have themselves."""
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
            raise ValueError(f"train.product_scale = tensor: {error}; use block") from None

    def multiply_with(
        self, a: Array, b: Array, out: Array, add: Array | None, **epilogue: Any
    ) -> bool:
        """Whether cuBLASLt did a product with an epilogue: what it cannot do once, such as a
        vector at an odd address, is not asked for again."""
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
    """Let arrays of a type take the CUDA rules of primitives, on `gpu`."""
    add_backend(kind, lambda primitive: primitive.cuda_rule and partial(primitive.cuda_rule, gpu))


def use(pool: DevicePool, tf32: bool = False) -> str:
    """Let CuPy's arrays take the CUDA rules, with workspaces of `pool`; what does attention."""
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
    gpu.workspace = workspace  # lt has its address alone
    add_gpu(device.array_type, gpu)
    return f"attention by products: no {missing}" if missing else "attention by cuDNN"
