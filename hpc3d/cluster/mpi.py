"""MPI as the communicator: host buffers, non-blocking calls, any hosts."""

import os
from time import sleep

import numpy as np
from mpi4py import MPI

from hpc3d.cluster.communicator import Communicator, Pending

OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX}
# While it waits a rank yields its core, and now and then it sleeps, so that the waiting do not
# keep the working from their caches: with 64 ranks on 2 cores and other programs running, a step
# takes 3 s, and 10 s with yields alone.  Naps get longer with the wait, up to ten times: stages of
# a pipeline wait for long.
YIELDS, NAP = 8, 200e-6


def wait_until(done):
    """Return when `done()` is true.

    Now and then MPI gets its turn to move the messages of this rank: a peer may wait for one of
    them before it does what `done` waits for.
    """
    tries = 0
    while not done():
        tries += 1
        if tries % YIELDS:
            os.sched_yield()
        else:
            MPI.COMM_SELF.Iprobe()
            sleep(NAP * min(10, 1 + tries / 64))


class Mpi(Communicator):
    """The members of one MPI communicator."""

    def __init__(self, comm, members, pool):
        super().__init__(comm.rank, comm.size, members, pool)
        self.comm = comm

    def empty(self, shape, dtype):
        return self.pool.empty(shape, dtype, "communication")

    def gather_rows(self, block):
        whole = self.empty((self.size * block.shape[0], *block.shape[1:]), block.dtype)
        return arriving(self.comm.Iallgather(block, whole), whole, block)

    def scatter_rows(self, block):
        part = self.pool.empty((block.shape[0] // self.size, *block.shape[1:]), block.dtype)
        return arriving(self.comm.Ireduce_scatter_block(block, part), part, block)

    def sum_all(self, block, op):
        total = self.empty(block.shape, block.dtype)
        return arriving(self.comm.Iallreduce(block, total, OPERATIONS[op]), total, block)

    def spread(self, block, root):
        rows = np.array([block.shape[0]])
        self.comm.Bcast(rows, root)
        mine = self.rank == root
        whole = block if mine else self.empty((int(rows[0]), *block.shape[1:]), block.dtype)
        return arriving(self.comm.Ibcast(whole, root), whole)

    def collect(self, block, root):
        mine = self.rank == root
        total = self.empty(block.shape, block.dtype) if mine else None
        request = self.comm.Ireduce(block, total, MPI.SUM, root)
        return arriving(request, total if mine else block[:0].copy(), block)

    def exchange(self, block):
        mixed = self.empty(block.shape, block.dtype)
        return arriving(self.comm.Ialltoall(block, mixed), mixed, block)

    def post(self, block, peer):
        return arriving(self.comm.Isend(block, peer), block)

    def take(self, shape, dtype, peer):
        block = self.empty(shape, dtype)
        return arriving(self.comm.Irecv(block, peer), block)


def arriving(request, result, source=None):
    """A pending `result` of an MPI request; `source`, which MPI reads, lives until then."""

    def finish(source=source):
        wait_until(request.Test)
        return result

    return Pending(finish)
