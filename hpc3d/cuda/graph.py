"""What is posted on a device, recorded once and launched again by one call of the host."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc3d.cuda.device import Cuda


class CudaGraph:
    """What is posted between `begin` and `end` on the stream `compute` of a `device`, and on
    streams that wait for it and are waited for.  Nothing of it runs before `launch`.

    Its arrays are in memory of its own, so nothing else can take that between two launches.  What
    it reads from outside must keep its place.
    """

    def __init__(self, device: Cuda) -> None:
        self.device, self.stream, self.cuda = device, device.compute, device.cupy.cuda
        self.pool, self.memory, self.graph = self.cuda.MemoryPool(), ExitStack(), None

    def begin(self) -> None:
        """Memory that no array has is given back before: the graph wants as much once more.  And
        what Python forgot is removed now, for nothing may be in between."""
        gc.collect()
        self.device.synchronize()
        self.device.cupy.get_default_memory_pool().free_all_blocks()
        self.memory.enter_context(self.cuda.using_allocator(self.pool.malloc))
        self.stream.begin_capture()

    def end(self) -> None:
        self.graph = self.stream.end_capture()
        self.memory.close()

    def launch(self) -> None:
        self.graph.launch(self.stream)
