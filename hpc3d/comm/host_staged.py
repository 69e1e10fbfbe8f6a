"""Communicate device blocks through buffers in host memory, for an MPI without CUDA support.

A block is sent in chunks.  While one chunk is in flight between hosts, the next one is copied from
its device.

    device    |0 out|1 out|2 out|         |0 in|1 in|2 in|
    hosts           |  0  |  1  |  2  |

Blocks of 16-bit floats are transferred as integers, which every MPI supports, and summed in
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.narrow import WIDE, integers, is_narrow
from hpc3d.arrays.pool import contiguous
from hpc3d.comm.communicator import Communicator, Pending

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.comm_stream import CommStream
    from hpc3d.cuda.device import DevicePool, Pinned

CHUNK = 4 << 20  # chunk size in bytes per member


class HostStaged(Communicator):
    """Communicator that stages device blocks in host memory and transfers them with `comm`.

    `comm` is a communicator for host arrays. It must allow its arrays to be freed in any order
    (SharedMemory does not), because an array stays alive until the device has read it.  The CUDA
    stream of `traffic` copies blocks between the device and host buffers, which are allocated from
    `pinned`, a pool of pinned memory.
    """

    def __init__(
        self, comm: Communicator, traffic: CommStream, pinned: Pinned, pool: DevicePool
    ) -> None:
        super().__init__(comm.rank, comm.size, comm.members, pool)
        self.comm, self.traffic, self.pinned = comm, traffic, pinned

    def _all_gather(self, block):
        whole = self.buffer((self.size * block.shape[0], *block.shape[1:]), block.dtype)
        return self.moved(self.comm._all_gather, block, whole, 1, self.size)

    def _reduce_scatter(self, block):
        part = self.pool.empty((block.shape[0] // self.size, *block.shape[1:]), block.dtype)
        return self.summed(self.comm._reduce_scatter, block, part, self.size, 1)

    def _all_reduce(self, block, op):
        total = self.buffer(block.shape, block.dtype)
        return self.summed(partial(self.comm._all_reduce, op=op), block, total, 1, 1)

    def _broadcast(self, block, root):
        mine = self.rank == root
        rows = self.comm._broadcast(np.array([[block.shape[0]]])[:mine], root).wait()
        call = partial(self.comm._broadcast, root=root)
        if mine:
            return self.moved(call, block, block[:0], 1, 1).then(lambda _: block)
        whole = self.buffer((int(rows[0, 0]), *block.shape[1:]), block.dtype)
        return self.moved(call, whole, whole, 1, 1)

    def _reduce(self, block, root):
        mine = self.rank == root
        total = self.buffer(block.shape, block.dtype) if mine else block[:0]
        return self.summed(partial(self.comm._reduce, root=root), block, total, 1, 1)

    def _all_to_all(self, block):
        mixed = self.buffer(block.shape, block.dtype)
        return self.moved(self.comm._all_to_all, block, mixed, self.size, self.size)

    def _send(self, block, peer):
        sent = [self.comm._send(chunk, peer) for chunk in self.out(integers(block), 1)]
        return Pending(lambda: [each.wait() for each in sent] and block)

    def _recv(self, shape, dtype, peer):
        block = self.buffer(shape, dtype)
        flat = integers(block).reshape(1, -1)
        shapes = [flat[:, columns].shape for columns in _chunks_of(flat)]
        coming = [self.comm._recv(shape, flat.dtype, peer) for shape in shapes]
        return self._arriving(coming, flat, 1, block)

    def moved(
        self, call: Callable[..., Pending], block: Array, result: Array, given: int, taken: int
    ) -> Pending:
        """Start a host call that moves data without reducing it, and return its pending result.

        `block` consists of `given` shards and `result` of `taken` shards. Each number is 1 or the
        number of members: an all-gather, for example, has given = 1 and taken = the number of
        members.
        """
        coming = [call(chunk) for chunk in self.out(integers(block), given)]
        return self._arriving(coming, integers(result), taken, result)

    def summed(
        self, call: Callable[..., Pending], block: Array, result: Array, given: int, taken: int
    ) -> Pending:
        """Start a reduction on the host, and return its pending result.

        `block` consists of `given` shards and `result` of `taken` shards. Each number is 1 or the
        number of members: a reduce-scatter, for example, has given = the number of members and
        taken = 1.
        """
        wide = widened(block)
        total = result if wide is block else self.buffer(result.shape, wide.dtype)
        coming = [call(chunk) for chunk in self.out(wide, given)]
        arriving = self._arriving(coming, total, taken, total)
        return arriving.then(lambda total: narrowed(total, result))

    def out(self, block: Array, parts: int) -> Iterator[np.ndarray]:
        """Yield host copies of the chunks of a block that contains `parts` shards.

        All copies from the device have started when the first chunk is yielded.
        """
        flat, leaving = block.reshape(parts, -1), []
        for columns in _chunks_of(flat):
            chunk = contiguous(flat[:, columns])
            host: Any = self.pinned.empty(chunk.shape, chunk.dtype, "communication")
            copy = partial(chunk.get, out=host, blocking=False)
            leaving.append((self.traffic.post(copy, chunk, host_buffers=[host]), host))
        for flight, host in leaving:
            flight.done.synchronize()
            yield host

    def _arriving(
        self, coming: Sequence[Pending], target: Array, parts: int, result: Array
    ) -> Pending:
        """Return a `Pending` that fills `result` with the chunks received on the host.

        The chunks are copied to `target`, a view of the memory of `result`.
        """

        def finish():
            chunks = [pending.wait() for pending in coming]
            if target.size:
                flat = target.reshape(parts, -1)
                for columns, chunk in zip(_chunks_of(flat), chunks, strict=True):
                    self.bring(chunk, flat[:, columns])
            return result

        return Pending(finish)

    def bring(self, host: np.ndarray, target: Any) -> None:
        """Copy a host array to `target` on the device; later computation waits for the copy."""
        chunk: Any = (
            target if target.flags.c_contiguous else self.pool.empty(target.shape, target.dtype)
        )
        self.traffic.finish(
            self.traffic.post(partial(chunk.set, host), chunk, host_buffers=[host])
        )
        if chunk is not target:
            target[...] = chunk


def _chunks_of(flat: Array) -> list[slice]:
    """Return column slices that split `flat` [parts, n] into chunks of CHUNK bytes per row."""
    step = CHUNK // flat.itemsize
    return [slice(start, start + step) for start in range(0, flat.shape[1], step)]


def widened(block: Array) -> Array:
    """Convert a block to float32 for summation if it has a 16-bit type."""
    return block.astype(WIDE) if is_narrow(block.dtype) else block


def narrowed(total: Array, result: Array) -> Array:
    """Store a sum in `result`, converted to the type of `result`, and return `result`."""
    if total is not result:
        result[...] = total.astype(result.dtype)
    return result
