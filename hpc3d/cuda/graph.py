"""CUDA graphs: work on a device, captured once and replayed by one host call."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc3d.cuda.device import Cuda


class CudaGraph:
    """CUDA graph of the work that a `device` receives between `begin` and `end`.

    It captures the stream `compute`, and all streams that fork from it and join it again. Nothing
    runs before `launch`. Its arrays are in a private memory pool, so that no other array reuses
    this memory between two launches. External inputs must keep their addresses.
    """

    def __init__(self, device: Cuda) -> None:
        self.device, self.stream, self.cuda = device, device.compute, device.cupy.cuda
        self.pool, self.memory, self.graph = self.cuda.MemoryPool(), ExitStack(), None

    def begin(self) -> None:
        """Begin the capture.

        Unused memory is freed first, because the graph allocates the same amount again. Garbage is
        collected now, because it must not be collected during the capture.
        """
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
