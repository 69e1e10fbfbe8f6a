"""Offload device arrays to pinned host memory.

Copies run on a separate stream, in program order, concurrently with the computation:

    computation   ... block 3         |wait a  ... block 2       |wait b  ... block 1
    copies        |fetch 2, record a           |fetch 1, record b

A copy starts when all previously posted computation is complete.  A saved array keeps its device
memory until the next save.  A loaded array is allocated when its copy is posted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.pool import OFFLOADED
from hpc3d.comm.comm_stream import AsyncCall, CommStream
from hpc3d.cuda.device import DevicePool, Pinned

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.comm.mesh import MeshRecorder


class _OwnedPinned(Pinned):
    """Pool of pinned arrays whose memory is accounted for in the pool `owner`."""

    def __init__(self, owner: DevicePool) -> None:
        super().__init__(owner.device.pinned.allocate)
        self.owner = owner

    def count(self, kind: str, size: int) -> None:
        self.owner.count(OFFLOADED, size)


class PinnedStore:
    """Implementation of HostStore (hpc3d.arrays.host_store) for device arrays."""

    exposed = None

    def __init__(self, pool: DevicePool) -> None:
        self.pool, self.host, self.copied = pool, _OwnedPinned(pool), 0
        self.stream = CommStream(pool.device, nullcontext, "offload")
        self.leaving: AsyncCall | None = None

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Any:
        return self.host.empty(shape, dtype, OFFLOADED)

    def save(self, array: Any, kept: np.ndarray, trace: MeshRecorder) -> None:
        self.settle()
        copy = partial(array.get, out=kept, blocking=False)
        self.leaving = self._copied("offload", copy, array, kept, trace)

    def load(self, kept: np.ndarray, kind: str, trace: MeshRecorder) -> Callable[[], Any]:
        array = self.pool.empty(kept.shape, kept.dtype, kind)
        copy = self._copied("fetch", partial(array.set, kept), array, kept, trace)

        def finish():
            with trace.waiting("fetch"):
                self.stream.finish(copy)
            return array

        return finish

    def settle(self) -> None:
        if self.leaving:
            self.stream.finish(self.leaving)
            self.leaving = None

    def _copied(
        self,
        name: str,
        copy: Callable[..., object],
        array: Any,
        kept: np.ndarray,
        trace: MeshRecorder,
    ) -> AsyncCall:
        self.copied += kept.nbytes
        with trace.copying(name, kept.nbytes):
            return self.stream.post(copy, array, host_buffers=[kept])
