"""Times of points in a device's streams, on the clock of its host.

A moment is an event recorded in a stream; nothing waits for it.  Events give the time between two
of them (cudaEventElapsedTime), so one of them must be known on the host's clock: the reference,
which is recorded while the device is idle, between two readings of the clock.

    host      |before     |after          reference  (before + after) / 2
    device         |reference      |x     x          reference + rate (x - reference)

The error of the reference is at most half of `after - before`, some us.  Events add 0.5 us, and
float32 adds 6e-8 of the time since the reference, which is therefore renewed at the beginning and
at the end of every step.  `rate` is the speed of the host's clock relative to the device's, from
the first and the last reference: after one second of a run it is known to 1e-5, later better.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hpc3d.cuda.device import Cuda

_STOCK = 1024  # events created before the first step
CHUNK = 64  # moments whose times are resolved together
_FIRST, _MOST = 16, 8  # readings for the first reference; most extra readings
_MILLISECOND = 1_000_000  # ns
_LONG = 1e9  # ns between two references before the rate is measured


class Reference:
    """Event with its time in ns on the host's clock.

    `rate` is the host's ns per ns of the device, and `until` is the time of the next reference.
    """

    __slots__ = ("event", "rate", "time", "until")

    def __init__(self, event: Any, time: int, rate: float) -> None:
        self.event, self.time, self.rate = event, time, rate
        self.until: int | None = None


class DeviceClock:
    """Times of a device's events on the host's `clock` [ns].

    References are recorded in the stream `compute` of `device`.  `create()` makes an event, and
    `elapsed(event, later)` returns the ms between two events.  Events come from a pool and return
    to it.
    """

    def __init__(
        self,
        device: Cuda,
        create: Callable[[], Any],
        elapsed: Callable[[Any, Any], float],
        clock: Callable[[], int],
    ) -> None:
        self.device, self.create, self.elapsed, self.clock = device, create, elapsed, clock
        self.stock = [create() for _ in range(_STOCK)]
        self.references: deque[Reference] = deque()
        self.lines: list[Line] = []
        # ns: shortest reading, and device time since the first reference
        self.shortest, self.passed = float("inf"), 0.0
        self.compare(_FIRST)

    def compare(self, looks: int = 1) -> tuple[int, int]:
        """Wait for the device and record a new reference; return the clock before and after it.

        The shortest of several readings is used. Readings stop when one takes at most twice as
        long as the shortest so far.
        """
        self.device.synchronize()
        best = self.look()
        for number in range(1, looks + _MOST):
            if number >= looks and best[0] <= 2 * self.shortest:
                break
            best, other = sorted([best, self.look()], key=lambda look: look[0])
            self.stock.append(other[-1])
        width, before, after, event = best
        self.shortest = min(self.shortest, width)
        self._refer(event, (before + after) // 2)
        return before, after

    def look(self) -> tuple[int, int, int, Any]:
        """Record an event and wait for it between two readings of the clock.

        Returns the time between the readings, both readings, and the event.
        """
        event = self.stock.pop() if self.stock else self.create()
        before = self.clock()
        self.device.compute.record(event)
        event.synchronize()
        after = self.clock()
        return after - before, before, after, event

    def _refer(self, event: Any, time: int) -> None:
        """Make `event`, recorded at `time`, the reference of all later moments."""
        if self.references:
            last = self.references[-1]
            self.passed += self.elapsed(last.event, event) * _MILLISECOND
            last.until = time
        else:
            self.begun = time
        rate = (time - self.begun) / self.passed if self.passed > _LONG else 1.0
        self.references.append(Reference(event, time, rate))
        for line in self.lines:
            line.turn(self.references[-1])
        used = [line.turns[0][0] for line in self.lines]
        while len(self.references) > 1 and self.references[0] not in used:
            self.stock.append(self.references.popleft().event)


class Line:
    """Numbered moments of a stream.

    `times` are the known times of the moments from number `first` on, in ns on the host's clock.
    `taken` are the events of the later moments, and `turns` their references, each with the
    number of its first moment.  New moments resolve old ones, so no work remains after a step.
    """

    def __init__(self, stream: Any, clock: DeviceClock) -> None:
        self.stream, self.clock = stream, clock
        self.taken: deque[Any] = deque()
        self.times = array("q")
        self.turns: deque[tuple[Reference, int]] = deque()
        self.first = self.count = 0
        self.turn(clock.references[-1])
        clock.lines.append(self)

    @property
    def known(self) -> int:
        """Number of the first moment whose time is unknown."""
        return self.first + len(self.times)

    @property
    def last(self) -> Any:
        """Event of the last moment."""
        return self.taken[-1]

    def turn(self, reference: Reference) -> None:
        """Use this reference for the next moments."""
        if not self.taken:
            self.turns.clear()
        self.turns.append((reference, self.count))

    def mark(self) -> int:
        """Record a moment in the stream and return its number."""
        stock = self.clock.stock
        event = stock.pop() if stock else self.clock.create()
        self.stream.record(event)
        if not self.count % CHUNK:
            self._keep_up()
        self.taken.append(event)
        self.count += 1
        return self.count - 1

    def _keep_up(self) -> None:
        """Resolve the times of the oldest CHUNK moments, as far as they have passed."""
        left = CHUNK
        while left and (settled := self._settle(left)):
            left -= settled

    def catch_up(self) -> None:
        """Resolve the times of all moments that have passed."""
        while self._settle(CHUNK) or self._settle(1):
            pass

    def _settle(self, most: int) -> int:
        """Resolve up to `most` of the oldest moments of one reference and return their number.

        It is 0 if the last of them has not passed.
        """
        while len(self.turns) > 1 and self.turns[1][1] <= self.known:
            self.turns.popleft()
        end = self.turns[1][1] if len(self.turns) > 1 else self.count
        count = min(most, end - self.known)
        if not count or not self.taken[count - 1].done:
            return 0
        events = [self.taken.popleft() for _ in range(count)]
        latest = self.times[-1:]
        self.times.extend(np.maximum.accumulate([*latest, *self.at(events)])[len(latest) :])
        self.clock.stock += events
        return count

    def at(self, events: Sequence[Any]) -> np.ndarray:
        """Return the times of events of the first reference.

        In the stream of the references, times are capped at the next reference.
        """
        reference, elapsed = self.turns[0][0], self.clock.elapsed
        passed = np.array([elapsed(reference.event, event) for event in events])
        times = reference.time + np.rint(reference.rate * _MILLISECOND * passed).astype("i8")
        until = reference.until if self.stream is self.clock.device.compute else None
        return times if until is None else np.minimum(times, until)

    def between(self, start: int, end: int) -> float:
        """Return the time in ns between two moments that have passed."""
        known = self.known
        if start < known <= end:
            self.catch_up()
        elif start >= known:
            events = self.taken[start - known], self.taken[end - known]
            return self.clock.elapsed(*events) * _MILLISECOND
        return self.times[end - self.first] - self.times[start - self.first]

    def forget(self, number: int) -> None:
        """Drop the times of moments before this one."""
        del self.times[: number - self.first]
        self.first = number
