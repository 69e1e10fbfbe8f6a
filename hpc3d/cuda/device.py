"""The GPU of a rank: its streams, its memory, and copies between it and its host.

CuPy (v14) is a value here, so that a played one may stand for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.arrays.pool import Pool, contiguous, from_host, on_host, to_host, value_of, writeable

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

_DONE, _NOT_READY = 0, 600  # CUDA's answers about an event: cudaSuccess, cudaErrorNotReady
GRACE = 1.0  # seconds that calls have to end by themselves, when the job ends
QUEUES = ("blocks", "replicas", "offload")
_FLOAT8 = 89  # the compute capability from which products are of float8, too


def imported() -> ModuleType:
    """CuPy, after what lets it know bfloat16."""
    with suppress(ImportError):
        import ml_dtypes  # noqa: F401
    import cupy

    return cupy


def bound(local_rank: int) -> Cuda:
    """The Cuda of the rank with this number on its node, as MPI counts them: its own, if there are
    enough.  Where a launcher shows each rank one device, that is number 0."""
    cupy = imported()
    return Cuda(local_rank % cupy.cuda.runtime.getDeviceCount(), cupy)


def _register(device: Cuda) -> None:
    """What CuPy's arrays do where NumPy's do something else.  Who wants a value waits as `device`
    does, not as CuPy would."""
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
    """Device `number` of this process.  It is the current one from here on, and so is its stream
    `compute`: neither waits for CUDA's default stream, nor does that wait for them.

    `queues` are the streams of communication (Traffic), `pinned` a pool of memory of the host that
    the device copies by itself.  While the host waits it calls the functions of `meanwhile`: other
    ranks may need an answer of MPI, and NCCL reports its errors only to those who ask.  `aborts`
    are functions that end calls which nobody answers.
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
        """An uninitialised array of the device."""
        return self.cupy.empty(shape, dtype)

    def upload(self, host: np.ndarray) -> Any:
        """An array of the device with the values of `host`, which may change at once.  The host
        does not wait."""
        return self.fill(self.empty(host.shape, host.dtype), host)

    def fill(self, array: Any, host: np.ndarray) -> Any:
        """Let `array`, which is in one piece, have the values of `host`, as `upload` does."""
        staging = self.pinned.empty(host.shape, host.dtype, "communication")
        staging[...] = host
        array.set(staging, stream=self.compute)
        self.leaving.append((self.compute.record(), staging))
        while self.leaving and self.leaving[0][0].done:
            self.leaving.popleft()
        return array

    def download(self, array: Any) -> np.ndarray:
        """A copy of an array, in pinned memory of the host, when all before it is computed."""
        host = self.pinned.empty(array.shape, array.dtype, "communication")
        array.get(stream=self.compute, out=host, blocking=False)
        self.synchronize()
        return host

    def synchronize(self) -> None:
        """Return when all is computed that was asked for."""
        event = self.compute.record()
        while not self.reached(event):
            for function in self.meanwhile:
                function()
            os.sched_yield()

    def reached(self, event: Any) -> bool:
        """Whether the device has come to an event; raises what has gone wrong on the device, of
        which `event.done` says nothing."""
        status = self.cupy.cuda.runtime.eventQuery(event.ptr)
        if status not in (_DONE, _NOT_READY):
            event.synchronize()
        return status == _DONE

    def close(self) -> None:
        """At the end of a job: give up calls that still wait for others, which may have gone.

        Not in a child that is to save something: the device does not know it.
        """
        until = time.monotonic() + GRACE
        for stream in self.queues.values():
            while os.getpid() == self.process and not stream.done:
                if time.monotonic() > until:
                    return self.abort()
                time.sleep(GRACE / 100)

    def abort(self) -> None:
        """Call `aborts` for as long as it takes, but no longer than that."""
        calls = threading.Thread(target=lambda: [each() for each in self.aborts], daemon=True)
        calls.start()
        calls.join(GRACE)


class Pinned(Pool):
    """Arrays of the host in memory that `allocate(size)` keeps in its place."""

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        super().__init__()
        self.allocate = allocate

    def memory(self, size: int) -> np.ndarray:
        return np.frombuffer(self.allocate(size), np.uint8, size)


class Loan:
    """Memory of a device on loan: the arrays on it keep it, and its death calls `end`."""

    __slots__ = ("end", "memory")

    def __init__(self, memory: Any, end: Callable[[], None]) -> None:
        self.memory, self.end = memory, end

    def __del__(self):
        self.end()


class DevicePool(Pool):
    """The arrays of a rank on its `device`, counted by kind.  CuPy's own pool uses their memory
    again, in the order of the stream `compute`."""

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

    def bring(self, array: np.ndarray | float) -> Any:
        """An array with the values of one of the host, or a number as float32."""
        values = array if isinstance(array, np.ndarray) else np.array(array, np.float32)
        return self.device.fill(self.empty(values.shape, values.dtype), values)

    def refill(self, array: Any, values: ArrayLike) -> None:
        """Let an array that was brought have other values."""
        self.device.fill(array, np.asarray(values, array.dtype))

    def synchronize(self) -> None:
        if self.store:
            self.store.settle()
        self.device.synchronize()

    def reserved(self) -> tuple[int, int]:
        """Bytes of the device that arrays have, those that nobody counts among them, and that
        CuPy's pool holds."""
        pool = self.device.cupy.get_default_memory_pool()
        return pool.used_bytes(), pool.total_bytes()
