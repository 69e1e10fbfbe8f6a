"""Record and replay passes, so that a simulation executes only a few of them.

On abstract arrays, passes of the same kind are identical for all microbatches: they take the same
time, make the same calls and leave the same memory allocated. A simulation therefore executes only
the first pass of each kind and the passes that overlap with gradient reductions or all-gathers of
updated values. Within these passes, most Transformer blocks replay the recorded pass of an
identical block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.abstract import AbstractArray
from hpc3d.comm.mesh import WORLD
from hpc3d.model.layers import immediately
from hpc3d.pipeline.engine import DeferredWeightGrads
from hpc3d.pipeline.instruction import is_pair
from hpc3d.trace.schema import MESSAGE_CODES, OP

if TYPE_CHECKING:
    from hpc3d.arrays.abstract import AbstractLease
    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.block import Block
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.pipeline.engine import Engine
    from hpc3d.pipeline.passes import Group
    from hpc3d.pipeline.stage_protocol import PipelineStage
    from hpc3d.predict.simulation.owner_classes import OwnerPeers

GATHERING = "F, gathering"  # kind of a forward pass that waits for updated values
_Kind = tuple[Any, ...]  # kind of a pass, which is the same for identical passes


class RecordedPass(NamedTuple):
    """Recorded effects of a pass.

    `start`, `length` (duration), `busy` (CPU time), `wired` (wait for the network) and `host`
    (time that the host needs for launches) are in ns. `rows` contains the trace rows of the pass.
    For each call sequence with calls in the pass, `calls` contains the group, the key, the
    sequence number of the first call and the number of calls; `sequences` contains the index of
    the call sequence of each row, or -1. For each kind of memory, `live` is the memory use in
    bytes at the end of the pass, and `peak` the maximum memory use; the key "all" is the peak of
    the sum. Both are relative to the start of the pass. `brought` maps (index of the microbatch in
    `numbers`, name) to placeholders for the arrays that the pass copied to the device. `numbers`
    contains the number of the microbatch, or those of the two microbatches of a pair of passes.
    `account` contains the statistics of the pass (see MemoryRecorder), and `saved` the change in
    memory use for each part of the model.
    """

    start: int
    length: int
    busy: int
    wired: int
    host: int
    rows: np.ndarray
    calls: list[tuple[int, Any, int, int]]
    sequences: np.ndarray
    live: dict
    peak: list[tuple[str, int]]
    brought: dict
    account: dict
    saved: dict
    numbers: tuple[int, ...]


class PassRecorder:
    """Record and replay the passes of a rank on a simulated mesh.

    A replay advances the clock (the pool's cost meter), updates the memory use, and adds the trace
    rows to the mesh's MemoryRecorder. `passes` and `results` map the kind of a pass to its
    recorded effects, and to descriptions of its result and of the arrays that it saves. If blocks
    have owner ranks, all classes of ranks begin a pass at the same time (owner_classes.py). A pass
    is recorded as if no collectives had been posted before it, and as if the host were far ahead.
    The time that it loses to collectives or launches is added at its end, for the recorded pass
    and for each replay. A pair of passes is recorded and replayed as a whole: `pair` contains the
    numbers of its microbatches, and while `within` is true, its passes are neither recorded nor
    replayed separately. `replays` is true during the replay of a pair.
    """

    def __init__(self, mesh: Mesh, owners: OwnerPeers | None = None) -> None:
        self.mesh, self.ledger, self.clock = mesh, mesh.trace, mesh.pool.meter
        self.owners = owners
        self.comms = {comm.group: comm for comm in mesh.comms.values()}
        self.passes, self.results = {}, {}
        self.pair: tuple[int, ...] = ()
        self.within = self.replays = False

    @contextmanager
    def record(self, kind: _Kind, *micros: Microbatch) -> Iterator[None]:
        """Context manager that records the pass in its body, if it is the first of this `kind`."""
        if self.within:
            yield
            return
        self._align()
        if kind in self.passes:
            yield
            return
        with self.clock.alone(), self._recorded(kind, micros):
            yield

    @contextmanager
    def _recorded(self, kind: _Kind, micros: Sequence[Microbatch]) -> Iterator[None]:
        pool, mark, clock = self.mesh.pool, self.ledger.mark, self.clock
        now, busy, wired = clock.now, clock.busy, clock.wired
        host = clock.host
        before, held, peak = Counter(pool.live), pool.held, pool.peak
        shared = pool.shared_workspace
        arrays = micros[0].cache.arrays  # of all microbatches
        first, known, numbers = self._sequence_numbers(), {*arrays}, self._numbers()
        account, saved, leaving = self._charged(), Counter(pool.saved), self._leaving()
        pool.reset_peak()
        yield
        for name, size in _differences(self._leaving(), leaving).items():  # later passes free it
            before[name] += size
            held += size
        added = pool.shared_workspace - shared  # later passes reuse this workspace
        before["workspace"], held = before["workspace"] + added, held + added
        live, high = _differences(pool.live, before), _differences(pool.peak, before)
        high["all"] = pool.peak["all"] - held
        pool.peak = peak | pool.peak
        of = {micro.first: index for index, micro in enumerate(micros)}
        new = [key for key in arrays if key not in known]
        rows = self.ledger.trace_rows(mark).all
        counts = _differences(self._sequence_numbers(), first)
        calls = [(*which, first.get(which, 0), count) for which, count in counts.items()]
        self.passes[kind] = RecordedPass(
            start=now,
            length=clock.now - now,
            busy=clock.busy - busy,
            wired=clock.wired - wired,
            host=clock.host - host,
            rows=rows,
            calls=calls,
            sequences=self._sequences(rows, calls),
            live=live,
            peak=[*high.items()],
            brought={(of[key[-2]], key[-1]): _placeholder(arrays[key]) for key in new},
            account=_differences(self._charged(), account),
            saved=_differences(pool.saved, saved),
            numbers=numbers,
        )

    @contextmanager
    def replay(self, kind: _Kind, *micros: Microbatch, layer: int | None = None) -> Iterator[None]:
        """Context manager that replays the recorded pass of `kind` for the current microbatch.

        In this context, the caller must allocate and free the arrays that outlive the pass. For
        the pass of a single block, `layer` is the index of the block.
        """
        if self.within:
            yield
            return
        self._align()
        recorded, pool, peaks = self.passes[kind], self.mesh.pool, Counter(self.mesh.pool.peak)
        self._replay_rows(recorded, layer)
        before, held, saved = Counter(pool.live), pool.held, pool.saved
        pool.saved = Counter()  # discards changes of the replay
        for (index, name), array in recorded.brought.items():
            micros[index].cached(name, lambda _, array=array: array)
        if pool.on_device:  # identical blocks bring these arrays only once
            brought = sum(array.nbytes for array in recorded.brought.values())
            again = brought - (pool.held - held)
            before["activation"], held = before["activation"] - again, held - again
        yield
        changes = [
            (before.get(name, 0) + recorded.live.get(name, 0) - live, name)
            for name, live in pool.live.items()
        ]
        for change, name in sorted(changes):  # frees memory before allocations
            if change:
                pool.count(name, change)
        pool.saved = saved
        for part, change in recorded.saved.items():
            saved[part] += change
        before["all"] = held
        for name, high in recorded.peak:
            peaks[name] = max(peaks[name], before.get(name, 0) + high)
        pool.peak = peaks

    @contextmanager
    def in_pair(self, replays: bool) -> Iterator[None]:
        """Context manager for the passes of a pair, which is recorded or replayed as a whole."""
        self.within, self.replays = True, replays
        yield
        self.within = self.replays = False

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Context manager that discards the time and the trace rows of its body."""
        ledger, clock = self.ledger, self.clock
        now, ends = dict(vars(clock)), Counter(clock.ends)
        account, mark = self._charged(), ledger.mark
        first = {group: Counter(comm.sequence) for group, comm in self.comms.items()}
        yield
        vars(clock).update(now, ends=ends)
        for group, comm in self.comms.items():
            comm.sequence = first[group]
        ledger.restore(account, mark)

    def _replay_rows(self, recorded: RecordedPass, layer: int | None) -> None:
        """Advance the clock and the sequence numbers, and add the trace rows of a pass."""
        ledger, shift, added = self.ledger, self.clock.now - recorded.start, []
        for group, key, first, count in recorded.calls:
            sequence = self.comms[group].sequence
            added.append(sequence[key] - first)
            sequence[key] += count
        number, *others = self._numbers()
        columns: dict[str, Any] = {"microbatch": number, "step": ledger.step}
        for other in others:  # the second microbatch of a pair
            firsts = recorded.rows["microbatch"] == recorded.numbers[0]
            columns["microbatch"] = np.where(firsts, number, other)
        if layer is not None:
            columns["layer"] = layer
        ledger.charge()
        self.clock.advance(recorded.length, recorded.busy, recorded.wired)
        ledger.charge_replay(recorded.account)
        ledger.add(recorded.rows, shift, columns, (recorded.sequences, (*added, 0)))
        begin = self.clock.now - recorded.length
        self.clock.contend(begin, recorded.busy, self.clock.occupied)
        self.clock.launched(recorded.host)

    def _sequences(self, rows: np.ndarray, calls: Sequence[tuple]) -> np.ndarray:
        """Return, for each trace row, the index of its call sequence in `calls`, or -1."""
        found = np.full(len(rows), -1)
        for number, (group, key, *_) in enumerate(calls):
            found[self._calls(rows, group, key)] = number
        return found

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

    def _align(self) -> None:
        """Advance the clock to the latest time of all classes of ranks, if blocks have owners."""
        if self.owners:
            self.clock.reach(max(self.owners.values(WORLD, self.clock.now).values()))

    def _leaving(self) -> Counter:
        """Return the size of the array that a copy to the host keeps in device memory, by kind."""
        array = self.mesh.pool.store and self.mesh.pool.store.leaving[0]
        return Counter(
            {array.lease.kind: array.nbytes} if array is not None else {"activation": 0}
        )

    def _charged(self) -> Counter:
        """Return the statistics of the current step up to now (MemoryRecorder.account)."""
        self.ledger.charge()
        return Counter(self.ledger.account)

    def _numbers(self) -> tuple[int, ...]:
        """Return the number of the current microbatch, or those of the current pair."""
        return self.pair or (self.ledger.microbatch,)

    def _sequence_numbers(self) -> dict[tuple[int, Any], int]:
        return {
            (group, key): number
            for group, comm in self.comms.items()
            for key, number in comm.sequence.items()
        }

    def forward(
        self, kind: _Kind, run: Callable[..., Any], x: Array | None, micro: Microbatch
    ) -> tuple[Any, Any]:
        """Record a forward pass of a stage or block, which `run(x, micro)` executes."""
        with self.record(kind, micro):
            y, saved = run(x, micro)
        held = _leases(saved)
        kept = [getattr(array, "lease", None) in held for array in (x, y)]
        self.results[kind] = _array_spec(y, x), kept
        return y, saved

    def replay_forward(
        self, kind: _Kind, x: Array | None, micro: Microbatch, layer: int | None = None
    ) -> tuple[Any, KeptArrays]:
        like, kept = self.results[kind]
        with self.replay(kind, micro, layer=layer):
            y = self._new_array(like, x)
        return y, KeptArrays(compress((x, y), kept))

    def replay_backward(
        self,
        kind: _Kind,
        dy: Array | None,
        saved: KeptArrays,
        micro: Microbatch,
        layer: int | None = None,
    ) -> Any:
        like, _ = self.results[kind]
        with self.replay(kind, micro, layer=layer):
            saved.clear()
            dx = self._new_array(like, dy)
        return dx

    def _new_array(self, like: Any, given: Any) -> Any:
        """Return the result of a replayed pass with the input `given`.

        The result is a new array if `like` is an ArraySpec, the input itself if `like` is
        _SAME_ARRAY, and `like` otherwise.
        """
        if like is _SAME_ARRAY:
            return given
        if not isinstance(like, ArraySpec):
            return like
        *form, part = like
        with self.ledger.scope(part=part):
            return self.mesh.empty(*form)


def _differences(new: Mapping[Any, int], old: Mapping[Any, int]) -> dict[Any, int]:
    changes = {name: count - old.get(name, 0) for name, count in new.items()}
    return {name: change for name, change in changes.items() if change}


def _placeholder(array: Any) -> np.ndarray:
    """Return a host array with the shape and dtype of `array`, backed by a single element."""
    return np.broadcast_to(np.zeros((), getattr(array, "dtype", np.float32)), np.shape(array))


def _refilled(micro: Microbatch) -> bool:
    """Return True if the microbatch refills the device arrays of the previous step.

    Its passes then bring no arrays, so their peaks differ from those in the first step.
    """
    return micro.cache.persistent and micro.step > 0  # type: ignore[attr-defined]


class KeptArrays(list):
    """References to the arrays that a replayed pass saves, so that they stay allocated."""


class ReplayedStage:
    """PipelineStage that replays the passes of all microbatches except those in `run`."""

    def __init__(
        self, stage: PipelineStage, recorder: PassRecorder, chunk: int, run: ExecutedMicrobatches
    ) -> None:
        self.stage, self.recorder, self.chunk, self.run = stage, recorder, chunk, run
        self.blocks = {}

    @property
    def auxiliary_loss(self) -> float:
        return 0.0

    @property
    def units(self) -> list[str]:
        return self.stage.units

    def incoming(self, kind: str, micro: Microbatch) -> Sequence[tuple[tuple[int, ...], Any]]:
        key = kind, micro.sequences
        if key not in self.blocks:
            self.blocks[key] = self.stage.incoming(kind, micro)
        return self.blocks[key]

    def kind(self, name: str, micro: Microbatch) -> _Kind:
        return name, self.chunk, micro.sequences, _refilled(micro)

    def executes(self, micro: Microbatch) -> bool:
        """Return True if the passes of the current microbatch must be executed."""
        number, known = self.recorder.ledger.microbatch, self.recorder.passes
        if self.recorder.within and not self.recorder.replays:
            return True
        if number in self.run.always or self.kind("F", micro) not in known:
            return True
        return any(self.kind(op, micro) not in known for op in self.run.once.get(number, ()))

    def forward(
        self, x: Array | None, micro: Microbatch, starting: Callable[[str], None]
    ) -> tuple[Any, Any]:
        recorder = self.recorder
        gathers = recorder.ledger.microbatch == self.run.gathers
        kind = self.kind(GATHERING if gathers else "F", micro)
        if self.executes(micro):
            run = partial(self.stage.forward, starting=starting)
            with recorder.unrecorded() if recorder.replays else nullcontext():
                return recorder.forward(kind, run, x, micro)
        return self.recorder.replay_forward(kind, x, micro)

    def backward(
        self,
        dy: Array | None,
        saved: Any,
        micro: Microbatch,
        defer: Callable[..., None],
        finished: Callable[[str], None],
    ) -> Any:
        split, recorder = defer is not immediately, self.recorder
        kind = self.kind("B" if split else "BW", micro)
        if isinstance(saved, KeptArrays) or recorder.replays:
            _, holds = recorder.results[kind]
            work = KeptArrays([dy] * holds)
            dx = recorder.replay_backward(kind, dy, saved, micro)
        else:
            work = DeferredWeightGrads(recorder.ledger) if split else immediately
            with recorder.record(kind, micro):
                dx = self.stage.backward(dy, saved, micro, work, finished)
            held = _leases([*work.work]) if split else ()
            recorder.results[kind] = _array_spec(dx, dy), getattr(dy, "lease", None) in held
        if split:
            defer(self.weight_grad, micro, work)
        return dx

    def weight_grad(self, micro: Microbatch, work: Any) -> None:
        """Run or replay the deferred weight-gradient computations of a split backward pass."""
        kind = self.kind("W", micro)
        if isinstance(work, KeptArrays):
            with self.recorder.replay(kind, micro):
                work.clear()
        else:
            with self.recorder.record(kind, micro):
                work.run()


class ReplayedBlock:
    """Transformer block that replays the passes of an identical block of the same model chunk.

    `before` and `after` are the numbers of identical blocks before and after this block. The first
    two and the last two of the identical blocks run their passes. A pass is recorded in the second
    block that runs it, because the first block also does work that is done only once, such as the
    allocation of a workspace. `alike` is part of the kind of the passes.
    """

    def __init__(
        self, block: Block, recorder: PassRecorder, alike: tuple, before: int, after: int
    ) -> None:
        self.block, self.recorder, self.alike = block, recorder, alike
        self.number, self.name = block.number, block.name
        self.before, self.after = before, after

    def forward(self, x: Array, micro: Microbatch) -> tuple[Array, Any]:
        kind = ("F", micro.sequences, _refilled(micro), *self.alike)
        if min(self.before, self.after) > 1:
            return self.recorder.replay_forward(kind, x, micro, self.number)
        if self.before == 1:
            return self.recorder.forward(kind, self.block.forward, x, micro)
        return self.block.forward(x, micro)

    def backward(
        self, dy: Array, saved: Any, micro: Microbatch, defer: Callable[..., None]
    ) -> Array:
        kind = ("BW", micro.sequences, _refilled(micro), *self.alike)
        recorder = self.recorder
        if isinstance(saved, KeptArrays):
            return recorder.replay_backward(kind, dy, saved, micro, self.number)
        only, saved = [saved], None  # the block frees the saved data itself
        if self.after != 1:
            return self.block.backward(dy, only.pop(), micro, defer)
        with recorder.record(kind, micro):
            dx = self.block.backward(dy, only.pop(), micro, defer)
        recorder.results[kind] = _array_spec(dx, dy), None
        return dx


def replayed_blocks(blocks: Sequence[Block], recorder: PassRecorder, chunk: int) -> list[Any]:
    """Return the blocks of a model chunk, most of which replay the passes of other blocks."""
    kinds = [(chunk, block.recompute, block.window) for block in blocks]
    left, before, found = Counter(kinds), Counter(), []
    for block, kind in zip(blocks, kinds, strict=True):
        left[kind] -= 1
        found.append(ReplayedBlock(block, recorder, kind, before[kind], left[kind]))
        before[kind] += 1
    return found


class ArraySpec(NamedTuple):
    """Array to create: its shape, dtype and kind of memory, and the part of the model."""

    shape: tuple
    dtype: np.dtype
    kind: str
    part: str | None


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
    kind, part = (array.lease.kind, array.lease.part) if array.lease else ("activation", None)
    return ArraySpec(array.shape, array.dtype, kind, part)


def _leases(saved: Any) -> set[AbstractLease]:
    if isinstance(saved, AbstractArray):
        return {saved.lease} - {None}
    if isinstance(saved, (tuple, list)):
        return set().union(*map(_leases, saved))
    return set()


def name_of(pair: Group, sizes: Sequence[int]) -> str:
    """Return the part of a pair's replay key that describes its forward pass.

    The kind of its backward pass is the other part.
    """
    forward, _ = pair
    return f"pair with {forward.chunk}F of {sizes[forward.mb]} sequences"


class ReplayedPairs:
    """Method `run_pair` of an engine that replays all pairs of passes except the first of a kind.

    `sizes` lists the size of each microbatch.
    """

    def __init__(self, engine: Engine, recorder: PassRecorder, sizes: Sequence[int]) -> None:
        self.engine, self.recorder, self.sizes = engine, recorder, sizes
        self.run_pair = engine.run_pair

    def __call__(self, pair: Group) -> None:
        engine, recorder, seconds = self.engine, self.recorder, self.engine.seconds
        recorder.pair = tuple(each.mb for each in pair)
        micros = [engine.micros[number] for number in recorder.pair]
        kind = engine.stages[pair[1].chunk].kind(name_of(pair, self.sizes), micros[1])
        if kind in recorder.passes:
            with recorder.replay(kind, *micros), recorder.in_pair(replays=True):
                for each in pair:
                    engine.execute(each)
            seconds.update(recorder.results[kind])
        else:
            before = Counter(seconds)
            with recorder.record(kind, *micros), recorder.in_pair(replays=False):
                self.run_pair(pair)
            recorder.results[kind] = Counter(seconds) - before
        recorder.pair = ()


class ExecutedMicrobatches(NamedTuple):
    """Microbatches of a model chunk whose passes must be executed, not replayed.

    Passes of the microbatches in `always` overlap with collectives over the replicas. The
    microbatches in `once` have the first passes of certain kinds (F, B or BW, or a pair of passes,
    see `name_of`) for microbatches of their size, and are executed until these passes have been
    recorded. The forward pass of
    microbatch `gathers` waits for updated values (`None`: no pass does).
    """

    always: set[int]
    once: dict[int, list[str]]
    gathers: int | None


def microbatches_to_run(
    groups: Sequence[Group], sizes: Sequence[int], gathers: bool
) -> dict[int, ExecutedMicrobatches]:
    """Return the ExecutedMicrobatches of each model chunk.

    `groups` are the groups of instructions of a step, and `sizes` lists the size of each
    microbatch. If `gathers` is true, updated values are gathered during the first forward pass of
    each chunk.
    """
    found: set[tuple[str, int, int]] = set()
    run: dict[int, ExecutedMicrobatches] = {}
    firsts = {chunk: mb for (op, mb, chunk), *_ in reversed(groups) if op == "F"}
    for group in groups:
        op, mb, chunk = group[-1] if is_pair(group) else group[0]
        first = firsts.get(chunk) if gathers else None
        here = run.setdefault(chunk, ExecutedMicrobatches({first} - {None}, {}, first))
        name = name_of(group, sizes) if is_pair(group) else op
        kind = name, chunk, sizes[mb] if mb >= 0 else 0
        if group[-1].op == "Reduce" and mb >= 0:
            here.always.add(mb)
        elif op in ("F", "B", "BW") and kind not in found:
            here.once.setdefault(mb, []).append(name)
        found.add(kind)
    return run
