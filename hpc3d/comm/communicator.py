"""Collectives and messages between the ranks along one mesh axis.

Every call returns a `Pending`; its `wait()` returns the block, so overlap depends only on where
`wait()` is called.  This module transposes blocks and makes them contiguous, so that an
implementation only moves contiguous blocks along dim 0.  The resulting blocks may be in memory
shared by all members, so they must not be written to.

    all_gather       [n, ...]   -> [g*n, ...]    the blocks of the g members, in order
    reduce_scatter   [g*n, ...] -> [n, ...]      this member's shard of the sum
    all_reduce       [...]      -> [...]         the sum (or maximum)
    broadcast        [n, ...]   -> [n, ...]      the root's block; other members pass an empty one
    reduce           [n, ...]   -> [n, ...]      the sum on the root, an empty block elsewhere
    all_to_all       [g*n, ...] -> [g*n, ...]    chunk j goes to member j
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.narrow import WIDE, Narrow, of_type
from hpc3d.arrays.pool import Pool, contiguous

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array

# Up to this size in bytes, every member of an all-reduce in shared memory sums the full blocks;
# above it, each member sums one slice.
SMALL_SUM = 1 << 14

# Maximum number of pieces that a member passes on in a broadcast, and minimum size of a piece in
# bytes if there are several.
_PIECES, _PIECE = 4, 1 << 15

# Volume received by a member in each collective that has no root, in multiples of the size of the
# full array minus the member's own shard.
EXCHANGES = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}


def received_bytes(op: str, nbytes: Any, size: Any, member: Any = None, root: Any = 0) -> Any:
    """Return the number of bytes that a member must receive in a call.

    All arguments except `op` may be arrays.

    Parameters
    ----------
    op : operation
    nbytes : size in bytes of the input block (for a broadcast or a message, of the block sent)
    size : number of members
    member : index of the member (None: any member that receives data)
    root : root of a broadcast or reduction; a reduction is a chain that starts at root + 1
    """
    if op == "all_gather":
        return nbytes * (size - 1)
    if op in EXCHANGES:
        return EXCHANGES[op] * nbytes * (size - 1) // size
    if op == "broadcast":
        return nbytes * (member != root)
    return nbytes * (member != (root + 1) % size) if op == "reduce" else nbytes


def received_share(op: str, size: int) -> float:
    """Return the volume that each member receives in a call, relative to the full array."""
    return EXCHANGES[op] * (size - 1) / size if op in EXCHANGES else 1.0


def pieces_passed_on(size: int, nbytes: float) -> int:
    """Return the number of pieces of a broadcast that each member passes on to the others.

    The root sends each piece to one member. With several pieces, the members pass on the first
    ones while the root sends the next ones (hpc3d.comm.all_pairs). The number is 0 in groups of 2
    and of more than 8 members, which use MPI's broadcast.
    """
    if not 3 <= size <= 8:
        return 0
    return int(min(max(nbytes // ((size - 1) * _PIECE), 1), _PIECES))


class Pending:
    """Handle to a communication call in flight; `wait()` returns the resulting block."""

    def __init__(self, finish: Callable[..., Any]) -> None:
        self.finish = finish

    def wait(self) -> Any:
        """Complete the call, release the block that it sent, and return the result.

        Must be called only once.
        """
        finish = self.finish
        del self.finish
        return finish()

    def then(self, function: Callable[[Any], Any]) -> Pending:
        """Return a `Pending` whose `wait()` returns `function(block)`."""
        return Pending(lambda: function(self.wait()))


def ready(block: Any) -> Pending:
    """Return a `Pending` for a block that is already available."""
    return Pending(lambda: block)


def all_of(pending: Sequence[Pending]) -> Pending:
    """Combine several `Pending`s into one whose `wait()` returns the tuple of their blocks.

    A single `Pending` is returned unchanged.
    """
    if len(pending) == 1:
        return pending[0]
    return Pending(lambda: tuple(each.wait() for each in pending))


class Communicator:
    """Communicator of `size` members along one axis; this member has index `rank`.

    `members` lists the mesh ranks of the members. A subclass moves contiguous blocks along dim 0
    in `_all_gather`, `_reduce_scatter`, `_all_reduce`, `_broadcast`, `_reduce`, `_all_to_all`,
    `_send` and `_recv`.

    For the watchdog, `calls` and `done` count the calls started and completed, and `waiting` is
    the call (op, number, bytes, peer) in which this rank currently waits.
    """

    calls = done = 0
    waiting: tuple[str, int, int, int | None] | None = None

    _all_gather: Callable[[Any], Pending]
    _reduce_scatter: Callable[[Any], Pending]
    _all_reduce: Callable[..., Pending]  # block, op
    _broadcast: Callable[..., Pending]  # block, root
    _reduce: Callable[..., Pending]  # block, root
    _all_to_all: Callable[[Any], Pending]
    _send: Callable[[Any, int], Pending]
    _recv: Callable[[Sequence[int], DTypeLike, int], Pending]

    def __init__(
        self, rank: int, size: int, members: Sequence[int] | None = None, pool: Pool | None = None
    ) -> None:
        self.rank, self.size = rank, size
        self.members: Sequence[int] = tuple(members if members is not None else range(size))
        self.pool: Any = pool or Pool()  # the pool determines the array type

    @property
    def readers(self) -> tuple[int, int]:
        """Index of this member among the members that share memory for gathered blocks, and the
        number of these members."""
        return self.rank, self.size

    def buffer(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        """Return an array that this communicator can reduce without copying it first."""
        return self.pool.empty(shape, dtype, "communication")

    def wrapped(self, wrapper: Any, axis: str) -> Any:
        """Wrap this communicator, which belongs to `axis`, with a `hpc3d.comm.mesh.Wrapper`."""
        return wrapper.wrap(self, axis)

    def all_gather(self, block: Array, dim: int = 0) -> Pending:
        block = _rows_first(block, dim)
        pending = self.call("all_gather", block.nbytes, None, partial(self._all_gather, block))
        return pending.then(lambda whole: _rows_first(whole, dim)) if dim else pending

    def reduce_scatter(self, block: Array, dim: int = 0) -> Pending:
        if block.shape[dim] % self.size:
            raise ValueError(
                f"dimension {dim} has size {block.shape[dim]}, which must be divisible by the "
                f"number of ranks, {self.size}"
            )
        block = _rows_first(block, dim)
        move = partial(self._reduce_scatter, block)
        pending = self.call("reduce_scatter", block.nbytes, None, move)
        return pending.then(lambda part: _rows_first(part, dim)) if dim else pending

    def all_reduce(self, block: Array, op: str = "sum") -> Pending:
        move = partial(self._all_reduce, contiguous(block), op)
        return self.call("all_reduce", block.nbytes, None, move)

    def broadcast(self, block: Array, root: int) -> Pending:
        move = partial(self._broadcast, contiguous(block), root)
        return self.call("broadcast", block.nbytes, root, move)

    def reduce(self, block: Array, root: int) -> Pending:
        move = partial(self._reduce, contiguous(block), root)
        return self.call("reduce", block.nbytes, root, move)

    def all_to_all(self, block: Array) -> Pending:
        move = partial(self._all_to_all, contiguous(block))
        return self.call("all_to_all", block.nbytes, None, move)

    def grouped(self) -> AbstractContextManager:
        """Return a context manager that posts all messages together, to avoid deadlocks."""
        return nullcontext()

    def send(self, block: Array, peer: int) -> Pending:
        move = partial(self._send, contiguous(block), peer)
        return self.call("send", block.nbytes, peer, move)

    def recv(self, shape: Sequence[int], dtype: DTypeLike, peer: int) -> Pending:
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        return self.call("recv", nbytes, peer, partial(self._recv, shape, dtype, peer))

    def call(self, op: str, nbytes: int, peer: int | None, move: Callable[[], Pending]) -> Pending:
        """Start the communication call `move()`, record it in `calls`, and return its `Pending`.

        `peer` is the root or the other member, if any.
        """
        self.calls += 1
        waiting = self.waiting = op, self.calls, nbytes, peer
        finish, self.waiting = move().finish, None

        def counted():
            self.waiting = waiting
            block = finish()
            self.done, self.waiting = self.done + 1, None
            return block

        return Pending(counted)


class Self(Communicator):
    """Communicator for an axis of size 1; every call returns its input block."""

    def __init__(self, pool: Pool | None = None, member: int = 0) -> None:
        super().__init__(0, 1, (member,), pool)

    def _unchanged(self, block, op_or_root=None):
        return ready(block)

    _all_gather = _reduce_scatter = _all_to_all = _unchanged
    _all_reduce = _broadcast = _reduce = _unchanged


def _rows_first(block: Array, dim: int) -> Array:
    """Return a contiguous `block` with dims 0 and `dim` swapped; a second call undoes the swap."""
    return contiguous(block.swapaxes(0, dim) if dim else block)


REDUCTIONS = {"sum": np.add, "max": np.maximum}


def fold(operation: Callable[..., object], blocks: Any, out: Any) -> Any:
    """Reduce the blocks with `operation` into `out`, in the order of the members; return `out`.

    `out` may be one of the first two blocks. 16-bit floats are summed in float32, and the result
    is rounded once.
    """
    if isinstance(out, Narrow):
        total = np.empty(out.shape, WIDE)
        fold(operation, [of_type(each) for each in blocks], total)
        out[...] = total
        return out
    operation(blocks[0], blocks[1], out=out)
    for block in blocks[2:]:
        operation(out, block, out=out)
    return out
