"""Pipeline engine, which executes the lowered instruction stream of a stage.

The engine posts a receive when it reaches the receive instruction, and waits for the received
activation or gradient just before its first use.  Before a send, the engine waits for its previous
send of the same kind (activation or gradient) to the same peer.
`passes.check` makes the stricter assumption that each group waits for all of its messages, so a
program that passes this check cannot deadlock.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from hpc3d.comm.communicator import all_of, ready
from hpc3d.model.layers import immediately
from hpc3d.pipeline.instruction import MESSAGES, is_pair

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.communicator import Pending
    from hpc3d.comm.mesh import Mesh, MeshRecorder
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.pipeline.gradient_buckets import Buckets
    from hpc3d.pipeline.instruction import Instruction, Placement
    from hpc3d.pipeline.passes import Group
    from hpc3d.pipeline.stage_protocol import PipelineStage
    from hpc3d.pipeline.weight_versions import InPlace

PHASE = {
    "F": "forward",
    "SendF": "forward",
    "RecvF": "forward",
    "B": "backward_input",
    "W": "backward_weight",
    "BW": "backward",
    "SendB": "backward",
    "RecvB": "backward",
    "Reduce": "optimizer",
    "Step": "optimizer",
}
EVALUATION = dict.fromkeys(PHASE, "evaluation")  # all operations belong to one trace phase


class DeferredWeightGrads:
    """Queue of weight-gradient computations that are deferred to the W pass.

    Each entry includes the number of the layer and the part of the model, for the trace.
    """

    def __init__(self, trace: MeshRecorder) -> None:
        self.trace = trace
        self.work: deque[tuple[int, str, Callable[..., object], tuple[Any, ...]]] = deque()

    def __call__(self, function: Callable[..., object], *args: Any) -> None:
        self.work.append((self.trace.layer, self.trace.part, function, args))

    def run(self) -> None:
        while self.work:
            layer, part, function, args = self.work.popleft()
            with self.trace.scope(layer=layer, part=part):
                function(*args)


class Engine:
    """Pipeline engine of this rank, which runs one `PipelineStage` per chunk.

    The engine calls `update()` at every `Step`.  `losses` maps a training step to this rank's
    share of the summed loss.  In an evaluation, the values are the outputs of the last model chunk
    instead, summed over the microbatches.  `seconds` maps an operation to its total time in the
    last call of `run`, measured with `clock`.  `peak` is the maximum number of forward passes in
    flight, summed over all chunks.
    """

    def __init__(
        self,
        mesh: Mesh,
        stages: Sequence[PipelineStage],
        placement: Placement,
        buckets: Buckets,
        weights: InPlace,
        update: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.mesh, self.stages, self.placement = mesh, stages, placement
        self.buckets, self.weights, self.update, self.clock = buckets, weights, update, clock
        self.stage = mesh.coord("p")
        self.micros: Mapping[int, Microbatch] = {}
        self.phases: Mapping[str, str] = PHASE
        # Keys of `saved` and `deferred`: (microbatch, chunk).  Keys of `inbox` and `outbox`:
        # (kind, microbatch, chunk).  Keys of `sent`: (peer, kind).
        self.saved: dict[tuple[int, int], Any] = {}
        self.deferred: dict[tuple[int, int], DeferredWeightGrads] = {}
        self.inbox: dict[tuple[str, int, int], Pending] = {}
        self.outbox: dict[tuple[str, int, int], Array] = {}
        self.sent: dict[tuple[int, str], Pending] = {}
        self.losses: Counter[int] = Counter()
        self.seconds: Any = Counter()
        self.peak, self.closing = 0, False
        self.table = {
            "F": self.forward,
            "B": self.backward_input,
            "W": self.backward_weight,
            "BW": self.backward,
            "SendF": self.send,
            "SendB": self.send,
            "RecvF": self.receive,
            "RecvB": self.receive,
            "Reduce": self.reduce,
            "Step": self.step,
        }

    def run(
        self,
        groups: Iterable[Group],
        micros: Mapping[int, Microbatch],
        phases: Mapping[str, str] = PHASE,
    ) -> None:
        """Execute groups of instructions.

        `micros` maps a microbatch number to its `Microbatch`, and `phases` maps an operation to
        the name of its phase in the trace.
        """
        self.micros, self.phases, trace = micros, phases, self.mesh.trace
        self.seconds.clear()
        if phases is PHASE and self.buckets.gathers_later:
            with trace.scope(phase="optimizer"):
                self.buckets.start_gathers()
        for group in groups:
            self.closing = group[-1].op == "Reduce"
            with self.mesh.comm("p").grouped() if group[0].op in MESSAGES else nullcontext():
                if is_pair(group):
                    self.receive_inputs(group)
                    self.run_pair(group)
                else:
                    for instruction in group:
                        self.execute(instruction)
        self.drain()
        trace.at(self.stage, 0, -1)

    def drain(self) -> None:
        """Wait for all sends in flight."""
        for channel in [*self.sent]:
            self.sent.pop(channel).wait()

    def execute(self, instruction: Instruction) -> None:
        """Execute one instruction with its handler in `table`, and record its time and phase."""
        trace, start = self.mesh.trace, self.clock()
        trace.at(self.stage, instruction.chunk, instruction.mb)
        with trace.scope(phase=self.phases[instruction.op]):
            self.table[instruction.op](instruction)
        self.seconds[instruction.op] += self.clock() - start

    def receive_inputs(self, pair: Group) -> None:
        """Wait for the activation and the gradient that the passes of a pair need."""
        for op, mb, chunk in pair:
            self.mesh.trace.at(self.stage, chunk, mb)
            with self.mesh.trace.scope(phase=self.phases[op]):
                if pending := self.inbox.pop((op[0], mb, chunk), None):
                    self.inbox[op[0], mb, chunk] = ready(pending.wait())

    def run_pair(self, pair: Group) -> None:
        """Run two passes of different microbatches, which alternate while experts exchange tokens.

        The time of the pair is divided among its passes in proportion to their durations.
        """
        start, before = self.clock(), Counter(self.seconds)
        self.mesh.passes.run(*(partial(self.execute, each) for each in pair))
        lasted = self.clock() - start
        spent = {op: self.seconds[op] - before[op] for op in {each.op for each in pair}}
        total = sum(spent.values())
        for op, seconds in spent.items():
            self.seconds[op] = before[op] + (lasted * seconds / total if total else 0.0)

    def forward(self, instruction: Instruction) -> None:
        mb, chunk = key = instruction[1:]
        micro = self.micros[mb]
        self.weights.before_forward(micro.step)
        x = None if self.placement.first(self.stage, chunk) else self.inbox.pop(("F", *key)).wait()
        y, saved = self.stages[chunk].forward(x, micro, self.starting)
        if micro.training:
            self.losses[micro.step] += self.stages[chunk].auxiliary_loss
            self.saved[key] = saved
            self.peak = max(self.peak, len(self.saved))
        if self.placement.last(self.stage, chunk):
            self.losses[micro.step] += y
        else:
            self._deliver("F", key, y)

    def backward(self, instruction: Instruction, defer: Callable[..., None] = immediately) -> None:
        """Run the backward pass of a chunk.

        `defer` is called with each weight-gradient computation, and runs or queues it.
        """
        mb, chunk = key = instruction[1:]
        last = self.placement.last(self.stage, chunk)
        dy = None if last else self.inbox.pop(("B", *key)).wait()
        saved = self.saved.pop(key)
        dx = self.stages[chunk].backward(dy, saved, self.micros[mb], defer, self.finished)
        if not self.placement.first(self.stage, chunk):
            self._deliver("B", key, dx)

    def backward_input(self, instruction: Instruction) -> None:
        defer = self.deferred[instruction[1:]] = DeferredWeightGrads(self.mesh.trace)
        self.backward(instruction, defer)

    def backward_weight(self, instruction: Instruction) -> None:
        self.deferred.pop(instruction[1:]).run()

    def starting(self, unit: str) -> None:
        """Wait for the updated values of `unit`, if the current step gathers them."""
        if self.phases is PHASE and self.buckets.ahead:
            with self.mesh.trace.scope(phase="optimizer"):
                self.buckets.gathered(unit)

    def finished(self, unit: str) -> None:
        """Mark the gradient of `unit` as complete, so that its reduction may start.

        The call has no effect unless the current pass is the chunk's last backward pass of the
        step, and gradient reductions overlap with it.
        """
        if self.closing:
            with self.mesh.trace.scope(phase="optimizer"):
                self.buckets.finished(unit)

    def reduce(self, instruction: Instruction) -> None:
        self.buckets.all_finished(self.stages[instruction.chunk].units)

    def step(self, _: Instruction) -> None:
        self.update()

    def _deliver(self, kind: str, key: tuple[int, int], block: Array) -> None:
        """Put the result of a pass in `outbox`, to be sent, or in `inbox` if this stage also runs
        the next model chunk."""
        here = self.placement.part(self.stage, key[1])
        stage, chunk = self.placement.location(here + (1 if kind == "F" else -1))
        if stage == self.stage:
            self.inbox[kind, key[0], chunk] = ready(block)
        else:
            self.outbox[kind, *key] = block

    def send(self, instruction: Instruction) -> None:
        kind, key = instruction.op[-1], instruction[1:]
        peer, _ = self.placement.other(self.stage, instruction)
        if (peer, kind) in self.sent:
            self.sent.pop((peer, kind)).wait()
        block, comm = self.outbox.pop((kind, *key)), self.mesh.comm("p")
        arrays = block if isinstance(block, tuple) else (block,)
        self.sent[peer, kind] = all_of([comm.send(array, peer) for array in arrays])

    def receive(self, instruction: Instruction) -> None:
        kind, (mb, chunk) = instruction.op[-1], instruction[1:]
        peer, _ = self.placement.other(self.stage, instruction)
        arrays, comm = self.stages[chunk].incoming(kind, self.micros[mb]), self.mesh.comm("p")
        self.inbox[kind, mb, chunk] = all_of([comm.recv(*array, peer) for array in arrays])
