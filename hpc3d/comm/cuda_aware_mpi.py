"""CUDA-aware MPI communicators for blocks in device memory.

The module hpc3d.comm.cuda_aware_probe tests whether MPI supports device memory.

MPI is not aware of CUDA streams, so the host waits for all computation before each call. The input
is then complete, and the output buffer is no longer in use. After the wait, the block is available
to all later computation.

Blocks of 16-bit floats are transferred as integers, which every MPI supports, and summed in
float32. Reductions are blocking, because a CUDA-aware MPI may not support non-blocking reductions
(Open MPI 5.0 with CUDA and UCX).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.narrow import integers
from hpc3d.comm.communicator import Pending, ready
from hpc3d.comm.host_staged import HostStaged, narrowed, widened
from hpc3d.comm.mpi import OPERATIONS, MpiCommunicator

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpc3d.arrays.array import Array
    from hpc3d.comm.comm_stream import CommStream
    from hpc3d.cuda.device import DevicePool, Pinned


class CudaAwareMpi(MpiCommunicator):
    """Communicator based on the MPI communicator `comm`, with blocks on the device of `pool`."""

    def __init__(self, comm: MPI.Intracomm, members: Sequence[int], pool: DevicePool) -> None:
        super().__init__(comm, members, pool)
        self.device = pool.device

    def _all_gather(self, block):
        return self.moved(super()._all_gather, block)

    def _reduce_scatter(self, block):
        part = self.pool.empty((block.shape[0] // self.size, *block.shape[1:]), block.dtype)
        return self.summed(self.comm.Reduce_scatter_block, block, part)

    def _all_reduce(self, block, op):
        total = self.empty(block.shape, block.dtype)
        return self.summed(self.comm.Allreduce, block, total, OPERATIONS[op])

    def _broadcast(self, block, root):
        return self.moved(super()._broadcast, block, root)

    def _reduce(self, block, root):
        rows = block.shape[0] if self.rank == root else 0
        total = self.empty((rows, *block.shape[1:]), block.dtype)
        return self.summed(self.comm.Reduce, block, total, OPERATIONS["sum"], root)

    def _all_to_all(self, block):
        return self.moved(super()._all_to_all, block)

    def _send(self, block, peer):
        return self.moved(super()._send, block, peer)

    def _recv(self, shape, dtype, peer):
        carried = integers(np.empty(0, dtype)).dtype
        self.device.synchronize()
        return super()._recv(shape, carried, peer).then(lambda block: block.view(dtype))

    def moved(self, call: Callable[..., Any], block: Array, *how: object) -> Pending:
        """Start an MPI call that only moves data, and return its pending result."""
        self.device.synchronize()
        return call(integers(block), *how).then(lambda result: result.view(block.dtype))

    def summed(
        self, call: Callable[..., Any], block: Array, result: Array, *how: object
    ) -> Pending:
        """Run a blocking MPI reduction, and return its result as a `Pending`."""
        wide = widened(block)
        total = result if wide is block else self.empty(result.shape, wide.dtype)
        self.device.synchronize()
        call(wide, total, *how)
        return ready(narrowed(total, result))


class CudaAwareMessages(HostStaged):
    """Communicator with CUDA-aware sends and receives, and host-staged collectives.

    This class is used if MPI supports device memory only in point-to-point messages. The
    communicator `direct` sends and receives these messages.
    """

    def __init__(
        self,
        direct: CudaAwareMpi,
        comm: MpiCommunicator,
        traffic: CommStream,
        pinned: Pinned,
        pool: DevicePool,
    ) -> None:
        super().__init__(comm, traffic, pinned, pool)
        self._send = direct._send  # type: ignore[method-assign]  # replaces HostStaged._send
        self._recv = direct._recv  # type: ignore[method-assign]
