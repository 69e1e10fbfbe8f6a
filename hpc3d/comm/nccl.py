"""NCCL communicator for device arrays, with calls on separate streams (CommStream).

The host posts a call and continues; `wait()` makes the device wait, not the host. Calls of two
communicators on two streams may deadlock if ranks start them in different orders (NVIDIA/nccl
issues 195 and 592). Since release 2.26, NCCL starts calls in host order
(NCCL_LAUNCH_ORDER_IMPLICIT), which is the same on all ranks.

A training step may launch a CUDA graph with NCCL calls (hpc3d.training.graphed_step). The host
waits for the graph before it posts other calls, so NCCL need not serialize captured calls with
others. This serialization (NCCL_GRAPH_MIXING_SUPPORT) is turned off by default, because it delays
captured calls, and may cause deadlocks if a thread launches graphs of several communicators (NCCL
user guide, "Using NCCL with CUDA Graphs").
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpc3d.comm.communicator import Communicator, Pending, ready

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpc3d.arrays.array import Array
    from hpc3d.arrays.pool import Pool
    from hpc3d.comm.comm_stream import AsyncCall, CommStream

# NCCL's enum values of data types, numbered from 0, and of reduction operations (nccl.h).
_NAMES = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16"
TYPES = {name: number for number, name in enumerate(_NAMES.split())}
_OPERATIONS = {"sum": 0, "max": 2}
OLDEST, _IN_ORDER, _MIXING = 22600, "NCCL_LAUNCH_ORDER_IMPLICIT", "NCCL_GRAPH_MIXING_SUPPORT"


def split(
    library: ModuleType, comm: MPI.Intracomm, lines: Mapping[str, tuple[int, int]]
) -> tuple[Any, dict[str, Any]]:
    """Return the NCCL communicator of all ranks, and a dict from axis to sub-communicator.

    `comm` is the MPI communicator of all ranks.  `lines` maps each axis to the color of this
    rank's group and the rank's index in the group, with the axes in the same order on all ranks.
    `library` is CuPy's NCCL module.  No call may be in flight, and every rank must be in a group.
    """
    os.environ[_IN_ORDER] = "1"
    os.environ.setdefault(_MIXING, "0")
    name = comm.bcast(library.get_unique_id() if comm.rank == 0 else None)
    try:
        world = library.NcclCommunicator(comm.size, name, comm.rank)
        return world, {axis: world.commSplit(*line) for axis, line in lines.items()}
    except library.NcclError as error:
        raise RuntimeError(
            f"NCCL failed to start ({error}); set NCCL_DEBUG=WARN to see the reason, or use "
            "--mesh.transport host-staged"
        ) from error


def grouped(library: ModuleType) -> Callable[[], AbstractContextManager]:
    """Return a factory of context managers, each of which posts its NCCL calls as one group."""

    @contextmanager
    def group():
        library.groupStart()
        try:
            yield
        finally:
            library.groupEnd()

    return group


class Nccl(Communicator):
    """Communicator for ranks on GPUs, which posts the calls of the NCCL communicator `nccl`.

    `host` is an MPI communicator of the same ranks. Before the broadcast of a block, it broadcasts
    the number of rows, which only the root knows.
    """

    def __init__(
        self,
        nccl: Any,
        host: MPI.Intracomm,
        traffic: CommStream,
        members: Sequence[int],
        pool: Pool,
    ) -> None:
        super().__init__(nccl.rank_id(), nccl.size(), members, pool)
        self.nccl, self.host, self.traffic = nccl, host, traffic

    def _all_gather(self, block):
        whole = self.buffer((self.size * block.shape[0], *block.shape[1:]), block.dtype)
        return self.launch(self.nccl.allGather, block, whole, block)

    def _reduce_scatter(self, block):
        part = self.pool.empty((block.shape[0] // self.size, *block.shape[1:]), block.dtype)
        return self.launch(self.nccl.reduceScatter, block, part, part, _OPERATIONS["sum"])

    def _all_reduce(self, block, op):
        total = self.buffer(block.shape, block.dtype)
        return self.launch(self.nccl.allReduce, block, total, block, _OPERATIONS[op])

    def _broadcast(self, block, root):
        rows = self.host.bcast(block.shape[0], root)
        whole = self.buffer((rows, *block.shape[1:]), block.dtype)
        source = block if self.rank == root else whole
        return self.launch(self.nccl.broadcast, source, whole, whole, root)

    def _reduce(self, block, root):
        mine = self.rank == root
        total = self.buffer(block.shape if mine else (0, *block.shape[1:]), block.dtype)
        target, how = total if mine else block, (_OPERATIONS["sum"], root)
        return self.launch(self.nccl.reduce, block, target, block, *how, of=total)

    def _all_to_all(self, block):
        """All-to-all implemented by grouped sends and receives (NCCL 2.26 has no all-to-all)."""
        mixed = self.buffer(block.shape, block.dtype)
        count = block.shape[0] // self.size
        with self.grouped():
            for peer in range(self.size):
                part = slice(peer * count, (peer + 1) * count)
                self.message(self.nccl.send, block[part], peer)
                last = self.message(self.nccl.recv, mixed[part], peer)
        return self._landing(last, mixed)

    def launch(
        self,
        function: Callable[..., object],
        source: Any,
        target: Any,
        counted: Array,
        *how: object,
        of: Array | None = None,
    ) -> Pending:
        """Post a call of the NCCL function `function`, which reads `source` and writes `target`.

        The data type and the element count of the call are those of the array `counted`. If
        `counted` is empty, nothing is posted. The `wait()` of the returned `Pending` returns the
        array `of` if given, otherwise `target`.
        """
        result = target if of is None else of
        if not counted.size:
            return ready(result)

        def begin(stream):
            dtype = TYPES[counted.dtype.name]
            function(source.data.ptr, target.data.ptr, counted.size, dtype, *how, stream.ptr)

        return self._landing(self.traffic.post(begin, source, target), result)

    def _send(self, block, peer):
        return self._landing(self.message(self.nccl.send, block, peer), block)

    def _recv(self, shape, dtype, peer):
        block = self.buffer(shape, dtype)
        return self._landing(self.message(self.nccl.recv, block, peer), block)

    def message(self, function: Callable[..., object], block: Any, peer: int) -> AsyncCall:
        def begin(stream):
            function(block.data.ptr, block.size, TYPES[block.dtype.name], peer, stream.ptr)

        return self.traffic.post(begin, block)

    def grouped(self) -> AbstractContextManager:
        return self.traffic.grouped()

    def _landing(self, flight: AsyncCall, result: Any) -> Pending:
        def finish():
            self.traffic.finish(flight)
            self.nccl.check_async_error()
            return result

        return Pending(finish)
