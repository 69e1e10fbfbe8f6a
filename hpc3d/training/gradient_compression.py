"""Compressed gradient all-reduce: low rank (PowerSGD) or the largest elements (top-k).

For each matrix of a bucket, replica i (of d) has a gradient G_i[m, n]. It adds its residual R_i,
the compression error of earlier steps: M_i = G_i + R_i. All replicas receive the same
approximation of the sum of M_i, and each stores the compression error of its own M_i as the new
R_i. No gradient is lost: the approximations of all steps plus the residuals equal the sum of the
gradients (error feedback; Stich et al., arXiv:1809.07599).

    powersgd    P = orth(sum of M_i Q),  Q_i = M_i' P,  Q = sum of Q_i,  the sum is P Q'
                R_i = M_i - P Q_i'                            (Vogels et al., arXiv:1905.13727)
    top-k       each replica sends its k largest elements; R_i has the rest
                                                              (Lin et al., arXiv:1712.01887)

P[m, r] and Q[n, r] have few columns. Q is taken from the previous step; the initial Q is random,
determined by the seed and the parameter name. For a matrix with more rows than columns, M is the
transpose. P is then the shorter factor, and it is square if r is the full rank, so that the
approximation is exact.

Bytes received by a replica, for elements of b bytes and k = share m n:

    none        2 (1 - 1/d) m n b
    powersgd    2 (1 - 1/d) r (m + n) b
    top-k       (d - 1) k (b + 4)

Vectors, and matrices whose compression would not save bytes, are all-reduced uncompressed. A stack
of experts [m, experts, n] counts as `experts` matrices for powersgd, and as one for top-k.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.comm.communicator import all_of
from hpc3d.comm.mesh import COPIES, plane
from hpc3d.model.parameters import Parameter
from hpc3d.ops.compression import add_at, orthonormalise, replace_columns, take_largest
from hpc3d.ops.product import accumulate as add_to
from hpc3d.ops.product import product
from hpc3d.ops.random import initialise
from hpc3d.pipeline.gradient_buckets import GradientBucket
from hpc3d.tensor.layout import Layout

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.config.input_file import Config
    from hpc3d.model.parameters import Parameters

OWN_STATES = RESIDUAL, FACTOR = "residual", "factor"  # names of states that differ between ranks
_INDEX = "int32"


class CompressionSpec(NamedTuple):
    """Settings of gradient compression.

    `rank` is the rank of PowerSGD's approximation, and `share` the fraction of elements that top-k
    sends.
    """

    kind: str
    rank: int
    share: float
    seed: int

    def received(self, shape: Sequence[int], members: int, itemsize: int) -> float:
        """Return the bytes received per replica in a compressed reduction of one block."""
        if self.kind == "top-k":
            return (members - 1) * self.kept(prod(shape)) * (itemsize + 4)
        sent = self.columns(shape) * (shape[0] + shape[-1]) * prod(shape[1:-1])
        return _whole_sum(sent, members, itemsize)

    def saves(self, shape: Sequence[int], members: int, itemsize: int) -> bool:
        """Return True if each member receives fewer bytes than in an uncompressed all-reduce."""
        return self.received(shape, members, itemsize) < _whole_sum(prod(shape), members, itemsize)

    def columns(self, shape: Sequence[int]) -> int:
        """Return the number of columns of P and Q for a matrix of this shape."""
        return min(self.rank, shape[0], shape[-1])

    def kept(self, size: int) -> int:
        """Return the number of elements that top-k sends for a block of `size` elements."""
        return max(1, round(self.share * size))


def _whole_sum(size: int, members: int, itemsize: int) -> float:
    return 2 * (1 - 1 / members) * size * itemsize


class GradientCompression:
    """Selection of the gradients to compress, and their compression states between steps.

    The states are stored in `parameters.own_states`, because they differ between ranks.
    """

    def __init__(self, parameters: Parameters, spec: CompressionSpec) -> None:
        self.parameters, self.mesh, self.spec = parameters, parameters.mesh, spec
        items = [item for item in parameters if self._saves(item)]
        self.residuals = self._kept(RESIDUAL, {item: item.grad.shape for item in items})
        if spec.kind == "powersgd":
            self.factors = self._kept(FACTOR, {item: self._long(item.grad) for item in items})
            for item, factor in self.factors.items():
                self._start(item, factor)

    def takes(self, item: Parameter) -> bool:
        """Return True if the gradient of a parameter is compressed."""
        return item in self.residuals

    def _saves(self, item: Parameter) -> bool:
        """Return True if compression saves bytes and the gradient is summed only over replicas.

        With local updates, outer gradients are summed only over the workers.
        """
        local, replicas = self.parameters.local, item.partial == (plane(item.replicas),)
        if len(item.shape) < 2 or item.sign_rate or not (local or replicas):
            return False
        members = self.mesh.size(COPIES) if local else self.mesh.count(item.replicas)
        itemsize = self.parameters.wide.itemsize
        return bool(item.grad.size) and self.spec.saves(item.grad.shape, members, itemsize)

    def bucket(self, parameters: Parameters, items: Sequence[Parameter]) -> GradientBucket:
        kinds = {"powersgd": _LowRankSum, "top-k": _LargestSum}
        return kinds[self.spec.kind](parameters, items, self)

    def _long(self, grad: Array) -> tuple[int, ...]:
        return (
            max(grad.shape[0], grad.shape[-1]),
            *grad.shape[1:-1],
            self.spec.columns(grad.shape),
        )

    def _kept(self, name: str, shapes: dict[Parameter, tuple[int, ...]]) -> dict[Parameter, Array]:
        """Allocate a zero-filled block for each of `shapes`, as views of one flat array."""
        flat = self.mesh.zeros(
            (sum(map(prod, shapes.values())),), self.parameters.wide, "optimizer"
        )
        self.parameters.own_states[name] = flat
        return dict(zip(shapes, _views(flat, shapes.values()), strict=True))

    def _start(self, item: Parameter, factor: Array) -> None:
        """Initialize Q with standard normal numbers that are identical on all replicas."""
        rows, columns = prod(factor.shape[:-1]), factor.shape[-1]
        drawn = Parameter(f"{item.name}.{FACTOR}", (rows, columns), Layout("", ""), std=1.0)
        block = slice(0, rows), slice(0, columns)
        initialise(factor.reshape(rows, columns), drawn, self.spec.seed, block)


def compression_of(config: Config, parameters: Parameters) -> GradientCompression | None:
    """Create the `GradientCompression` of a run, or return `None` if compression is off."""
    spec = compression_spec(config)
    return spec and GradientCompression(parameters, spec)


def compression_spec(config: Config) -> CompressionSpec | None:
    """Return the compression settings of a configuration, or `None` if compression is off."""
    parallel = config.parallel
    if parallel.compression == "none":
        return None
    return CompressionSpec(
        parallel.compression, parallel.compression_rank, parallel.compression_share, config.seed
    )


def _views(flat: Array, shapes: Iterable[Sequence[int]]) -> Iterator[Array]:
    start = 0
    for shape in shapes:
        stop = start + prod(shape)
        yield flat[start:stop].reshape(*shape)
        start = stop


def _turned(x: Array) -> Array:
    """Return the transpose of a matrix, or of each matrix in a stack of experts."""
    return x.swapaxes(0, x.ndim - 1)


class _CompressedSum(GradientBucket):
    """Gradient bucket whose matrices are compressed; each matrix has a residual."""

    def __init__(
        self, parameters: Parameters, items: Sequence[Parameter], kept: GradientCompression
    ) -> None:
        super().__init__(parameters, items, (COPIES,) if parameters.local else ())
        self.spec, self.comm = kept.spec, self.mesh.comm(self.axes[0])
        self.residuals = [kept.residuals[item] for item in items]

    def _add_gradients(self) -> None:
        """Add each gradient G to its residual R, so that the residual array contains M = G + R."""
        for item, residual in zip(self.items, self.residuals, strict=True):
            add_to(residual, item.grad)


class _LowRankSum(_CompressedSum):
    """PowerSGD bucket: `post` starts the all-reduce of all factors P; `wait` all-reduces Q."""

    def __init__(
        self, parameters: Parameters, items: Sequence[Parameter], kept: GradientCompression
    ) -> None:
        super().__init__(parameters, items, kept)
        self.factors = [kept.factors[item] for item in self.items]
        self.high = [each.shape[0] > each.shape[-1] for each in self.residuals]
        # matrices M, each transposed if it has more rows than columns
        self.matrices = [_turned(m) if m.shape[0] > m.shape[-1] else m for m in self.residuals]
        both = zip(self.matrices, self.factors, strict=True)
        self.short = [(m.shape[0], *q.shape[1:]) for m, q in both]
        self.long = [q.shape for q in self.factors]

    @property
    def nbytes(self) -> int:
        return 2 * sum(map(prod, self.short)) * self.parameters.wide.itemsize

    def post(self) -> None:
        self._add_gradients()
        sent = self._buffer(self.short)
        for m, q, p in zip(self.matrices, self.factors, _views(sent, self.short), strict=True):
            self._multiply(m, q, p)
        self.pending = self.comm.all_reduce(sent)

    def wait(self) -> None:
        bases = self._bases([*_views(self.pending.wait(), self.short)])
        self.pending = None
        total = self.comm.all_reduce(self._coefficients(bases)).wait()
        for number, summed in enumerate(_views(total, self.long)):
            self._expand(number, bases[number], summed)
            replace_columns(self.factors[number], summed)

    def _buffer(self, shapes: Sequence[Sequence[int]]) -> Array:
        return self.comm.buffer((sum(map(prod, shapes)),), self.parameters.wide)

    def _bases(self, blocks: Sequence[Array]) -> list[Array]:
        """Return an orthonormal basis of the column space of each P.

        Factors P of the same shape are orthonormalized in one batch.
        """
        alike: dict[tuple[int, int], list[int]] = {}
        for number, p in enumerate(blocks):
            alike.setdefault((p.shape[0], p.shape[-1]), []).append(number)
        found: dict[int, Array] = {}
        for (rows, columns), numbers in alike.items():
            stacks = [blocks[number].reshape(rows, -1, columns) for number in numbers]
            bases = np.concatenate(stacks, axis=1)
            with self.mesh.trace.span("orthonormal bases"):
                orthonormalise(bases)
            edges = pairwise(accumulate((stack.shape[1] for stack in stacks), initial=0))
            for number, (first, stop) in zip(numbers, edges, strict=True):
                stacked = blocks[number].ndim == 3
                found[number] = bases[:, first:stop] if stacked else bases[:, first]
        return [found[number] for number in range(len(blocks))]

    def _coefficients(self, bases: Sequence[Array]) -> Array:
        """Compute this rank's factor Q_i of each matrix, and subtract P Q_i' from its residual."""
        sent = self._buffer(self.long)
        views = _views(sent, self.long)
        for number, (m, basis, q) in enumerate(zip(self.matrices, bases, views, strict=True)):
            self._multiply(_turned(m), basis, q)
            self._expand(number, basis, q)
            self.residuals[number] -= self.items[number].grad
        return sent

    def _expand(self, number: int, basis: Array, q: Array) -> None:
        """Set the gradient of a matrix to its low-rank approximation P Q'."""
        left, right = (q, basis) if self.high[number] else (basis, q)
        self._multiply(left, _turned(right), self.items[number].grad)

    def _multiply(self, a: Array, b: Array, out: Array) -> None:
        flops = 2 * a.size * b.shape[-1]
        with self.mesh.trace.span("compression", "gemm", flops):
            product(a, b, out)


class _LargestSum(_CompressedSum):
    """Top-k bucket: `post` starts the all-gather of the selected values and their indices."""

    def __init__(
        self, parameters: Parameters, items: Sequence[Parameter], kept: GradientCompression
    ) -> None:
        super().__init__(parameters, items, kept)
        self.counts = [(self.spec.kept(each.size),) for each in self.residuals]

    @property
    def nbytes(self) -> int:
        element = self.parameters.wide.itemsize + np.dtype(_INDEX).itemsize
        return self.comm.size * sum(map(prod, self.counts)) * element

    def post(self) -> None:
        self._add_gradients()
        count = sum(map(prod, self.counts))
        values = self.mesh.empty((1, count), self.parameters.wide, "communication")
        indices = self.mesh.empty((1, count), _INDEX, "communication")
        parts = _views(values[0], self.counts), _views(indices[0], self.counts)
        with self.mesh.trace.span("largest elements"):
            for residual, *part in zip(self.residuals, *parts, strict=True):
                take_largest(residual.reshape(-1), *part)
        self.pending = all_of([self.comm.all_gather(values), self.comm.all_gather(indices)])

    def wait(self) -> None:
        values, indices = self.pending.wait()
        self.pending = None
        with self.mesh.trace.span("largest elements"):
            for item in self.items:
                item.grad.fill(0)
            for member in range(self.comm.size):
                parts = _views(values[member], self.counts), _views(indices[member], self.counts)
                for item, *part in zip(self.items, *parts, strict=True):
                    add_at(item.grad.reshape(-1), *part)
