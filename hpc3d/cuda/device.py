"""The GPU of a rank: its streams, its memory, and copies between host and device.

The module `cupy` (v14) is passed as an argument, so that tests can replace it with a mock.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.pool import Pool, contiguous, from_host, on_host, to_host, value_of, writeable
from hpc3d.cuda.graph import CudaGraph

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

_DONE, _NOT_READY = 0, 600  # status codes of cudaEventQuery: cudaSuccess, cudaErrorNotReady
GRACE = 1.0  # timeout in seconds for aborting pending communication calls at the end of the job
QUEUES = ("blocks", "replicas", "offload", "groups", "experts")
_FLOAT8 = 89  # minimum compute capability of float8 GEMMs


def imported() -> ModuleType:
    """Import CuPy. ml_dtypes is imported first, because it adds bfloat16 to NumPy."""
    import ml_dtypes  # noqa: F401, I001
    import cupy

    return cupy


def bound(local_rank: int) -> Cuda:
    """Return the CUDA device assigned to a rank, given its local rank on the node.

    Each rank has its own device if the node has enough devices. If the launcher makes only one
    device visible to each rank, the rank uses device 0.
    """
    cupy = imported()
    return Cuda(local_rank % cupy.cuda.runtime.getDeviceCount(), cupy)


def _register(device: Cuda) -> None:
    """Register the array operations for which CuPy and NumPy differ.

    Copies to the host wait in `device.synchronize`, which makes progress on MPI calls. CuPy's own
    synchronization makes no MPI progress while it waits.
    """
    cupy, kind = device.cupy, device.array_type

    def read(array):
        device.synchronize()
        return cupy.asnumpy(array)

    def write(array, values):
        array[...] = cupy.asarray(values)

    contiguous.register(kind, cupy.ascontiguousarray)
    to_host.register(kind, read)
    on_host.register(kind, read)
    from_host.register(kind, write)
    writeable.register(kind, lambda array: True)
    value_of.register(kind, lambda array: float(device.download(array).reshape(-1)[0]))


class Cuda:
    """CUDA device with index `number`, which becomes the current device of this process.

    The stream `compute` of the device becomes the current stream. None of the device's streams
    synchronizes with CUDA's default stream.

    `queues` are the streams for communication and offloading (hpc3d.comm.comm_stream), and
    `pinned` is a pool of page-locked host memory for asynchronous copies. While the host waits, it
    calls the functions in `meanwhile`: other ranks may need MPI progress, and NCCL reports errors
    only when polled. The functions in `aborts` cancel communication calls whose peers may have
    exited.
    """

    def __init__(self, number: int, cupy: ModuleType | None = None) -> None:
        self.cupy, self.number = cupy or imported(), number
        self.array_type = self.cupy.ndarray
        _register(self)
        self.cupy.cuda.Device(number).use()
        stream = self.cupy.cuda.Stream
        self.compute = stream(non_blocking=True)
        self.queues = {queue: stream(non_blocking=True) for queue in QUEUES}
        self.compute.use()
        properties = self.cupy.cuda.runtime.getDeviceProperties(number)
        self.name, self.uuid = properties["name"].decode(), properties["uuid"][:16].hex()
        self.capability = 10 * properties["major"] + properties["minor"]
        self.bus = self.cupy.cuda.Device(number).pci_bus_id
        self.pinned = Pinned(self.cupy.cuda.alloc_pinned_memory)
        self.leaving, self.process = deque(), os.getpid()
        self.meanwhile, self.aborts = [], []

    def __str__(self) -> str:
        return f"{self.name} ({self.number})"

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Any:
        """Allocate an uninitialized array on the device."""
        return self.cupy.empty(shape, dtype)

    def upload(self, host: np.ndarray) -> Any:
        """Copy `host` asynchronously to a new array on the device.

        The caller may overwrite `host` as soon as the call returns.
        """
        return self.fill(self.empty(host.shape, host.dtype), host)

    def fill(self, array: Any, host: np.ndarray) -> Any:
        """Copy `host` asynchronously into the contiguous device array `array`."""
        staging = self.pinned.empty(host.shape, host.dtype, "communication")
        staging[...] = host
        array.set(staging, stream=self.compute)
        self.leaving.append((self.compute.record(), staging))
        while self.leaving and self.leaving[0][0].done:
            self.leaving.popleft()
        return array

    def download(self, array: Any) -> np.ndarray:
        """Wait for all preceding work; return a copy of a device array in pinned host memory."""
        host = self.pinned.empty(array.shape, array.dtype, "communication")
        array.get(stream=self.compute, out=host, blocking=False)
        self.synchronize()
        return host

    def synchronize(self) -> None:
        """Wait for all work submitted to the stream `compute`."""
        event = self.compute.record()
        while not self.reached(event):
            for function in self.meanwhile:
                function()
            os.sched_yield()

    def reached(self, event: Any) -> bool:
        """Return True if all work submitted before a CUDA event has completed.

        Raises an exception if the device has failed, which `event.done` does not report.
        """
        status = self.cupy.cuda.runtime.eventQuery(event.ptr)
        if status not in (_DONE, _NOT_READY):
            event.synchronize()
        return status == _DONE

    def close(self) -> None:
        """Abort communication calls that are still pending GRACE seconds after the end of a job.

        Their peers may have exited. In a forked child process, which writes a checkpoint and
        cannot use the device, this method does nothing.
        """
        until = time.monotonic() + GRACE
        for stream in self.queues.values():
            while os.getpid() == self.process and not stream.done:
                if time.monotonic() > until:
                    return self.abort()
                time.sleep(GRACE / 100)

    def abort(self) -> None:
        """Run the functions in `aborts` in a thread; wait for at most GRACE seconds."""
        calls = threading.Thread(target=lambda: [each() for each in self.aborts], daemon=True)
        calls.start()
        calls.join(GRACE)


class Pinned(Pool):
    """Pool of host arrays in page-locked memory, allocated by `allocate(size)`."""

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        super().__init__()
        self.allocate = allocate

    def memory(self, size: int) -> np.ndarray:
        return np.frombuffer(self.allocate(size), np.uint8, size)


class Loan:
    """Handle to device memory borrowed from a pool.

    The arrays in this memory hold a reference to the handle, which calls `end` when it is
    destroyed.
    """

    __slots__ = ("end", "memory")

    def __init__(self, memory: Any, end: Callable[[], None]) -> None:
        self.memory, self.end = memory, end

    def __del__(self):
        self.end()


class DevicePool(Pool):
    """Pool of device arrays that counts the bytes allocated for each kind of array.

    The memory comes from CuPy's pool, which reuses freed memory in the order of the stream
    `compute`.
    """

    on_device = True

    def __init__(self, device: Cuda) -> None:
        super().__init__()
        self.device, self.cuda = device, device.cupy.cuda
        self.float8 = device.capability >= _FLOAT8

    def empty(self, shape: Sequence[int], dtype: DTypeLike, kind: str = "activation") -> Any:
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        memory = self.cuda.alloc(nbytes)
        self.count(kind, nbytes)
        loan = Loan(memory, partial(self.count, kind, -nbytes))
        lent = self.cuda.UnownedMemory(memory.ptr, nbytes, loan, self.device.number)
        pointer = self.cuda.MemoryPointer(lent, 0)
        return self.device.cupy.ndarray(tuple(shape), dtype, pointer)

    def shared(self, exporter: Any) -> Any:
        """Return an array in the device memory of an object that supports DLPack."""
        return self.device.cupy.from_dlpack(exporter)

    def bring(self, array: np.ndarray | float) -> Any:
        """Copy a host array, or a number as float32, to a new array on the device."""
        values = array if isinstance(array, np.ndarray) else np.array(array, np.float32)
        return self.device.fill(self.empty(values.shape, values.dtype), values)

    def refill(self, array: Any, values: ArrayLike) -> None:
        """Overwrite a device array created by `bring` with the host array `values`."""
        self.device.fill(array, np.asarray(values, array.dtype))

    def graph(self) -> CudaGraph:
        """Return an empty CUDA graph of this device."""
        return CudaGraph(self.device)

    def synchronize(self) -> None:
        if self.store:
            self.store.settle()
        self.device.synchronize()

    def reserved(self) -> tuple[int, int]:
        """Return the device memory in use and the memory reserved by CuPy's pool, in bytes.

        The memory in use includes arrays not counted by this pool.
        """
        pool = self.device.cupy.get_default_memory_pool()
        return pool.used_bytes(), pool.total_bytes()
