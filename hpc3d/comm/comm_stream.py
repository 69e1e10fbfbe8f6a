"""CUDA streams for computation and communication, and their synchronization.

A communication call starts when all previously enqueued computation is complete. Computation that
is enqueued after `wait()` starts when the call is complete. Neither blocks the host. An array that
a call reads or writes is kept alive until the compute stream waits for the call, even if Python
drops it earlier: freed memory is reused for the next computation, which must not run concurrently
with a call that still reads it.

    computation     x = ...  |record a             |wait b   y + ...
    communication            |wait a   all-gather  |record b
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.cuda.device import Cuda


class AsyncCall:
    """Communication call, or group of calls, in flight.

    This object keeps the device `arrays` and the `host_buffers` of the calls alive.  The event
    `done` marks the completion of the calls.
    """

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.host_buffers: list[np.ndarray] = []
        self.done: Any = None


class CommStream:
    """CUDA stream that runs the communication calls of one queue (hpc3d.comm.mesh) in order.

    A single stream ensures that all ranks execute the calls in the same order.  `device` provides
    the `compute` stream and one stream per queue in `queues`.  `group` returns a context manager
    in which calls are posted as a group (NCCL).
    """

    def __init__(
        self, device: Cuda, group: Callable[[], AbstractContextManager], queue: str = "blocks"
    ) -> None:
        self.compute, self.sending, self.group = device.compute, device.queues[queue], group
        self.flights: deque[AsyncCall] = deque()
        self.open: AsyncCall | None = None

    def post(
        self, call: Callable[..., object], *arrays: Array, host_buffers: Sequence[np.ndarray] = ()
    ) -> AsyncCall:
        """Start `call(stream=...)` and return its AsyncCall.

        The call reads and writes `arrays` on the device and `host_buffers` on the host.
        """
        flight = self.open or self.begin()
        flight.arrays += arrays
        flight.host_buffers += host_buffers
        call(stream=self.sending)
        if flight is not self.open:
            self.end(flight)
        return flight

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """Return a context manager that posts all calls together, to avoid deadlocks."""
        self.open = flight = self.begin()
        try:
            with self.group():
                yield
        finally:
            self.open = None
        self.end(flight)

    def finish(self, flight: AsyncCall) -> None:
        """Make all later computation wait for an asynchronous call.

        The references to the device arrays of the call are dropped, because only later computation
        can reuse their memory. The host buffers are not released.
        """
        self.compute.wait_event(flight.done)
        flight.arrays.clear()

    def begin(self) -> AsyncCall:
        self.sending.wait_event(self.compute.record())
        return AsyncCall()

    def end(self, flight: AsyncCall) -> None:
        """Record the event that marks the completion of an asynchronous call.

        Events must not be queried while a CUDA graph is being captured, so the call is not tracked
        during capture. The caller must wait for every captured call.
        """
        flight.done = self.sending.record()
        if self.sending.is_capturing():
            return
        self.flights.append(flight)
        while self.flights and self.flights[0].done.done:
            self.flights.popleft()
