"""CUDA streams for computation and communication, each in program order, and their dependencies.

A call on a communication stream starts after all previous computation, and computation after its
wait starts after the call.  The host waits for neither.  An array that a call reads or writes is
kept alive until something is ordered after the call, even if Python drops it earlier: freed memory
is reused for the next computation, which must not run concurrently with a call that still reads
it.

    computation     x = ...  |record a             |wait b   y + ...
    communication            |wait a   all-gather  |record b
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.cuda.device import Cuda


class AsyncCall:
    """Calls in flight together: their `arrays` on the device, the `host_buffers` lent by the host,
    and the event at their end."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.host_buffers: list[np.ndarray] = []
        self.done: Any = None


class CommStream:
    """Calls of a rank's communicators in one queue (hpc3d.comm.mesh), in program order on one
    stream.

    One stream prevents the calls from overtaking each other in a different order on another rank.
    `device` has the `compute` stream and the streams of its `queues`; `group` is NCCL's context in
    which calls are posted together.
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
        if self.open:
            return self.add(self.open, call, arrays, host_buffers)
        flight = self.add(self.begin(), call, arrays, host_buffers)
        self.end(flight)
        return flight

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """Group the calls in this context, so that none waits for another."""
        self.open = flight = self.begin()
        try:
            with self.group():
                yield
        finally:
            self.open = None
        self.end(flight)

    def finish(self, flight: AsyncCall) -> None:
        """Order all later computation after a flight.

        Device memory may be freed now, because it is reused only in that order; host buffers may
        not.
        """
        self.compute.wait_event(flight.done)
        flight.arrays.clear()

    def begin(self) -> AsyncCall:
        self.sending.wait_event(self.compute.record())
        return AsyncCall()

    def add(
        self,
        flight: AsyncCall,
        call: Callable[..., object],
        arrays: Iterable[Array],
        host_buffers: Sequence[np.ndarray],
    ) -> AsyncCall:
        flight.arrays += arrays
        flight.host_buffers += host_buffers
        call(stream=self.sending)
        return flight

    def end(self, flight: AsyncCall) -> None:
        """Record the end of a flight.

        Events of a graph that is being captured must not be queried; all of its calls must be
        waited for.
        """
        flight.done = self.sending.record()
        if self.sending.is_capturing():
            return
        self.flights.append(flight)
        while self.flights and self.flights[0].done.done:
            self.flights.popleft()
