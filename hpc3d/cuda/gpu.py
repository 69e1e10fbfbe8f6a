"""What the CUDA rules of primitives run on: kernels, products and memory of a device.

All is posted on the current stream, and nothing waits for the device.  Sums, moments and the
gradients of parameters are float32, losses and norms float64 [1].
"""

from functools import partial

import numpy as np

from hpc3d.arrays.pool import contiguous
from hpc3d.arrays.primitive import add_backend
from hpc3d.cuda import launch_table
from hpc3d.cuda.cublaslt_library import Unsupported

WORKSPACE = 32 << 20  # bytes that cuBLASLt may take for a product, as NVIDIA advises for Hopper


class Gpu:
    """`launch(name, rows, columns, **arguments)` starts a kernel (kernel_loader.Kernels),
    `multiply` is Lt.product, `flash` a Flash or None, `empty(shape, dtype)` an array of the
    device, `bring(array)` one with a host's values."""

    def __init__(self, launch, multiply, flash, empty, bring):
        self.launch, self.multiply, self.flash = launch, multiply, flash
        self.empty, self.bring = empty, bring
        self.unsupported = set()

    def strips(self, rows):
        """The partial sums in which kernels sum over `rows` rows."""
        return launch_table.strips(rows)

    def blocks(self, name, size):
        """The blocks of threads of a kernel on a flat array."""
        return launch_table.kernels()[name].launch(None, 1, size).grid[0]

    def contiguous(self, x):
        return contiguous(x)

    def multiply_gelu(self, a, b, out, **epilogue):
        try:
            self.multiply(a, b, out, **epilogue)
        except Unsupported as error:
            raise ValueError(f"train.fused_gelu = true: {error}; use false") from None

    def multiply_with(self, a, b, out, add, **epilogue):
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


def add_gpu(kind, gpu):
    """Let arrays of a type take the CUDA rules of primitives, on `gpu`."""
    add_backend(kind, lambda primitive: primitive.cuda_rule and partial(primitive.cuda_rule, gpu))


def use(pool, tf32=False):
    """Let CuPy's arrays take the CUDA rules, with workspaces of `pool`; what does attention."""
    from hpc3d.cuda.cublaslt import Lt
    from hpc3d.cuda.cudnn_attention import Flash
    from hpc3d.cuda.kernel_loader import Kernels

    device, flash = pool.device, None
    workspace = pool.empty((WORKSPACE,), np.uint8, "workspace")
    lt = Lt(device.compute.ptr, (workspace.data.ptr, WORKSPACE), tf32)
    missing = Flash.missing()
    if not missing:
        flash = Flash(pool.empty, device.compute.ptr, device.capability)
    empty = partial(pool.empty, kind="workspace")
    gpu = Gpu(Kernels(), lt.product, flash, empty, pool.bring)
    gpu.workspace = workspace  # lt has its address alone
    add_gpu(device.array_type, gpu)
    return f"attention by products: no {missing}" if missing else "attention by cuDNN"
