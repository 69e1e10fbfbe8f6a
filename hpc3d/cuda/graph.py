"""CUDA graphs: device work that is captured once and replayed with a single host call."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import Any


class CudaGraph:
    """CUDA graph of the work submitted to a device between `begin` and `end`.

    The graph captures the stream `compute`, and all streams that fork from this stream and join it
    again. Captured work runs only when `launch` is called. Arrays allocated during the capture are
    in a private memory pool, so that no other array reuses their memory between two launches.
    Input arrays that are allocated outside the capture must keep their addresses. `device` is a
    Cuda (hpc3d.cuda.device).
    """

    immediate = False

    def __init__(self, device: Any) -> None:
        self.device, self.stream, self.cuda = device, device.compute, device.cupy.cuda
        self.pool, self.memory, self.graph = self.cuda.MemoryPool(), ExitStack(), None

    def begin(self) -> None:
        """Begin the capture.

        Unused memory of the default pool is freed first, because the graph allocates as much
        memory in its private pool. Garbage is collected before the capture and not during the
        capture, because it may contain arrays whose memory was allocated before.
        """
        gc.collect()
        gc.disable()
        self.memory.callback(gc.enable)
        self.device.synchronize()
        self.device.cupy.get_default_memory_pool().free_all_blocks()
        self.memory.enter_context(self.cuda.using_allocator(self.pool.malloc))
        self.stream.begin_capture()

    def end(self) -> None:
        self.graph = self.stream.end_capture()
        self.memory.close()

    def launch(self) -> None:
        self.graph.launch(self.stream)
