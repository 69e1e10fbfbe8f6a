"""Abstract arrays without data, to predict the cost of a model of any size without executing it.

An `AbstractArray` has the shape, dtype and lifetime of an array, but no data.  NumPy functions
accept and return abstract arrays (NEP 13 and NEP 18).  A view keeps the memory of its base alive,
and an `AbstractPool` counts bytes like a `Pool`.  Communicators for abstract arrays transfer no
data (comm/), so a single rank can run without the others. Operations that depend on array values
(such as a loss or a lookup), or that process memory in blocks, are primitives with a separate
implementation for abstract arrays (arrays/primitive.py).

The `meter` of a pool is notified of every operation on its arrays and may advance a clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from hpc3d.arrays.pool import OFFLOADED, Pool, contiguous, has_values
from hpc3d.arrays.primitive import add_backend

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.primitive import Primitive


class CostMeter:
    """Base class of cost meters, which are notified of every array operation.

    This class discards the notifications; the meter of a simulated machine is in
    simulated_clock.py.  `widest` is the largest head size that the machine's fused attention
    supports.  `float8` is True if the machine model specifies the rate of float8 GEMMs.
    """

    widest = 128
    float8 = False

    def product(self, m: int, n: int, k: int, dtype: DTypeLike, batch: int = 1) -> None:
        """Record `batch` matrix products [m, k] x [k, n]."""

    def kernel(self, name: str, nbytes: int) -> None:
        """Record a kernel other than a matrix product; `nbytes` is its total memory traffic."""

    def attention(self, flop: float, nbytes: int, case: Any, backward: bool) -> None:
        """Record a fused attention kernel with `flop` FLOPs and `nbytes` of traffic.

        `case` has the attributes `width` (head dimension), `sequence`, `dtype` and `causal`.
        """

    def copied(self, nbytes: int) -> int:
        """Record an offload copy of `nbytes` bytes; return its completion time in ns."""
        return 0

    def reach(self, end: int) -> None:
        """Advance the clock to the time `end`, in ns."""

    def synchronize(self) -> None:
        """Record that the host waits for a result of the device."""

    def begin_graph(self) -> None:
        """Record the launch of a CUDA graph, which contains the work until `end_graph`."""

    def end_graph(self) -> None:
        """Record that the host launches kernels individually again."""

    def counting(self, times: int) -> AbstractContextManager[None]:
        """Return a context manager that counts each enclosed operation `times` times."""
        return nullcontext()


class Flags(NamedTuple):
    """Replacement for `ndarray.flags`. Arrays in memory shared by several ranks are read-only."""

    writeable: bool


class AbstractLease:
    """Handle to simulated memory, which is counted but not allocated.

    Deleting the handle subtracts the memory's size from the count. The memory is of the given
    kind and, if it is not `None`, of a part of the model.
    """

    __slots__ = ("give_back", "kind", "part", "shared", "slot_of")

    def __init__(self, kind: str, part: str | None, give_back: Callable[[], None]) -> None:
        self.kind, self.part, self.give_back, self.shared = kind, part, give_back, False

    def __del__(self):
        self.give_back()


class AbstractArray(NDArrayOperatorsMixin):
    """Array without data: a shape, a dtype, and a handle `lease` to memory counted by `pool`.

    Its elements have `nbytes` bytes.
    """

    __slots__ = ("dtype", "lease", "nbytes", "pool", "shape")

    def __init__(
        self,
        shape: Iterable[int],
        dtype: DTypeLike,
        pool: Pool,
        lease: AbstractLease | None = None,
    ) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.nbytes = prod(self.shape) * self.dtype.itemsize
        self.pool, self.lease = pool, lease

    def like(self, shape: Iterable[int], dtype: DTypeLike | None = None) -> AbstractArray:
        """Return a new array of shape `shape`, which does not share this array's memory."""
        return type(self)(shape, dtype or self.dtype, self.pool)

    def made_by(self, name: str, *arrays: AbstractArray) -> Self:
        """Notify the meter that an operation computed this array from `arrays`; return `self`."""
        self.meter.kernel(name, _bytes_of([self, *arrays]))
        return self

    @property
    def size(self) -> int:
        return prod(self.shape)

    meter = property(lambda self: self.pool.meter)
    flags = property(lambda self: Flags(not (self.lease and self.lease.shared)))
    itemsize = property(lambda self: self.dtype.itemsize)
    ndim = property(lambda self: len(self.shape))
    T = property(lambda self: self.view(self.shape[::-1]))

    def view(self, shape: Iterable[int]) -> AbstractArray:
        """Return a view of this array with the shape `shape`."""
        return type(self)(shape, self.dtype, self.pool, self.lease)

    def __repr__(self) -> str:
        return f"Shape({self.shape}, {self.dtype})"

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[AbstractArray]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, key: Any) -> AbstractArray:
        if isinstance(key, slice):  # faster than a NumPy array
            rows = len(range(self.shape[0])[key])
            return self.view((rows, *self.shape[1:]))
        return self.view(self._one_byte()[key].shape)

    def __setitem__(self, key: Any, value: object) -> None:
        self[key].made_by("copy", *of_shapes([value]))

    def _one_byte(self) -> np.ndarray:
        """Return a one-byte NumPy array of this shape, to compute the shapes of views."""
        return np.ndarray(self.shape, np.uint8, b"\0", strides=(0,) * len(self.shape))

    def reshape(self, *shape: Any) -> AbstractArray:
        return self.view(self._one_byte().reshape(*shape).shape)

    def ravel(self) -> AbstractArray:
        return self.view((self.size,))

    def swapaxes(self, a: int, b: int) -> AbstractArray:
        return self.view(self._one_byte().swapaxes(a, b).shape)

    def transpose(self, *order: int) -> AbstractArray:
        return self.view(self._one_byte().transpose(*order).shape)

    def copy(self) -> AbstractArray:
        return self.like(self.shape).made_by("copy", self)

    def astype(self, dtype: DTypeLike) -> AbstractArray:
        return self.like(self.shape, dtype).made_by("copy", self)

    def fill(self, value: object) -> None:
        self.made_by("fill")

    def sum(self, axis: int | None = None, dtype: DTypeLike | None = None) -> AbstractArray:
        return self.like(_reduced(self.shape, axis), dtype).made_by("reduction", self)

    def max(self, axis: int | None = None, initial: object = None) -> AbstractArray:
        return self.like(_reduced(self.shape, axis)).made_by("reduction", self)

    mean = sum

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, axis=0, **options):
        if out is not None and ufunc is not np.matmul:
            return out[0].made_by(ufunc.__name__, *of_shapes(inputs))
        shapes = [getattr(x, "shape", ()) for x in inputs]
        dtype = np.result_type(*(getattr(x, "dtype", x) for x in inputs))
        if ufunc is np.matmul:
            return self.multiplied(*shapes, out, dtype)
        dtype = bool if _compares(ufunc) else dtype
        shape = _reduced(shapes[0], axis) if method == "reduce" else np.broadcast_shapes(*shapes)
        return self.like(shape, dtype).made_by(ufunc.__name__, *of_shapes(inputs))

    def multiplied(
        self,
        a: tuple[int, ...],
        b: tuple[int, ...],
        out: tuple[AbstractArray, ...] | None,
        dtype: np.dtype,
    ) -> AbstractArray:
        """Record a matrix product of operands with shapes a and b; return the result."""
        shape = _product(a, b)
        rows = a[-2] if len(a) > 1 else 1
        columns = b[-1] if len(b) > 1 else 1
        batch = prod(shape) // (rows * columns or 1)
        self.meter.product(rows, columns, a[-1], self.dtype, batch)
        return self.like(shape, dtype) if out is None else out[0]

    def __array_function__(self, function, types, arguments, options):
        return _FUNCTIONS[function](*arguments, **options)


@cache
def _compares(ufunc: np.ufunc) -> bool:
    """Return True if the ufunc returns booleans."""
    return all(kinds.endswith("?") for kinds in ufunc.types if "O" not in kinds)


def _reduced(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    return () if axis is None else (*shape[:axis], *shape[axis:][1:])


def _product(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of `np.matmul(x, y)` for arrays with the shapes a and b."""
    if a[-1] != b[-2 if len(b) > 1 else 0]:
        raise ValueError(f"matrices of shapes {a} and {b} cannot be multiplied")
    rows, columns = a[-2:-1], b[-1:] if len(b) > 1 else ()
    return (*np.broadcast_shapes(a[:-2], b[:-2]), *rows, *columns)


def _concatenated(blocks: Sequence[AbstractArray], axis: int = 0) -> AbstractArray:
    sizes = [sum(block.shape[axis] for block in blocks)]
    shape = (*blocks[0].shape[:axis], *sizes, *blocks[0].shape[axis + 1 :])
    return blocks[0].like(shape).made_by("copy", *blocks)


def _stacked(blocks: Sequence[AbstractArray], axis: int = 0) -> AbstractArray:
    shape = blocks[0].shape
    return blocks[0].like((*shape[:axis], len(blocks), *shape[axis:])).made_by("copy", *blocks)


def _dot(a: AbstractArray, b: AbstractArray) -> float:
    """Record the cost of a dot product; return 0 as a placeholder result."""
    a.meter.kernel("reduction", a.nbytes + b.nbytes)
    return 0.0


def of_shapes(arrays: Iterable[object]) -> list[AbstractArray]:
    return [array for array in arrays if isinstance(array, AbstractArray)]


def _bytes_of(arrays: Iterable[AbstractArray]) -> int:
    """Return the total size of arrays in bytes; a loop needs fewer calls than `sum`."""
    total = 0
    for array in arrays:
        total += array.nbytes
    return total


_FUNCTIONS = {
    np.concatenate: _concatenated,
    np.stack: _stacked,
    np.empty_like: lambda like, **_: like.like(like.shape),
    np.zeros_like: lambda like, **_: like.like(like.shape).made_by("fill"),
    np.dot: _dot,
    np.shape: lambda a: a.shape,
}


def counted(primitive: Primitive) -> Callable[..., Any]:
    """Wrap a primitive's implementation for abstract arrays, so that each call notifies the meter.

    The meter receives the total bytes of all operands and results. The implementation of a
    composite primitive is returned unwrapped, because the operations that it calls notify the
    meter.
    """
    rule = primitive.abstract_rule
    if rule is primitive.numpy:
        return rule

    def with_meter(first, *rest, **named):
        if rule is None:
            raise NotImplementedError(
                f"{primitive.__name__} has no implementation for abstract arrays; define "
                "one with the decorator @<primitive>.abstract"
            )
        result = rule(first, *rest, **named)
        touched = of_shapes([first, *rest])
        made = of_shapes(result if isinstance(result, tuple) else [result])
        known = {*map(id, touched)}
        touched += [array for array in made if id(array) not in known]
        first.meter.kernel(primitive.__name__, _bytes_of(touched))
        return result

    return with_meter


add_backend(AbstractArray, counted)
contiguous.register(AbstractArray, lambda block: block)
has_values.register(AbstractArray, lambda array: False)


class AbstractPool(Pool):
    """Pool of abstract arrays, which counts bytes like `Pool`; `meter` records operations.

    `workspaces` lists workspaces that are allocated when an operation needs them for the first
    time, and then remain allocated. If `part` is set, `saved` maps each part of the model to the
    live bytes of the arrays that were allocated while `part` had this value, except workspaces
    and offloaded arrays. If `shared_memory` is true, the ranks of a node share received blocks.
    """

    kind = AbstractArray
    part: str | None = None

    def __init__(self, meter: CostMeter | None = None, shared_memory: bool = True) -> None:
        super().__init__()
        self.meter, self.shared_memory = meter or CostMeter(), shared_memory
        self.store = AbstractStore(self)
        self.saved: Counter[str] = Counter()
        self.workspaces: list[AbstractArray] = []

    @property
    def shared_workspace(self) -> int:
        """Size of `workspaces` in bytes."""
        return sum(workspace.nbytes for workspace in self.workspaces)

    def empty(
        self, shape: Sequence[int], dtype: DTypeLike, kind: str = "activation"
    ) -> AbstractArray:
        shape, dtype = tuple(shape), np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        count: Callable[[str, int], None] = self.count
        if self.part is not None:
            count = partial(self._count_part, self.part)
        count(kind, nbytes)
        lease = AbstractLease(kind, self.part, partial(count, kind, -nbytes))
        return self.kind(shape, dtype, self, lease)

    def _count_part(self, part: str, kind: str, size: int) -> None:
        self.count(kind, size)
        if kind not in (OFFLOADED, "workspace"):
            self.saved[part] += size


class AbstractStore:
    """`HostStore` (hpc3d.arrays.host_store) for abstract arrays.

    Copies on a device are asynchronous: the memory of an array being saved is released at the next
    call to `save` or `settle`, and the memory of an array being loaded is allocated when the load
    starts.
    """

    exposed = None

    def __init__(self, pool: AbstractPool) -> None:
        self.pool, self.meter, self.copied = pool, pool.meter, 0
        self.leaving: tuple[AbstractArray | None, int] = None, 0

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> AbstractArray:
        return self.pool.empty(shape, dtype, OFFLOADED)

    def save(self, array: Any, kept: Any, trace: Any) -> None:
        self.settle()
        end = self._copied("offload", array, trace)
        self.leaving = (array if self.pool.on_device else None), end

    def load(self, kept: Any, kind: str, trace: Any) -> Callable[[], AbstractArray]:
        def copied():
            array = self.pool.empty(kept.shape, kept.dtype, kind)
            return array, self._copied("fetch", kept, trace)

        if not self.pool.on_device:
            return lambda: copied()[0]
        array, end = copied()

        def finish():
            with trace.waiting("fetch"):
                self.meter.reach(end)
            return array

        return finish

    def settle(self) -> None:
        (_, end), self.leaving = self.leaving, (None, 0)
        self.meter.reach(end)

    def _copied(self, name: str, array: Any, trace: Any) -> int:
        self.copied += array.nbytes
        with trace.copying(name, array.nbytes):
            return self.meter.copied(array.nbytes)
