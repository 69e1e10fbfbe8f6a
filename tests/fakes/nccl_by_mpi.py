"""CuPy's NCCL module, simulated with MPI in host memory."""

from types import SimpleNamespace

from mpi4py import MPI

from tests.fakes.places import array_at

OPS = {0: MPI.SUM, 2: MPI.MAX}


class NcclCommunicator:
    """Communicator of the ranks of COMM_WORLD, or of a part of them."""

    def __init__(self, size, name, rank, comm=MPI.COMM_WORLD):
        assert (size, rank, len(name)) == (comm.size, comm.rank, 128)
        self.comm, self.posted, self.aborted = comm, [], False

    def commSplit(self, color, key):
        part = self.comm.Split(color, key)
        return NcclCommunicator(part.size, b"x" * 128, part.rank, part)

    def rank_id(self):
        return self.comm.rank

    def size(self):
        return self.comm.size

    def check_async_error(self):
        pass

    def abort(self):
        self.aborted = True

    def allGather(self, source, target, count, number, stream):
        whole = array_at(target, count * self.comm.size, number)
        self.comm.Allgather(array_at(source, count, number), whole)

    def reduceScatter(self, source, target, count, number, op, stream):
        given = array_at(source, count * self.comm.size, number)
        self.comm.Reduce_scatter_block(given, array_at(target, count, number), OPS[op])

    def allReduce(self, source, target, count, number, op, stream):
        given, taken = array_at(source, count, number), array_at(target, count, number)
        self.comm.Allreduce(given.copy(), taken, OPS[op])

    def broadcast(self, source, target, count, number, root, stream):
        whole = array_at(target, count, number)
        whole[:] = array_at(source, count, number)
        self.comm.Bcast(whole, root)

    def reduce(self, source, target, count, number, op, root, stream):
        mine = self.comm.rank == root
        total = array_at(target, count, number) if mine else None
        self.comm.Reduce(array_at(source, count, number).copy(), total, OPS[op], root)

    def send(self, source, count, number, peer, stream):
        block = array_at(source, count, number)
        POSTED.append((self.comm.Isend(block, peer), None))

    def recv(self, target, count, number, peer, stream):
        block = array_at(target, count, number)
        POSTED.append((self.comm.Irecv(block, peer), block.nbytes))


POSTED = []


def group_end():
    """Wait for all messages. NCCL hangs or fails if sender and receiver differ in size."""
    for request, size in POSTED:
        status = MPI.Status()
        request.Wait(status)
        assert size in (None, status.Get_count(MPI.BYTE))
    POSTED.clear()


library = SimpleNamespace(
    available=True,
    NcclError=RuntimeError,
    NcclCommunicator=NcclCommunicator,
    get_unique_id=lambda: b"x" * 128,
    get_version=lambda: 22707,
    groupStart=POSTED.clear,
    groupEnd=group_end,
)
