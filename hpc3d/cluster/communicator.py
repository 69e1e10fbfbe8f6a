"""What ranks along one mesh axis say to each other.

Every call returns a `Pending`; its `wait()` gives the block, so overlap is only a question of
where `wait()` stands.  This module settles dims and contiguity once: an implementation moves
contiguous blocks along dim 0 and nothing else.  Blocks that come out of a call may lie in memory
that all members share: read them, do not write into them.

    all_gather       [n, ...]   -> [g*n, ...]    the blocks of the g members, in order
    reduce_scatter   [g*n, ...] -> [n, ...]      this member's part of the sum
    all_reduce       [...]      -> [...]         the sum (or maximum)
    broadcast        [n, ...]   -> [n, ...]      the root's block; the others bring zero rows of it
    reduce           [n, ...]   -> [n, ...]      the sum at the root, zero rows elsewhere
    all_to_all       [g*n, ...] -> [g*n, ...]    part j goes to member j
"""

import numpy as np

from hpc3d.cluster.arrays import Pool, kernel


class Pending:
    """A block that is on its way."""

    def __init__(self, finish):
        self.finish = finish

    def wait(self):
        """The block; call it once."""
        return self.finish()

    def then(self, function):
        """The pending result of `function` applied to the block."""
        return Pending(lambda: function(self.wait()))


def ready(block):
    """A `Pending` that has arrived."""
    return Pending(lambda: block)


class Communicator:
    """`size` members along one axis, of which this is number `rank`.

    `members` are their ranks in the mesh.  A subclass moves contiguous blocks along dim 0 in
    `gather_rows`, `scatter_rows`, `sum_all`, `spread`, `collect`, `exchange`, `post` and `take`.
    """

    def __init__(self, rank, size, members=None, pool=None):
        self.rank, self.size = rank, size
        self.members = tuple(members if members is not None else range(size))
        self.pool = pool or Pool()

    def buffer(self, shape, dtype):
        """An array that this communicator reduces without copying it first."""
        return self.pool.empty(shape, dtype, "communication")

    def all_gather(self, block, dim=0):
        pending = self.gather_rows(contiguous(rows_first(block, dim)))
        return (
            pending if dim == 0 else pending.then(lambda whole: contiguous(rows_first(whole, dim)))
        )

    def reduce_scatter(self, block, dim=0):
        if block.shape[dim] % self.size:
            raise ValueError(f"{block.shape[dim]} rows do not divide over {self.size} ranks")
        pending = self.scatter_rows(contiguous(rows_first(block, dim)))
        return (
            pending if dim == 0 else pending.then(lambda part: contiguous(rows_first(part, dim)))
        )

    def all_reduce(self, block, op="sum"):
        return self.sum_all(contiguous(block), op)

    def broadcast(self, block, root):
        return self.spread(contiguous(block), root)

    def reduce(self, block, root):
        return self.collect(contiguous(block), root)

    def all_to_all(self, block):
        return self.exchange(contiguous(block))

    def send(self, block, peer):
        return self.post(contiguous(block), peer)

    def recv(self, shape, dtype, peer):
        return self.take(shape, dtype, peer)


class Self(Communicator):
    """The communicator of an axis of size 1: every block is already where it should be."""

    def __init__(self, pool=None, member=0):
        super().__init__(0, 1, (member,), pool)

    def gather_rows(self, block):
        return ready(block)

    def scatter_rows(self, block):
        return ready(block)

    def sum_all(self, block, op):
        return ready(block)

    def spread(self, block, root):
        return ready(block)

    def collect(self, block, root):
        return ready(block)

    def exchange(self, block):
        return ready(block)


@kernel
def contiguous(block):
    """The block in one piece of memory, row by row."""
    return np.ascontiguousarray(block)


def rows_first(block, dim):
    """`block` with `dim` exchanged with dim 0 (its own inverse)."""
    return block if dim == 0 else block.swapaxes(0, dim)


REDUCTIONS = {"sum": np.add, "max": np.maximum}
