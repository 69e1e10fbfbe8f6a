"""Communicators whose ranks are threads, so that tests run the full program without MPI."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpc3d.arrays.narrow import of_type
from hpc3d.arrays.pool import Pool
from hpc3d.comm.communicator import REDUCTIONS, Communicator, Pending, Self, fold, ready
from hpc3d.comm.grid import Grid
from hpc3d.comm.mesh import Mesh, groups_of
from hpc3d.comm.stage_mesh import Line, stage_mesh


class ThreadGroup:
    """Shared state of a communicator's members: one slot per member, a barrier, and a mailbox."""

    def __init__(self, members: Sequence[int]) -> None:
        self.members = members
        self.barrier = threading.Barrier(len(members))
        self.slots: list[Any] = [None] * len(members)
        self.mail: dict[tuple[int, int, int], np.ndarray] = {}
        self.arrived = threading.Condition()


class Threads(Communicator):
    """Communicator between threads of one process.

    Results are copies, not views of the peers' blocks.
    """

    def __init__(self, group: ThreadGroup, rank: int, pool: Pool) -> None:
        super().__init__(rank, len(group.members), group.members, pool)
        self.group = group
        self.sent: Counter[int] = Counter()
        self.awaited: Counter[int] = Counter()

    def share(self, block: np.ndarray) -> list[np.ndarray]:
        """Share `block` with all members; return all members' blocks, valid until `leave()`."""
        self.group.slots[self.rank] = block
        self.group.barrier.wait()
        return self.group.slots

    def share_chunks(self, block: np.ndarray) -> list[np.ndarray]:
        """Share `block` with all members; return this member's chunk of each member's block."""
        rows = block.shape[0] // self.size
        return [peer[self.rank * rows : (self.rank + 1) * rows] for peer in self.share(block)]

    def leave(self, result: np.ndarray) -> Pending:
        self.group.barrier.wait()
        return ready(result)

    def _all_gather(self, block):
        return self.leave(np.concatenate(self.share(block)))

    def _reduce_scatter(self, block):
        return self.leave(_sum_of(self.share_chunks(block)))

    def _all_reduce(self, block, op):
        return self.leave(_sum_of(self.share(block), op))

    def _broadcast(self, block, root):
        return self.leave(self.share(block)[root].copy())

    def _reduce(self, block, root):
        blocks = self.share(block)
        return self.leave(_sum_of(blocks) if self.rank == root else block[:0].copy())

    def _all_to_all(self, block):
        return self.leave(np.concatenate(self.share_chunks(block)))

    def _send(self, block, peer):
        letter = (self.rank, peer, self.sent[peer])
        self.sent[peer] += 1
        with self.group.arrived:
            self.group.mail[letter] = block.copy()
            self.group.arrived.notify_all()
        return ready(block)

    def _recv(self, shape, dtype, peer):
        letter = (peer, self.rank, self.awaited[peer])
        self.awaited[peer] += 1
        return Pending(lambda: self._pick_up(letter))

    def _pick_up(self, letter: tuple[int, int, int]) -> np.ndarray:
        with self.group.arrived:
            here = self.group.mail
            self.group.arrived.wait_for(lambda: letter in here or self.group.barrier.broken)
            if letter not in here:
                raise threading.BrokenBarrierError
            return here.pop(letter)


def _sum_of(blocks: Sequence[np.ndarray], op: str = "sum") -> np.ndarray:
    return fold(REDUCTIONS[op], blocks, of_type(np.empty_like(blocks[0])))


def meshes(
    shape: Mapping[str, int], pool_of: Callable[[], Pool] = Pool
) -> tuple[list[Mesh], list[ThreadGroup]]:
    """Return the `Mesh` of each rank for the axis sizes `shape`, and all thread groups."""
    grid = Grid(shape)
    world = ThreadGroup(range(grid.size))
    groups: dict[tuple[str, Sequence[int]], ThreadGroup] = {}

    def mesh(rank):
        pool, coords, comms = pool_of(), grid.coords(rank), {}
        for axis, members in groups_of(grid, coords).items():
            group = groups.setdefault((axis, members), ThreadGroup(members))
            comms[axis] = Threads(group, members.index(rank), pool)
        everyone = Threads(world, rank, pool) if grid.size > 1 else Self(pool)
        return Mesh(grid.sizes, coords, comms, everyone)

    return [mesh(rank) for rank in range(grid.size)], [world, *groups.values()]


def run(
    shape: Mapping[str, int], function: Callable[[Mesh], Any], pool_of: Callable[[], Pool] = Pool
) -> list[Any]:
    """Call a function once per rank, with threads as ranks.

    If a rank raises an exception, the other ranks stop and the caller receives the exception.

    Parameters
    ----------
    shape
        Size of each mesh axis, such as {"x": 2, "y": 2}; the last one varies fastest.
    function
        Function that is called with the mesh of a rank.
    pool_of
        Function that returns the memory pool of a rank.

    Returns
    -------
    list
        Results of the ranks, in rank order.
    """
    return _on_threads(*meshes(shape, pool_of), function)


def run_stages(
    replicas: Sequence[int], rows: int, function: Callable[[Mesh, Line], Any], ways: int = 1
) -> list[Any]:
    """Call `function(mesh, line)` in one thread per rank of a stage mesh (hpc3d.comm.stage_mesh).

    `line` creates a communicator for a list of ranks.  Returns the results in rank order.
    """
    size = ways * sum(replicas)
    pools = [Pool() for _ in range(size)]
    world = ThreadGroup(range(size))
    groups: dict[tuple[int, ...], ThreadGroup] = {}

    def line_of(rank):
        def line(members):
            group = groups.setdefault(tuple(members), ThreadGroup(members))
            return Threads(group, group.members.index(rank), pools[rank])

        return line

    lines = [line_of(rank) for rank in range(size)]
    everyone = [
        Threads(world, rank, pool) if size > 1 else Self(pool) for rank, pool in enumerate(pools)
    ]
    ranks = [
        stage_mesh(replicas, rows, every, line, ways=ways)
        for every, line in zip(everyone, lines, strict=True)
    ]
    return _on_threads(
        ranks, [world, *groups.values()], lambda mesh: function(mesh, lines[mesh.rank])
    )


def _on_threads(
    ranks: Sequence[Mesh], groups: Sequence[ThreadGroup], function: Callable[[Mesh], Any]
) -> list[Any]:
    results, errors = [None] * len(ranks), []

    def work(mesh):
        try:
            results[mesh.rank] = function(mesh)
        except BaseException as error:
            errors.append(error)
            for group in groups:
                group.barrier.abort()
                with group.arrived:
                    group.arrived.notify_all()

    # Daemon threads, so that deadlocked ranks do not keep the process alive.
    threads = [threading.Thread(target=work, args=(mesh,), daemon=True) for mesh in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )
    return results
