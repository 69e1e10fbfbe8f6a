"""Runs the lowered stream of a stage: one table, one entry an instruction.

A receive is posted where it stands in the stream and waited for where its block is used; a send is
waited for before the next one on its channel.  So nothing waits for longer than in `passes.check`,
which lets every group wait for all of its messages.
"""

import time
from collections import Counter, deque
from contextlib import nullcontext

from hpc3d.comm.communicator import ready
from hpc3d.model.layers import at_once
from hpc3d.pipeline.instruction import MESSAGES

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


class Later:
    """Weight gradients that wait for their W, each with the layer that it belongs to."""

    def __init__(self, trace):
        self.trace, self.work = trace, deque()

    def __call__(self, function, *arguments):
        self.work.append((self.trace.layer, function, arguments))

    def run(self):
        while self.work:
            layer, function, arguments = self.work.popleft()
            with self.trace.scope(layer=layer):
                function(*arguments)


class Engine:
    """The stages of this rank (`PipelineStage`), a chunk each, and what is in flight between them.

    `update()` is called for every `Step`.  `losses` is this rank's share of the summed loss by
    training step, `seconds` the time of a run by operation on `clock`, and `peak` the largest
    number of microbatches and chunks that ever were between F and the end of their B.
    """

    def __init__(self, mesh, stages, placement, buckets, weights, update, clock=time.perf_counter):
        self.mesh, self.stages, self.placement = mesh, stages, placement
        self.buckets, self.weights, self.update, self.clock = buckets, weights, update, clock
        self.stage, self.dtype = mesh.coord("p"), buckets.parameters.dtype
        self.micros, self.saved, self.postponed = {}, {}, {}
        self.inbox, self.outbox, self.sent = {}, {}, {}
        self.losses, self.seconds, self.peak = Counter(), Counter(), 0
        self.closing = False
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

    def run(self, groups, micros):
        """Execute groups of instructions; `micros` maps the number of a microbatch to a Micro."""
        self.micros, trace = micros, self.mesh.trace
        self.seconds.clear()
        for group in groups:
            self.closing = group[-1].op == "Reduce"
            with self.mesh.comm("p").grouped() if group[0].op in MESSAGES else nullcontext():
                for instruction in group:
                    self.execute(instruction)
        for channel in [*self.sent]:
            self.sent.pop(channel).wait()
        trace.at(self.stage, 0, -1)

    def execute(self, instruction):
        """One entry of the table, for one instruction."""
        trace, start = self.mesh.trace, self.clock()
        trace.at(self.stage, instruction.chunk, instruction.mb)
        with trace.scope(phase=PHASE[instruction.op]):
            self.table[instruction.op](instruction)
        self.seconds[instruction.op] += self.clock() - start

    def forward(self, instruction):
        mb, chunk = key = instruction[1:]
        micro = self.micros[mb]
        self.weights.before_forward(micro.step)
        x = None if self.placement.first(self.stage, chunk) else self.inbox.pop(("F", *key)).wait()
        y, self.saved[key] = self.stages[chunk].forward(x, micro)
        self.peak = max(self.peak, len(self.saved))
        if self.placement.last(self.stage, chunk):
            self.losses[micro.step] += y
        else:
            self.hand_over("F", key, y)

    def backward(self, instruction, later=at_once):
        """The gradient of the stage's input, and those of its weights where `later` lets them."""
        mb, chunk = key = instruction[1:]
        last = self.placement.last(self.stage, chunk)
        dy = None if last else self.inbox.pop(("B", *key)).wait()
        saved = self.saved.pop(key)
        dx = self.stages[chunk].backward(dy, saved, self.micros[mb], later, self.finished)
        if not self.placement.first(self.stage, chunk):
            self.hand_over("B", key, dx)

    def backward_input(self, instruction):
        later = self.postponed[instruction[1:]] = Later(self.mesh.trace)
        self.backward(instruction, later)

    def backward_weight(self, instruction):
        self.postponed.pop(instruction[1:]).run()

    def finished(self, unit):
        """The gradient of a part of the model is whole if this backward pass is the last."""
        if self.closing:
            with self.mesh.trace.scope(phase="optimizer"):
                self.buckets.finished(unit)

    def reduce(self, instruction):
        for unit in self.stages[instruction.chunk].units:
            self.buckets.finished(unit)

    def step(self, _):
        self.update()

    def hand_over(self, kind, key, block):
        """Keep a block for its Send; or for its use, where the next part is on this stage."""
        here = self.placement.part(self.stage, key[1])
        stage, chunk = self.placement.place(here + (1 if kind == "F" else -1))
        if stage == self.stage:
            self.inbox[kind, key[0], chunk] = ready(block)
        else:
            self.outbox[kind, *key] = block

    def send(self, instruction):
        kind, key = instruction.op[-1], instruction[1:]
        peer, _ = self.placement.other(self.stage, instruction)
        if (peer, kind) in self.sent:
            self.sent.pop((peer, kind)).wait()
        self.sent[peer, kind] = self.mesh.comm("p").send(self.outbox.pop((kind, *key)), peer)

    def receive(self, instruction):
        kind, (mb, chunk) = instruction.op[-1], instruction[1:]
        peer, _ = self.placement.other(self.stage, instruction)
        shape = self.stages[chunk].block_of(self.micros[mb].sequences)
        self.inbox[kind, mb, chunk] = self.mesh.comm("p").recv(shape, self.dtype, peer)
