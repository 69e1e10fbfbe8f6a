"""Fake MPI for the transport Direct, on devices that are threads (fake_device)."""

import numpy as np
from mpi4py import MPI

from tests.fakes.fake_device import HERE, plain


class FakeMpi:
    """MPI calls on idle device memory, executed by a communicator of threads."""

    def __init__(self, comm):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size

    def done(self, call, source, target, *how):
        """Write the result of a call to its target; MPI ignores streams."""
        assert HERE.still, "MPI reads or writes what is still computed"
        assert np.dtype(source.dtype) != np.float16, "not every MPI knows this type"
        result = call(plain(source).copy(), *how).wait()
        np.copyto(plain(target), result)
        HERE.still = False
        return Request(lambda: None)

    def Iallgather(self, source, target):
        return self.done(self.comm.all_gather, source, target)

    def Ialltoall(self, source, target):
        return self.done(self.comm.all_to_all, source, target)

    def Allreduce(self, source, target, op):
        self.done(self.comm.all_reduce, source, target, "max" if op == MPI.MAX else "sum")

    def Reduce_scatter_block(self, source, target):
        self.done(self.comm.reduce_scatter, source, target)

    def Reduce(self, source, target, op, root):
        self.done(self.comm.reduce, source, target, root)

    def Bcast(self, rows, root):
        rows[...] = self.comm.broadcast(rows[: self.rank == root], root).wait()

    def Ibcast(self, whole, root):
        return self.done(
            self.comm.broadcast, whole[: len(whole) * (self.rank == root)], whole, root
        )

    def Isend(self, block, peer, tag):
        return self.done(self.comm.send, block, block, peer)

    def Irecv(self, target, peer, tag):
        assert HERE.still, "MPI writes what is still read"
        coming = self.comm.recv(target.shape, target.dtype, peer)
        return Request(lambda: np.copyto(plain(target), coming.wait()))


class Request:
    """Request of an MPI call, which completes when it is queried."""

    def __init__(self, act):
        self.act = act

    def Test(self):
        self.act()
        return True
