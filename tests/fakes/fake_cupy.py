"""The part of CuPy that the program uses, simulated in host memory.

Operations on a stream are executed at once. If the device is `slow`, they are executed one at a
time, when an event that follows them is queried.
"""

import ctypes
from collections import deque
from types import SimpleNamespace

import numpy as np

from tests.fakes.fake_device import DeviceArray

READY, NOT_READY, LOST = 0, 600, 700


class Memory:
    """Bytes at an address with an owner, as exposed by NumPy and CuPy."""

    def __init__(self, ptr, size, owner, device):
        self.owner, self.device = owner, device
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (ptr, False),
        }


class Array(DeviceArray):
    """Fake of cupy.ndarray."""

    def __new__(cls, shape, dtype=float, memptr=None):
        if memptr is None:
            return np.empty(shape, dtype).view(cls)
        return np.asarray(memptr.memory).view(dtype).reshape(shape).view(cls)

    def get(self, stream, out, blocking):
        assert not blocking
        super().get(stream, unkept(out), blocking)

    def set(self, host, stream):
        super().set(unkept(host), stream)


def unkept(host):
    """Return the memory of a host array without an owner, as during an asynchronous copy."""
    memory = (ctypes.c_byte * host.nbytes).from_address(host.ctypes.data)
    return np.frombuffer(memory, host.dtype).reshape(host.shape)


class Stream:
    def __init__(self, cupy):
        self.cupy, self.pending, self.ptr = cupy, deque(), len(cupy.log) + 1

    def use(self):
        self.cupy.note("stream used")

    def later(self, sources, act):
        self.pending.append(act)
        if not self.cupy.slow:
            self.advance()

    def advance(self):
        if self.pending and not self.cupy.stuck:
            self.pending.popleft()()

    def record(self):
        event = Event(self)
        self.later([], event.reach)
        return event

    def wait_event(self, event):
        self.later([], event.synchronize)

    def is_capturing(self):
        return False

    @property
    def done(self):
        self.advance()
        return not self.pending


class Event:
    def __init__(self, stream):
        self.stream, self.done, self.ptr = stream, False, len(stream.cupy.events)
        stream.cupy.events.append(self)

    def reach(self):
        self.done = True

    def synchronize(self):
        if self.stream.cupy.lost:
            raise RuntimeError("cudaErrorIllegalAddress")
        while not self.done:
            self.stream.advance()


class FakeCupy:
    """Fake module. `log` contains the operations in order, and `most` bytes fit on the device.
    Calls hang if peers are `stuck`, and the device is `lost` after an error."""

    __version__ = "14.2.0"

    def __init__(self, count=1, slow=False, most=1 << 30):
        self.slow, self.most, self.stuck, self.lost = slow, most, False, False
        self.log, self.events, self.count = [], [], count
        self.ndarray = self.array_type = type("ndarray", (Array,), {})  # with rules of its own
        self.cuda = SimpleNamespace(
            Device=self.device,
            Stream=self.stream,
            alloc=self.alloc,
            alloc_pinned_memory=lambda size: self.note("pinned") or bytearray(size),
            UnownedMemory=Memory,
            MemoryPointer=lambda memory, offset: SimpleNamespace(memory=memory),
            is_available=lambda: self.count > 0,
            runtime=SimpleNamespace(
                driverGetVersion=lambda: 13000,
                runtimeGetVersion=lambda: 12090,
                getDeviceCount=lambda: self.count,
                getDeviceProperties=lambda number: PROPERTIES,
                eventQuery=self.query,
            ),
        )

    def note(self, text):
        self.log.append(text)

    def device(self, number):
        use = lambda: self.note(f"device {number} used")  # noqa: E731
        return SimpleNamespace(use=use, pci_bus_id=f"0000:0{number}:00.0")

    def stream(self, non_blocking):
        assert non_blocking, "it would wait for the default stream"
        self.note("stream made")
        return Stream(self)

    def alloc(self, size):
        if size > self.most:
            raise MemoryError(f"Out of memory allocating {size} bytes")
        memory = np.empty(size, np.uint8)
        return SimpleNamespace(ptr=memory.ctypes.data, memory=memory)

    def query(self, ptr):
        event = self.events[ptr]
        if not event.done:
            event.stream.advance()
        return LOST if self.lost else READY if event.done else NOT_READY

    def empty(self, shape, dtype):
        return self.ndarray(shape, dtype)

    def asarray(self, values):
        return np.array(values).view(self.ndarray)

    def ascontiguousarray(self, array):
        return np.ascontiguousarray(np.asarray(array)).view(self.ndarray)

    def asnumpy(self, array):
        return np.array(array, copy=True, subok=False)


PROPERTIES = {"name": b"Simulated", "uuid": b"0123456789abcdef", "major": 9, "minor": 0}
