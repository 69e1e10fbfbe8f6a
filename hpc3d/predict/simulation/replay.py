"""Record and replay passes, so that a simulation has to run only a few of them.

On abstract arrays, passes of the same kind are identical for all microbatches: they take the same
time, make the same calls and leave the same memory allocated. A simulation therefore runs only the
first pass of each kind and the passes that overlap with gradient reductions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.abstract import AbstractArray
from hpc3d.model.layers import immediately
from hpc3d.pipeline.engine import DeferredWeightGrads
from hpc3d.trace.schema import MESSAGE_CODES, OP

if TYPE_CHECKING:
    from hpc3d.arrays.abstract import AbstractLease
    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.pipeline.passes import Group
    from hpc3d.pipeline.stage_protocol import PipelineStage


class RecordedPass(NamedTuple):
    """Recorded effects of a pass.

    `start`, `length` (duration), `busy` (CPU time) and `wired` (wait for the network) are in ns.
    `rows` contains the trace rows of the pass. For each call sequence, `first` is the sequence
    number of the first call in the pass, and `calls` is the number of calls. For each kind of
    memory, `live` is the memory use in bytes at the end of the pass, and `peak` its maximum; both
    are relative to the start of the pass. `brought` maps names to placeholders for the arrays that
    the pass copied to the device.
    """

    start: int
    length: int
    busy: int
    wired: int
    rows: np.ndarray
    first: dict
    calls: dict
    live: dict
    peak: dict
    brought: dict


class PassRecorder:
    """Record and replay the passes of a rank on a simulated mesh.

    A replay advances the clock (the pool's cost meter), updates the memory use, and adds the trace
    rows to the mesh's MemoryRecorder.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.ledger, self.clock = mesh, mesh.trace, mesh.pool.meter
        self.comms = {comm.group: comm for comm in mesh.comms.values()}
        self.passes = {}

    @contextmanager
    def record(self, kind: tuple[str, int, int], micro: Microbatch) -> Iterator[None]:
        """Context manager that records the pass in its body, if it is the first of this `kind`."""
        pool, count = self.mesh.pool, self.ledger.count
        now, busy, wired = self.clock.now, self.clock.busy, self.clock.wired
        before, held, peak = Counter(pool.live), pool.held, pool.peak
        shared = pool.shared_workspace
        first = self._sequence_numbers()
        pool.reset_peak()
        known = {*micro.cache.arrays}
        yield
        added = pool.shared_workspace - shared  # later passes find this workspace
        before["workspace"], held = before["workspace"] + added, held + added
        live, high = _differences(pool.live, before), _differences(pool.peak, before)
        high["all"] = pool.peak["all"] - held
        pool.peak = peak | pool.peak
        if kind not in self.passes:
            new = [key for key in micro.cache.arrays if key not in known]
            self.passes[kind] = RecordedPass(
                start=now,
                length=self.clock.now - now,
                busy=self.clock.busy - busy,
                wired=self.clock.wired - wired,
                rows=self.ledger.rows(count),
                first=first,
                calls=_differences(self._sequence_numbers(), first),
                live=live,
                peak=high,
                brought={key[-1]: _placeholder(micro.cache.arrays[key]) for key in new},
            )

    @contextmanager
    def replay(
        self, kind: tuple[str, int, int], micro: Microbatch, microbatch: int
    ) -> Iterator[None]:
        """Context manager that replays the recorded pass of `kind`.

        In this context, the caller must allocate and free the arrays that outlive the pass.
        """
        recorded, pool, before = self.passes[kind], self.mesh.pool, Counter(self.mesh.pool.live)
        rows = self._shifted_rows(recorded, microbatch)
        self.clock.advance(recorded.length, recorded.busy, recorded.wired)
        self.ledger.add(rows, self.clock.now)
        for (group, key), count in recorded.calls.items():
            self.comms[group].sequence[key] += count
        held = pool.held
        for name, array in recorded.brought.items():
            micro.cached(name, lambda _, array=array: array)
        yield
        changes = {
            name: before[name] + recorded.live.get(name, 0) - pool.live[name] for name in pool.live
        }
        for name in sorted(changes, key=changes.get):  # frees memory before allocations
            pool.count(name, changes[name])
        high = {name: change + before[name] for name, change in recorded.peak.items()}
        pool.peak |= Counter(high | {"all": held + recorded.peak["all"]})

    def _shifted_rows(self, recorded: RecordedPass, microbatch: int) -> np.ndarray:
        """Return the trace rows of a pass, with times and sequence numbers set for a replay."""
        rows, now = recorded.rows.copy(), self.clock.now
        for name in ("t_start", "t_global", "posted"):
            rows[name] += now - recorded.start
        rows["microbatch"], rows["step"] = microbatch, self.ledger.step
        numbers = self._sequence_numbers()
        for which in recorded.calls:
            rows["seq"][self._calls(rows, *which)] += numbers[which] - recorded.first.get(which, 0)
        return rows

    def _calls(self, rows: np.ndarray, group: int, key: Any) -> np.ndarray:
        """Return a boolean mask that selects the trace rows of a group's call sequence `key`.

        A sequence consists of all collectives of the group, or of all messages of one kind to or
        from one peer.
        """
        calls = (rows["group"] == group) & (rows["seq"] >= 0)
        if key == "collective":
            return calls & ~np.isin(rows["op"], MESSAGE_CODES)
        op, peer = key
        member = self.comms[group].members[peer]
        return calls & (rows["op"] == OP.index(op)) & (rows["peer"] == member)

    def _sequence_numbers(self) -> dict[tuple[int, Any], int]:
        return {
            (group, key): number
            for group, comm in self.comms.items()
            for key, number in comm.sequence.items()
        }


def _differences(new: Mapping[Any, int], old: Mapping[Any, int]) -> dict[Any, int]:
    changes = {name: count - old.get(name, 0) for name, count in new.items()}
    return {name: change for name, change in changes.items() if change}


def _placeholder(array: Any) -> np.ndarray:
    """Return a host array with the shape and dtype of `array`, backed by a single element."""
    return np.broadcast_to(np.zeros((), getattr(array, "dtype", np.float32)), np.shape(array))


class KeptArrays(list):
    """References to the arrays that a replayed pass saves, so that they stay allocated."""


class ReplayedStage:
    """PipelineStage that runs the passes of the microbatches in `run`, and replays all others."""

    def __init__(
        self, stage: PipelineStage, recorder: PassRecorder, chunk: int, run: Collection[int]
    ) -> None:
        self.stage, self.recorder, self.chunk, self.run = stage, recorder, chunk, run
        self.results = {}

    @property
    def auxiliary_loss(self) -> float:
        return 0.0

    @property
    def units(self) -> list[str]:
        return self.stage.units

    def incoming(self, kind: str, micro: Microbatch) -> Sequence[tuple[tuple[int, ...], Any]]:
        return self.stage.incoming(kind, micro)

    def kind(self, name: str, micro: Microbatch) -> tuple[str, int, int]:
        return name, self.chunk, micro.sequences

    @property
    def microbatch(self) -> int:
        return self.recorder.ledger.microbatch

    def forward(self, x: Array | None, micro: Microbatch) -> tuple[Any, Any]:
        kind = self.kind("F", micro)
        if self.microbatch in self.run:
            with self.recorder.record(kind, micro):
                y, saved = self.stage.forward(x, micro)
            held = _leases(saved)
            kept = [getattr(array, "lease", None) in held for array in (x, y)]
            self.results[kind] = _array_spec(y, x), kept
            return y, saved
        like, kept = self.results[kind]
        with self.recorder.replay(kind, micro, self.microbatch):
            y = self._new_array(like, x)
        return y, KeptArrays(compress((x, y), kept))

    def backward(
        self,
        dy: Array | None,
        saved: Any,
        micro: Microbatch,
        defer: Callable[..., None],
        finished: Callable[[str], None],
    ) -> Any:
        split = defer is not immediately
        kind = self.kind("B" if split else "BW", micro)
        if isinstance(saved, KeptArrays):
            like, holds = self.results[kind]
            work = KeptArrays([dy] * holds)
            with self.recorder.replay(kind, micro, self.microbatch):
                saved.clear()
                dx = self._new_array(like, dy)
        else:
            work = DeferredWeightGrads(self.recorder.ledger) if split else immediately
            with self.recorder.record(kind, micro):
                dx = self.stage.backward(dy, saved, micro, work, finished)
            held = _leases([*work.work]) if split else ()
            self.results[kind] = _array_spec(dx, dy), getattr(dy, "lease", None) in held
        if split:
            defer(self.weight_grad, micro, work)
        return dx

    def weight_grad(self, micro: Microbatch, work: Any) -> None:
        """Run or replay the deferred weight-gradient computations of a split backward pass."""
        kind = self.kind("W", micro)
        if isinstance(work, KeptArrays):
            with self.recorder.replay(kind, micro, self.microbatch):
                work.clear()
        else:
            with self.recorder.record(kind, micro):
                work.run()

    def _new_array(self, like: Any, given: Any) -> Any:
        """Return the result of a replayed pass with the input `given`.

        The result is a new array if `like` is an ArraySpec, the input itself if `like` is
        _SAME_ARRAY, and `like` otherwise.
        """
        if like is _SAME_ARRAY:
            return given
        return self.recorder.mesh.empty(*like) if isinstance(like, ArraySpec) else like


class ArraySpec(NamedTuple):
    shape: tuple
    dtype: np.dtype
    kind: str


_SAME_ARRAY = object()  # marks the result of a stage without layers, which is its input


def _array_spec(array: Any, given: Any) -> Any:
    """Return an ArraySpec that describes an array, so that the array itself can be freed.

    If the array shares memory with `given`, return _SAME_ARRAY.  If `array` is not an abstract
    array, return it unchanged.
    """
    if not isinstance(array, AbstractArray):
        return array
    if isinstance(given, AbstractArray) and given.lease is array.lease:
        return _SAME_ARRAY
    return ArraySpec(array.shape, array.dtype, array.lease.kind if array.lease else "activation")


def _leases(saved: Any) -> set[AbstractLease]:
    if isinstance(saved, AbstractArray):
        return {saved.lease} - {None}
    if isinstance(saved, (tuple, list)):
        return set().union(*map(_leases, saved))
    return set()


def microbatches_to_run(groups: Iterable[Group], sizes: Sequence[int]) -> dict[int, set[int]]:
    """Return a dict from model chunk to the microbatches whose passes must be run, not replayed.

    A pass must be run if it overlaps with gradient reductions, or if it is the first forward or
    backward pass of any microbatch of the same size. `sizes` lists the size of each microbatch.
    """
    found, run = set(), {}
    for group in groups:
        op, mb, chunk = group[0]
        kind = op, chunk, sizes[mb] if mb >= 0 else 0
        closes = group[-1].op == "Reduce" and mb >= 0
        if closes or (op in ("F", "B", "BW") and kind not in found):
            run.setdefault(chunk, set()).add(mb)
        found.add(kind)
    return run
