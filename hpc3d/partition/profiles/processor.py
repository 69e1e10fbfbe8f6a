"""Processor on which a rank measures a profile: a CPU core or a CUDA device.

A clock and the memory of the processor are read before and after the measured work. The difference
of two readings is in seconds or in bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hpc3d.partition.execution.torch_device import device_names
from hpc3d.runtime import host_memory

if TYPE_CHECKING:
    from hpc3d.cuda.device import Cuda
    from hpc3d.runtime.job import Job


class CudaMoment:
    """Time at which the device completes the work submitted so far to the current CUDA stream.

    The difference of two moments is in seconds. The host waits for the device only when it
    computes the difference, so the clock does not delay the launches of the measured work.
    """

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: CudaMoment) -> float:
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


class CudaMemory:
    """Device memory that PyTorch has allocated: now, and its peak since the previous reading.

    The difference of two successive readings is the size in bytes of the memory that the work
    between them allocated and freed again.
    """

    def __init__(self) -> None:
        self.now, self.peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def __sub__(self, earlier: CudaMemory) -> int:
        return self.peak - max(earlier.now, self.now)


class Processor(NamedTuple):
    """Processor of a rank.

    `name` lists the device names of all ranks, and `memory` is the memory per rank in bytes.
    `clock()` reads the clock for computation, `wall()` the clock for communication, and `usage()`
    the used memory. `usage` is `None` on a CPU, where the memory of operations is not measured.
    """

    name: str
    memory: float
    clock: Callable[[], Any]
    wall: Callable[[], Any]
    usage: Callable[[], Any] | None = None


def processor_of(job: Job, device: Cuda | None) -> Processor:
    """Return the processor of this rank, given its CUDA device. All ranks must call this function.

    The memory of a host or a device is divided by the number of its cores, or of the ranks that
    share the device. CPU times are those of the rank's thread, so other processes affect them only
    through contention for caches and memory bandwidth.
    """
    name = device_names(job, device)
    if device is None:
        memory = host_memory.total() / len(os.sched_getaffinity(0))
        return Processor(name, memory, time.thread_time, time.perf_counter)
    mine = job.location()["host"], device.bus, device.uuid
    _, total = torch.cuda.mem_get_info()
    memory = total / job.gather(mine).count(mine)
    return Processor(name, memory, CudaMoment, CudaMoment, CudaMemory)
