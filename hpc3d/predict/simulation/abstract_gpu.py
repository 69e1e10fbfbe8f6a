"""CUDA backend for abstract arrays (shapes without data).

The backend counts kernel launches, GEMMs and workspace memory instead of computing anything. The
kernels and their arguments are selected by the same code as on a real GPU, so the counts are
exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from math import prod, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.abstract import AbstractArray, AbstractPool, counted, of_shapes
from hpc3d.arrays.pool import contiguous, has_values, value_of
from hpc3d.arrays.primitive import add_backend
from hpc3d.cuda import launch_table
from hpc3d.cuda.cudnn_attention import Case, result_shape, takes
from hpc3d.cuda.gpu import WORKSPACE, Gpu
from hpc3d.ops.float8 import E4M3

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.abstract import CostMeter
    from hpc3d.arrays.primitive import Primitive
    from hpc3d.config.input_file import Config
    from hpc3d.ops.float8 import Coded


class _DeviceShape(AbstractArray):
    __slots__ = ()


class DeviceShapes(AbstractPool):
    """Pool of abstract device arrays, with the same accounting as `cuda.DevicePool`."""

    kind, on_device = _DeviceShape, True

    def __init__(self, meter: CostMeter | None = None) -> None:
        super().__init__(meter, shared_memory=False)
        self.float8 = self.meter.float8
        self.gpu = AbstractGpu(self)

    def bring(self, array: Any) -> AbstractArray:
        return self.empty(np.shape(array), getattr(array, "dtype", np.float32))

    def refill(self, array: AbstractArray, values: Any) -> None:
        """Copy the values of a host array to an array created by `bring`."""

    def graph(self) -> AbstractGraph:
        """Return a CUDA graph of this pool."""
        return AbstractGraph(self.meter)


class AbstractGraph:
    """CUDA graph of work on abstract arrays, which is reported to `meter` when it is captured."""

    immediate = True

    def __init__(self, meter: CostMeter) -> None:
        self.begin, self.end = meter.begin_graph, meter.end_graph


class AbstractGpu(Gpu):
    """GPU that computes nothing and only reports kernels and GEMMs to the cost meter of `pool`."""

    def __init__(self, pool: AbstractPool) -> None:
        self.pool, empty = pool, partial(pool.empty, kind="workspace")
        attention = _AbstractAttention(pool)
        super().__init__(self.launched, self.multiplied, attention, empty, pool.bring)
        self.workspace = empty((WORKSPACE,), np.uint8)

    def pieces(self, pieces: Iterable[Any], kind: Callable[[Any], Hashable]) -> Iterator[Any]:
        """Yield one item of each kind in `pieces`.

        The work that the caller does on this item is counted once for every item of the same kind.
        """
        first, counts = {}, Counter()
        for piece in pieces:
            like = kind(piece)
            first.setdefault(like, piece)
            counts[like] += 1
        for like, piece in first.items():
            with self.pool.meter.counting(counts[like]):
                yield piece

    def launched(self, name: str, rows: int, columns: int, /, **given: Any) -> None:
        touched = [*given.values(), *(given[key] for key in launch_table.kernels()[name].updated)]
        self.pool.meter.kernel(name, sum(array.nbytes for array in of_shapes(touched)))

    def multiplied(
        self, a: AbstractArray, b: AbstractArray, out: AbstractArray, **epilogue: Any
    ) -> None:
        *batch, rows, inner = a.shape
        self.pool.meter.product(rows, b.shape[-1], inner, a.dtype, prod(batch))

    def multiply_coded(self, a: Coded, b: Coded, out: AbstractArray) -> None:
        self.pool.meter.product(*out.shape, a.shape[1], np.dtype(E4M3))

    def by_arrays(self, primitive: Primitive, *arrays: Any) -> None:
        self.pool.meter.kernel(primitive.__name__, sum(array.nbytes for array in arrays))

    def contiguous(self, x: AbstractArray) -> AbstractArray:
        return x.made_by("copy", x)

    def multiply_with(
        self,
        a: AbstractArray,
        b: AbstractArray,
        out: AbstractArray,
        add: AbstractArray | None,
        **epilogue: Any,
    ) -> bool:
        """Count a GEMM; return True, because cuBLASLt supports every requested epilogue."""
        self.multiplied(a, b, out)
        return True


class _AbstractAttention:
    """Cost model of cuDNN's fused attention (cudnn_attention.Flash).

    The score matrix is not stored in memory. With a causal mask, half of every GEMM is computed,
    and with a window, only the scores in the window.
    The backward pass has five GEMMs, one of which recomputes the scores. All layers share a
    workspace of the size that cuDNN 9.19 requests on an H100: the gradient of q in float32, and
    for each row the dot product of out and its gradient in float32. A ring hop is recorded as a
    square with the same number of scores, which determines its rate.
    """

    def __init__(self, pool: AbstractPool) -> None:
        self.pool = pool

    def suits(self, dtype: DTypeLike, width: int, drop: object) -> bool:
        return takes(dtype, width, drop, self.pool.meter.widest)

    def forward(
        self, qkv: AbstractArray, sequence: int, form: tuple[int, int], *mask: Any
    ) -> tuple[AbstractArray, AbstractArray]:
        case = Case.of(qkv, sequence, form, *mask)
        heads = case.heads * case.queries
        self.have(4 * qkv.shape[0] * heads * (case.width + 1))
        out = self.pool.empty((qkv.shape[0], heads * case.width), qkv.dtype)
        stats = self.pool.empty((case.batch, heads, sequence, 1), np.float32)
        self.tell(case, sequence**2, (qkv, out, stats, *of_shapes(mask)))
        return out, stats

    def backward(
        self,
        dout: AbstractArray,
        qkv: AbstractArray,
        out: AbstractArray,
        stats: AbstractArray,
        sequence: int,
        form: tuple[int, int],
        *mask: Any,
        bias: AbstractArray | None = None,
    ) -> AbstractArray:
        dqkv = self.pool.empty(qkv.shape, qkv.dtype)
        case, moved = Case.of(qkv, sequence, form, *mask), of_shapes([dout, qkv, out, stats, bias])
        self.tell(case, sequence**2, [*moved, dqkv], backward=True)
        return dqkv

    def hop(
        self,
        q: AbstractArray,
        k: AbstractArray,
        v: AbstractArray,
        causal: bool,
        window: int = 0,
        bias: AbstractArray | None = None,
    ) -> tuple[AbstractArray, AbstractArray]:
        empty = partial(self.pool.empty, kind="workspace")
        self.have(4 * q.size // q.shape[-1] * (q.shape[-1] + 1))
        out, sums = empty(result_shape(q), q.dtype), empty(q.shape[:-1], np.float32)
        case = _square(q, k, causal, window)
        self.tell(case, q.shape[3] * k.shape[2], of_shapes([q, k, v, bias, out, sums]))
        return out, sums

    def hop_grad(
        self,
        dout: AbstractArray,
        qkv: tuple[AbstractArray, AbstractArray, AbstractArray],
        out: AbstractArray,
        sums: AbstractArray,
        causal: bool,
        window: int = 0,
        bias: AbstractArray | None = None,
    ) -> tuple[AbstractArray, AbstractArray]:
        empty, (q, k, _) = partial(self.pool.empty, kind="workspace"), qkv
        dq, dkv = empty(result_shape(q), q.dtype), empty((2, *k.shape), k.dtype)
        moved = of_shapes([dout, *qkv, bias, out, sums, dq, dkv])
        case = _square(q, k, causal, window)
        self.tell(case, q.shape[3] * k.shape[2], moved, backward=True)
        return dq, dkv

    def have(self, size: int) -> None:
        """Allocate a workspace of `size` bytes, unless the newest workspace is large enough.

        Older, smaller workspaces remain allocated.
        """
        known = self.pool.workspaces
        if not known or size > known[-1].nbytes:
            known.append(self.pool.empty((size,), np.uint8, "workspace"))

    def tell(
        self, case: Case, scores: int, arrays: Sequence[AbstractArray], backward: bool = False
    ) -> None:
        """Report a kernel that computes `scores` scores per query head.

        With a causal mask, it computes half of them, and with a window, only those in the window.
        """
        products = 5 if backward else 2
        heads = case.batch * case.heads * case.queries
        twice = scores if case.causal else 2 * scores
        if w := case.window:  # the first w - 1 queries have fewer keys
            twice = w * (2 * case.sequence - w + 1)
        flop = products * heads * twice * case.width
        self.pool.meter.attention(flop, sum(array.nbytes for array in arrays), case, backward)


def _square(q: AbstractArray, k: AbstractArray, causal: bool, window: int = 0) -> Case:
    """Return the Case with as many queries as keys that has as many scores as q k^T."""
    batch, heads, queries, rows, width = q.shape
    sequence = round(sqrt(rows * k.shape[2]))
    return Case(batch, heads, queries, sequence, width, q.dtype.name, causal, window)


def _value(array: _DeviceShape) -> float:
    """Let the host wait for the value of a scalar, which is 0 because it is not computed."""
    array.pool.meter.synchronize()
    return 0.0


def _on_pool(primitive: Primitive) -> Callable[..., Any]:
    """Return the CUDA implementation of a primitive.

    It runs on the abstract GPU that the first array argument belongs to.
    """
    rule = primitive.cuda_rule
    if rule is None:
        return counted(primitive)
    return lambda first, *rest, **named: rule(first.pool.gpu, first, *rest, **named)


add_backend(_DeviceShape, _on_pool)
contiguous.register(_DeviceShape, lambda block: block)
has_values.register(_DeviceShape, lambda array: False)
value_of.register(_DeviceShape, _value)


def pool_of(config: Config, meter: CostMeter | None = None) -> AbstractPool:
    """Return a pool of abstract arrays for the backend `train.backend`."""
    if config.train.backend == "cupy":
        return DeviceShapes(meter)
    return AbstractPool(meter, shared_memory=config.mesh.transport != "mpi")
