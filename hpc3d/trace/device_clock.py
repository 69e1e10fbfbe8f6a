"""When a device passes places of its streams, on the clock of its host.

A moment is an event in a stream, for which nobody waits.  Events tell the time between two of
them (cudaEventElapsedTime), so one of them must be known on the host's clock: the reference, which
is recorded while the device has nothing to do, between two looks at the clock.

    host      |before     |after          reference  (before + after) / 2
    device         |reference      |x     x          reference + rate (x - reference)

The first is wrong by half of `after - before` at most, some us; events add 0.5 us and float32 6e-8
of the time since the reference, which is therefore renewed at the begin of every step and at its
end.  `rate` is how fast the host's clock runs against the device's, by the first reference and
the last one: after a second of a run it is known to 1e-5, later better.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hpc3d.cuda.device import Cuda

_STOCK = 1024  # events that are there before the first step
CHUNK = 64  # moments that get their times together
_FIRST, _MOST = 16, 8  # looks for the first reference, and at most for another one
_MILLISECOND = 1_000_000  # ns
_LONG = 1e9  # ns after which two references tell the rate


class Reference:
    """An event, its time in ns on the host's clock, and the host's ns in one of the device's;
    `until` is the time of the next one."""

    __slots__ = ("event", "rate", "time", "until")

    def __init__(self, event: Any, time: int, rate: float) -> None:
        self.event, self.time, self.rate = event, time, rate
        self.until: int | None = None


class DeviceClock:
    """What a device's events tell on the host's `clock` [ns].

    `device` has the stream `compute`, in which references are recorded; `create()` makes an event,
    `elapsed(event, later)` are the ms between two.  Events come from a stock and return to it.
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
        self.shortest, self.passed = float("inf"), 0.0  # ns: a look, since the first reference
        self.compare(_FIRST)

    def compare(self, looks: int = 1) -> tuple[int, int]:
        """Wait until all is computed, and have a new reference; the looks before and after it.

        Of several the closest, and no more when it is nearly as close as any before.
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
        """How long it takes to look at the clock, let the stream come to an event and look again;
        both looks, and the event."""
        event = self.stock.pop() if self.stock else self.create()
        before = self.clock()
        self.device.compute.record(event)
        event.synchronize()
        after = self.clock()
        return after - before, before, after, event

    def _refer(self, event: Any, time: int) -> None:
        """Let `event`, passed at `time`, be the reference of all moments from now on."""
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
    """The moments of a stream, by number.

    `times` are those of the moments from number `first` on, in ns on the host's clock, as far as
    they are known; `taken` are the events of the others, and `turns` the references of these with
    the number of the first moment of each.  Moments that are new pay for old ones: nothing is left
    to do after a step.
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
        """The number of the first moment whose time is not known."""
        return self.first + len(self.times)

    @property
    def last(self) -> Any:
        """The event of the last moment."""
        return self.taken[-1]

    def turn(self, reference: Reference) -> None:
        """The next moments have this reference."""
        if not self.taken:
            self.turns.clear()
        self.turns.append((reference, self.count))

    def mark(self) -> int:
        """The number of the moment at which the stream comes here."""
        stock = self.clock.stock
        event = stock.pop() if stock else self.clock.create()
        self.stream.record(event)
        if not self.count % CHUNK:
            self._keep_up()
        self.taken.append(event)
        self.count += 1
        return self.count - 1

    def _keep_up(self) -> None:
        """Give the oldest CHUNK moments their times, as far as they are past."""
        left = CHUNK
        while left and (settled := self._settle(left)):
            left -= settled

    def catch_up(self) -> None:
        """Give all moments that are past their times."""
        while self._settle(CHUNK) or self._settle(1):
            pass

    def _settle(self, most: int) -> int:
        """How many of the oldest moments got their times: up to `most` of one reference, if the
        last of these is past."""
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
        """When events of the first turn were passed: on the stream of the references, not after
        the next one."""
        reference, elapsed = self.turns[0][0], self.clock.elapsed
        passed = np.array([elapsed(reference.event, event) for event in events])
        times = reference.time + np.rint(reference.rate * _MILLISECOND * passed).astype("i8")
        until = reference.until if self.stream is self.clock.device.compute else None
        return times if until is None else np.minimum(times, until)

    def between(self, start: int, end: int) -> float:
        """The ns from one moment to another, both of which are past."""
        known = self.known
        if start < known <= end:
            self.catch_up()
        elif start >= known:
            events = self.taken[start - known], self.taken[end - known]
            return self.clock.elapsed(*events) * _MILLISECOND
        return self.times[end - self.first] - self.times[start - self.first]

    def forget(self, number: int) -> None:
        """Nobody asks any more for moments before this one."""
        del self.times[: number - self.first]
        self.first = number
