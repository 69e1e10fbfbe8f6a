"""Every NCCL call with every type, in a group of one rank: signatures, type numbers, and order of
operations in streams."""

import time
from functools import partial

import numpy as np

from hpc3d.comm.nccl import TYPES
from tests.gpu.notes import Skip

CALLS = {
    "all_gather": lambda comm, block: comm.all_gather(block),
    "reduce_scatter": lambda comm, block: comm.reduce_scatter(block),
    "all_reduce": lambda comm, block: comm.all_reduce(block),
    "all_reduce max": lambda comm, block: comm.all_reduce(block, "max"),
    "broadcast": lambda comm, block: comm.broadcast(block, 0),
    "reduce": lambda comm, block: comm.reduce(block, 0),
    "all_to_all": lambda comm, block: comm.all_to_all(block),
}
SIZES = ((1, 1), (4, 33), (1024, 1024))
TIMED = 200  # calls


class Alone:
    """Fake MPI with one member."""

    rank, size = 0, 1

    def bcast(self, value, root=0):
        return value


def cases(device, quick):
    if device.fake:
        yield "NCCL", skipped
        return
    yield "version", version
    comm = Lazy(device)
    for dtype in TYPES:
        for name in (*CALLS, "a message to itself"):
            yield f"{name} [{dtype}]", partial(call, device, comm, name, dtype)
    yield "a sum of 256 MB", partial(large, device, comm)
    yield "host time of a call", partial(dispatched, device, comm)


def skipped(notes):
    raise Skip("a fake device has no NCCL")


def version(notes):
    from cupy.cuda import nccl

    if not getattr(nccl, "available", False):
        raise Skip("CuPy finds no libnccl")
    notes.fact("NCCL", nccl.get_version())


class Lazy:
    """Communicator of one rank, created when it is first used."""

    def __init__(self, device):
        self.device, self.made = device, None

    def get(self):
        if self.made is None:
            self.made = begun(self.device)
        return self.made


def begun(device):
    from cupy.cuda import nccl

    from hpc3d.comm.comm_stream import CommStream
    from hpc3d.comm.nccl import Nccl, grouped, split

    if not getattr(nccl, "available", False):
        raise Skip("CuPy finds no libnccl")
    pool = device.pool()
    whole, parts = split(nccl, Alone(), {"x": (0, 0)})
    traffic = CommStream(pool.device, grouped(nccl))
    made = Nccl(parts["x"], Alone(), traffic, (0,), pool)
    made.whole = whole  # lives as long as its part
    return made


def call(device, comm, name, dtype, notes):
    """The output equals the input."""
    if dtype == "bfloat16" and dtype not in device.reals:
        raise Skip("no bfloat16")
    comm, random = comm.get(), np.random.default_rng(3)
    for size in SIZES:
        host = random.integers(0, 100, size).astype(np.dtype(dtype))
        block = comm.pool.bring(host)
        got = itself(comm, block) if name not in CALLS else CALLS[name](comm, block).wait()
        notes.same(f"{size}", device.download(got), host, 0)


def itself(comm, block):
    with comm.grouped():
        sent, came = comm.send(block, 0), comm.recv(block.shape, block.dtype, 0)
    sent.wait()
    return came.wait()


def large(device, comm, notes):
    comm = comm.get()
    block = comm.pool.zeros((64 << 20,), np.float32)
    seconds = device.seconds(lambda: comm.all_reduce(block).wait(), 5)
    notes.fact("GB/s", block.nbytes / seconds / 1e9)


def dispatched(device, comm, notes):
    notes.fact("us of the host", 1e6 * call_seconds(comm.get(), device))


def call_seconds(comm, device):
    """Return the time that the host spends on a call."""
    block = comm.pool.zeros((1,), np.float32)
    comm.all_reduce(block).wait()
    device.synchronize()
    start = time.perf_counter()
    for _ in range(TIMED):
        comm.all_reduce(block).wait()
    seconds = (time.perf_counter() - start) / TIMED
    device.synchronize()
    return seconds
