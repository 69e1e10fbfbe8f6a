"""Muon: matrices are updated with their orthogonalized momentum.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon:

    m = b m + (1 - b) g;  O = orthogonalize(b m + (1 - b) g);
    w = (1 - lr decay) w - 0.2 sqrt(max(A, B)) lr O

for each A x B matrix w in the Transformer blocks, with gradient g, momentum m, momentum
coefficient b, learning rate lr and weight decay `decay`. The factor 0.2 sqrt(max(A, B)) scales O
to the magnitude of AdamW's updates, so that learning rates and weight decays for AdamW remain
valid (Liu et al., arXiv:2502.16982, section 2.2). AdamW updates all other parameters. Query, key
and value weights count as three matrices, the gate and up weights of SwiGLU as two, and each
expert has its own matrices.

Each sharded matrix is gathered on a single rank; sharded_muon.py avoids this gathering. Matrices
sharded over the same g ranks are assigned round-robin, one per rank: an all-to-all along each axis
gathers the blocks, and another one returns their updates. In each all-to-all along an axis of s
ranks, a rank receives (1 - 1/s) of an unsharded matrix. Along an axis on which a single rank
*owns* each block, the other ranks send zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.ops.update import descend, nesterov, orthogonalize, orthogonalize_flops
from hpc3d.training.optimizers.optimizer import AdamW, StateSpec

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.parameters import Parameters, WholeMatrix
    from hpc3d.tensor.layout import Layout

_SIZE = 0.2  # typical root mean square of AdamW's updates


def is_hidden(name: str, shape: Sequence[int]) -> bool:
    """Return True for matrices of Transformer blocks and for stacks of such matrices."""
    return name.startswith("layers.") and len(shape) > 1 and shape[0] > 1


def _is_other(name: str, shape: Sequence[int]) -> bool:
    return not is_hidden(name, shape)


class Cut(NamedTuple):
    """Mesh axis along which a stack of matrices is distributed.

    Usually, the axis shards dimension `dim` of the stack (1: rows, 2: columns). If `owner` is not
    `None`, only the rank with this coordinate along the axis stores the blocks, and `dim` is 0.
    """

    axis: str
    dim: int
    owner: int | None = None


def owners(mesh: Mesh, layout: Layout) -> list[Cut]:
    """Return a `Cut` for each mesh axis along which only one rank stores the blocks."""
    return [Cut(axis, 0, layout.owner(axis, mesh)) for axis in layout.owned]


def cuts_of(mesh: Mesh, layout: Layout) -> list[Cut]:
    """Return a `Cut` for each axis that shards a matrix, or along which a single rank owns it."""
    rows = [Cut(axis, 1) for axis in reversed(layout[0])]
    columns = [Cut(axis, 2) for axis in reversed(layout[-1])]
    return [*owners(mesh, layout), *rows, *columns]


class Exchange:
    """Gathering and scattering of sharded matrices along the axes of `cuts`."""

    def __init__(self, mesh: Mesh, cuts: Iterable[Cut]) -> None:
        self.mesh = mesh
        self.cuts = [cut for cut in cuts if mesh.size(cut.axis) > 1]
        axes = [cut.axis for cut in self.cuts]
        self.members, self.member = mesh.count(axes), mesh.index(axes)

    def gathered(self, blocks: Array) -> Array:
        """Gather blocks [g n, a, b] from g ranks into this rank's n matrices [n, A, B]."""
        for cut in self.cuts:
            size = self.mesh.size(cut.axis)
            parts = self.mesh.comm(cut.axis).all_to_all(blocks).wait()
            parts = parts.reshape(size, len(blocks) // size, *blocks.shape[1:])
            blocks = parts[cut.owner] if cut.owner is not None else self._joined(parts, cut.dim)
        return blocks

    def _joined(self, parts: Array, dim: int) -> Array:
        """Reshape [s, n, a, b] to [n, s a, b] or [n, a, s b]."""
        order = [1, 2, 3]
        order.insert(dim, 0)
        moved = self._moved(parts, order)
        shape = [*parts.shape[1:]]
        shape[dim] *= len(parts)
        return moved.reshape(*shape)

    def scattered(self, whole: Array) -> Array:
        """Scatter [n, A, B] to this rank's blocks [g n, a, b]; the inverse of `gathered`."""
        for cut in reversed(self.cuts):
            size = self.mesh.size(cut.axis)
            if cut.owner is None:
                parts = self._divided(whole, cut.dim, size)
            else:
                parts = self.mesh.zeros((size, *whole.shape), whole.dtype, "workspace")
                parts[cut.owner] = whole
            flat = parts.reshape(size * parts.shape[1], *parts.shape[2:])
            whole = self.mesh.comm(cut.axis).all_to_all(flat).wait()
        return whole

    def _divided(self, whole: Array, dim: int, size: int) -> Array:
        """Reshape [n, s a, b] or [n, a, s b] to [s, n, a, b]."""
        shape = [*whole.shape]
        shape[dim : dim + 1] = [size, shape[dim] // size]
        order = [0, 1, 2, 3]
        order.remove(dim)
        return self._moved(whole.reshape(*shape), [dim, *order])

    def _moved(self, array: Array, order: Sequence[int]) -> Array:
        turned = array.transpose(*order)
        out = self.mesh.empty(turned.shape, array.dtype, "workspace")
        out[...] = turned
        return out


class Muon(AdamW):
    STATES = (
        StateSpec("momentum", of=is_hidden),
        StateSpec("first", of=_is_other),
        StateSpec("second", of=_is_other),
    )
    WHOLE_MATRICES = is_hidden
    BETA1 = 0.9  # AdamW's beta1 for parameters not updated by Muon

    def __init__(
        self,
        parameters: Parameters,
        weight_decay: float,
        others: tuple[StateSpec, ...] = (),
        **constants: float,
    ) -> None:
        self.momentum = constants["beta1"]
        super().__init__(parameters, weight_decay, others, **constants | {"beta1": self.BETA1})

    @classmethod
    def at_once(cls, mesh: Mesh) -> int:
        """Return the number of ranks among which a layer's matrices can be distributed."""
        return mesh.count(axis for axis in mesh.sizes if axis != "p")

    def update(self, learning_rate: float, scale: float) -> None:
        """Update the parameters, using `scale` times the gradients."""
        super().update(learning_rate, scale)
        decay = learning_rate * self.weight_decay
        for exchange, alike in self._groups():
            at_once = ceil(exchange.members / _experts(alike[0]))
            starts = range(0, len(alike), at_once)
            for batch in self.batches([alike[start : start + at_once] for start in starts], decay):
                matrices = [
                    _Matrix(part, arrays, states["momentum"], keep)
                    for part, arrays, states, keep in batch
                ]
                self._update(exchange, matrices, learning_rate, scale)

    def _groups(self) -> Iterator[tuple[Exchange, list[WholeMatrix]]]:
        groups: dict[Any, list[WholeMatrix]] = {}
        for part in self.parameters.matrices:
            key = part.layout, part.item.shape, part.item.interleaved
            groups.setdefault(key, []).append(part)
        for (layout, *_), alike in groups.items():
            yield self._exchange(layout), alike

    def _exchange(self, layout: Layout) -> Exchange:
        mesh = self.parameters.mesh
        return Exchange(mesh, cuts_of(mesh, layout))

    def _update(
        self, exchange: Exchange, alike: Sequence[_Matrix], learning_rate: float, scale: float
    ) -> None:
        """Update a batch of matrices.

        The batch has at most one matrix per rank of `exchange`, or consists of one stack of
        experts.
        """
        trace, item = self.parameters.mesh.trace, alike[0].part.item
        with trace.span("momentum"):
            blocks = self._directions(exchange, alike, scale)
        whole = exchange.gathered(blocks)
        mine = len(alike) * _experts(alike[0].part) - exchange.member * len(whole)
        whole = self._orthogonalized(whole, max(0, min(mine, len(whole))), alike[0].part)
        blocks = exchange.scattered(whole)
        columns = item.shape[-1] // item.interleaved[0]
        rate = learning_rate * _SIZE * sqrt(max(item.shape[0], columns))
        with trace.span("descend"):
            for number, matrix in enumerate(alike):
                matrix.descend(blocks, number, rate)

    def _directions(self, exchange: Exchange, alike: Sequence[_Matrix], scale: float) -> Array:
        """Return this rank's blocks of the update directions, padded with zeros to [g n, a, b]."""
        mesh, (part, *_) = self.parameters.mesh, alike[0]
        experts, (first, *_, last) = _experts(part), part.item.shape
        per_rank = ceil(len(alike) * experts / exchange.members)
        rows = ceil(first / mesh.count(part.layout[0]))  # with padding
        columns = last // mesh.count(part.layout[-1])
        shape = exchange.members * per_rank, rows, columns
        blocks = mesh.zeros(shape, self.parameters.wide, "workspace")
        for number, matrix in enumerate(alike):
            if matrix.part.shape[0]:
                out = blocks[number * experts : (number + 1) * experts]
                grad, momentum = _by_expert(matrix.arrays[2]), _by_expert(matrix.momentum)
                nesterov(grad, momentum, out, scale, self.momentum)
        return blocks

    def _orthogonalized(self, whole: Array, count: int, part: WholeMatrix) -> Array:
        """Orthogonalize the first `count` matrices of the stack [n, A, B].

        If the columns of several matrices are interleaved, each matrix is orthogonalized
        separately.
        """
        mesh, (among, width) = self.parameters.mesh, part.item.interleaved
        out = mesh.empty(whole.shape, whole.dtype, "workspace")
        rows, columns = whole.shape[1], whole.shape[2] // among
        for index in range(count):
            for number in range(among):
                one = mesh.empty((rows, columns), whole.dtype, "workspace")
                apart = one.reshape(rows, columns // width, width)
                interleaved = rows, columns // width, among, width
                apart[...] = whole[index].reshape(*interleaved)[:, :, number]
                with mesh.trace.span("gemm", "gemm", orthogonalize_flops(one.shape)):
                    orthogonalize(one, mesh.empty)
                out[index].reshape(*interleaved)[:, :, number] = apart
        return out


class _Matrix(NamedTuple):
    """Matrix to update: its arrays and momentum, as yielded by `Optimizer.matrices`."""

    part: WholeMatrix
    arrays: tuple[Array, Array | None, Array]
    momentum: Array
    keep: float

    def descend(self, blocks: Array, number: int, rate: float) -> None:
        """Update w = keep * w - rate * O, where O is matrix `number` in `blocks`."""
        (value, master, _), experts = self.arrays, _experts(self.part)
        if not value.size:
            return
        step = blocks[number * experts : (number + 1) * experts]
        if experts > 1:
            step = step.swapaxes(0, 1).copy()
        flat = None if master is None else master.reshape(-1)
        descend(value.reshape(-1), flat, step.reshape(-1), (rate, self.keep))


def _experts(part: WholeMatrix) -> int:
    return part.shape[1] if len(part.shape) > 2 else 1


def _by_expert(block: Array) -> Array:
    """Reshape [a, b] or [a, experts, b] to [experts, a, b]."""
    return block.swapaxes(0, 1) if block.ndim > 2 else block.reshape(1, *block.shape)
