"""Predict the step time and memory of a captured module under pipeline parallelism.

This cost model is shared by the planner, the baseline planners and the reports. The module is a
chain of atoms, partitioned into model chunks. A pipeline stage has one chunk, or several chunks
under an interleaved schedule. The replicas of a stage split each microbatch by rows.

    step      simulated schedule, then the gradient all-reduces of the stages, then the update
    messages  per microbatch: bytes / min(replicas of sender, replicas of receiver), and one
              latency per peer
    memory    weights, gradients and, unless offloaded, optimizer moments (sharded over replicas
              with ZeRO 1)
              + the inputs of a step
              + (saved + received) * microbatches in flight, or with recomputation
                received * microbatches in flight + saved + sent
              + one gradient that is being sent while the next one is computed
              + peak memory of the gradients in the backward pass, in addition to `saved`

All values are for the rank with the most rows: ceil(ceil(batch / microbatches) / replicas).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from functools import cache
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

from hpc3d.comm.stage_mesh import ranks_of
from hpc3d.console.sanitize import counted
from hpc3d.partition.atom_graph import Graph
from hpc3d.partition.downsets import Chain
from hpc3d.pipeline.schedule import DEFAULT, ONE_STAGE
from hpc3d.pipeline.step_model import reduced, step_model
from hpc3d.pipeline.timeline import Cost
from hpc3d.predict.machine.machine import Machine

MOMENTS = 2  # number of AdamW moment arrays, each as large as the gradients


class Wire(NamedTuple):
    """Linear model of transfer times: latency in seconds and bandwidth in bytes/s."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: Any) -> Any:
        """Return the time in seconds to transfer `nbytes` bytes (a number or an array)."""
        return self.latency * (nbytes > 0) + nbytes / self.bandwidth


class Limits(NamedTuple):
    """Resource limits and cost assumptions for a plan.

    `ranks` is the maximum number of stages. `memory` is in bytes per rank and `bandwidth` in
    bytes/s per link (None: unlimited). If `all_in_flight` is True, every stage has all
    `microbatches` in flight (GPipe). Otherwise, stage s of S has at most S - s microbatches in
    flight (1F1B).

    `latency` is the latency of a message in seconds. `sums` models the time of the gradient
    all-reduce at the end of a step (None: one replica per stage). If `keeps_received` is True,
    each stage also stores the received values of every microbatch in flight.
    """

    ranks: int
    memory: float | None = None
    bandwidth: float | None = None
    microbatches: int = 1
    all_in_flight: bool = False
    latency: float = 0.0
    sums: Wire | None = None
    keeps_received: bool = False

    def seconds(self, nbytes: Any) -> Any:
        """Return the time in seconds to send `nbytes` bytes (a number or an array)."""
        return Wire(self.latency, self.bandwidth or inf).seconds(nbytes)


def load(graph: Graph, members: int, limits: Limits) -> float:
    """Return the load of the stage with the atoms `members`, in seconds per microbatch.

    The load is the compute time of the forward and backward passes, plus the time to transfer each
    received or sent value once.
    """
    computed = graph.total("forward", members) + graph.total("backward", members)
    moved = graph.bytes_in(members) + graph.bytes_out(members)
    return computed + limits.seconds(moved)


def held(graph: Graph, members: int, in_flight: float) -> float:
    """Return the memory in bytes that a stage needs with `in_flight` microbatches in flight."""
    return graph.total("memory", members) + in_flight * graph.total("saved", members)


def as_size(nbytes: float) -> str:
    """Format a size in bytes, rounded up, for use as the value of a command-line option."""
    unit, name = (1e6, "MB") if nbytes >= 1e7 else (1, "B")
    return f"{-(-nbytes // unit):.0f}{name}"


class StageChoice(NamedTuple):
    """Model chunk: the atoms from the end of the previous chunk up to `end` (exclusive).

    The chunk runs on `replicas` ranks. If `recompute` is True, the backward pass repeats the
    chunk's forward pass instead of using saved activations.
    """

    end: int
    replicas: int = 1
    recompute: bool = False


class PipelineChoice(NamedTuple):
    """Pipeline arrangement of a model.

    `stages` contains the model chunks in model order, `chunks` is the number of chunks per
    pipeline stage, and `microbatches` the number of microbatches per step. Chunk n is on pipeline
    stage n mod S, where S is the number of stages. All chunks of a stage have the same number of
    replicas. If `zero` is 1, the replicas of a stage shard the optimizer moments.
    """

    stages: tuple[StageChoice, ...]
    microbatches: int = 1
    schedule: str = DEFAULT
    chunks: int = 1
    zero: int = 0

    @property
    def width(self) -> int:
        """Number of pipeline stages."""
        return len(self.stages) // self.chunks

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of replicas of each pipeline stage."""
        return tuple(stage.replicas for stage in self.stages[: self.width])

    @property
    def ranks(self) -> int:
        """Number of ranks that the arrangement uses."""
        return sum(self.replicas)

    def changed(self, part: int, **fields: Any) -> PipelineChoice:
        """Return a copy of the arrangement with new values for `fields` of one model chunk."""
        stages = [*self.stages]
        stages[part] = stages[part]._replace(**fields)
        return self._replace(stages=tuple(stages))


class RunCosts(NamedTuple):
    """Overhead of a rank in seconds, in addition to the time of operations and communication.

    `forward` and `backward` are per microbatch and model chunk, `step` is per step, and `update`
    is the time of the optimizer update per byte of gradients.
    """

    forward: float = 0.0
    backward: float = 0.0
    step: float = 0.0
    update: float = 0.0


class PartNumbers(NamedTuple):
    """Costs of a model chunk on one rank.

    `forward`, `backward` and `weight` are seconds per microbatch without recomputation; `weight`
    is the part of `backward` that is spent on weight gradients. All other fields are in bytes.
    """

    forward: float
    backward: float
    weight: float
    fixed: float
    trained: float
    fed: float
    saved: float
    received: float
    sent: float
    working: float


class Evaluated(NamedTuple):
    """Predicted time and memory of a training step of an arrangement.

    `seconds` is the step time. For each model chunk, `forward` and `backward` are the times per
    microbatch in seconds; `backward` includes recomputation. For each boundary between chunks,
    `sent` is the number of bytes that the busiest rank sends per microbatch, and `messages` the
    time of these messages in seconds. For each pipeline stage, `sums` is the time of the gradient
    all-reduces in seconds, `in_flight` the number of microbatches in flight, and `held` the peak
    memory of a rank in bytes. `fits` is True if `held` is within the memory limit on all stages.
    """

    seconds: float
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    sent: tuple[float, ...]
    messages: tuple[float, ...]
    sums: tuple[float, ...]
    in_flight: tuple[int, ...]
    held: tuple[float, ...]
    fits: bool


class ModelCosts:
    """Costs of a model on a machine for steps of `batch` samples.

    Costs depend on the number of rows, that is, the samples of a microbatch on one rank.
    `graph_of(rows)` returns the graph with costs for `rows` rows; its atoms are the same for any
    number of rows. `chain(rows)` returns the `Chain` of this graph, which contains the possible
    stage boundaries (cuts). `run` is the overhead of each rank (None: no overhead). `states` is
    the number of optimizer state arrays in the memory of a rank, included in the graph, each as
    large as the gradients: 0 if offloaded.

    The ranks of a stage are contiguous and follow the ranks of the previous stage. If two adjacent
    stages span several nodes, all messages between the stages are assumed to cross the network.
    With tensor parallelism, each of these ranks represents `ways` tensor-parallel ranks.
    """

    ways = 1

    def __init__(
        self,
        graph_of: Callable[[int], Graph],
        machine: Machine,
        batch: int,
        run: RunCosts | None = None,
        states: int = MOMENTS,
    ) -> None:
        self.graph, self.machine, self.batch = cache(graph_of), machine, batch
        self.run, self.states = run or RunCosts(), states
        self.chain = cache(lambda rows: Chain(self.graph(rows)))
        self._parts: dict[tuple[int, int, int], PartNumbers] = {}

    @property
    def count(self) -> int:
        """Number of atoms."""
        return len(self.graph(1))

    def reordered(self, order: list[int]) -> ModelCosts:
        """Return the costs of the same model with its atoms in the topological order `order`."""

        def graph_of(rows):
            return self.graph(rows).ordered(order)

        found = copy(self)
        ModelCosts.__init__(found, graph_of, self.machine, self.batch, self.run, self.states)
        return found

    def rows(self, microbatches: int, replicas: int) -> int:
        """Return the largest number of samples per microbatch that any rank processes."""
        microbatch = -(-self.batch // microbatches)
        return -(-microbatch // replicas)

    def part(self, rows: int, before: int, after: int) -> PartNumbers:
        """Return the costs of the model chunk between two cuts of the chain."""
        key = rows, before, after
        if key not in self._parts:
            chain = self.chain(rows)
            forward, backward, weight = (
                float(each[after] - each[before])
                for each in (chain.forward, chain.backward, chain.weight)
            )
            self._parts[key] = PartNumbers(
                forward=forward + self.run.forward,
                backward=backward + self.run.backward,
                weight=weight,
                fixed=float(chain.fixed(before, after)),
                trained=float(chain.trained(before, after)),
                fed=float(chain.fed(before, after)),
                saved=float(chain.kept(before, after)),
                received=float(chain.crossing[before]),
                sent=float(chain.crossing[after]),
                working=float(chain.working(before, after)),
            )
        return self._parts[key]

    def message(self, nbytes: float, senders: range, receivers: range) -> float:
        """Return the time in seconds to send a microbatch's activations to the next stage.

        `nbytes` is the number of bytes sent or received by the rank with the most rows.
        """
        if not nbytes:
            return 0.0
        ends = min(senders[0], receivers[0]), max(senders[-1], receivers[-1])
        again = _peers(len(senders), len(receivers)) - 1
        call = self.machine.call
        return again * call("send", 0, ends) + call("send", nbytes, ends)

    def summed(self, nbytes: float, ranks: range | tuple[int, ...]) -> float:
        """Return the time in seconds of an all-reduce of `nbytes` bytes over `ranks`.

        Each of n ranks receives (n - 1) / n of the bytes in the reduce-scatter, and the same
        amount in the all-gather.
        """
        if not nbytes or len(ranks) == 1:
            return 0.0
        return self.machine.call("all_reduce", 2 * (1 - 1 / len(ranks)) * nbytes, ranks)


def _peers(one, other):
    """Return the maximum number of ranks that a rank exchanges messages with.

    `one` and `other` are the numbers of replicas of two adjacent stages. Two ranks of these stages
    exchange messages if they process at least one row in common.
    """
    few, many = sorted((one, other))
    return max(-(-(each + 1) * many // few) - each * many // few for each in range(few))


def evaluated(costs: ModelCosts, choice: PipelineChoice, memory: float | None = None) -> Evaluated:
    """Predict the time and memory of a step; `memory` is in bytes per rank (None: unlimited).

    Raises ValueError if the chunks, replicas or microbatches of the arrangement are inconsistent.
    """
    _refuse(costs, choice)
    model = _model_of(choice)
    parts = [*parts_of(costs, choice)]
    again = [stage.recompute * part.forward for stage, part in zip(choice.stages, parts)]
    sent, messages = _borders(costs, choice)
    ends = model.ends(
        [
            Cost(part.forward, part.backward - part.weight + more, part.weight, seconds)
            for part, more, seconds in zip(parts, again, (*messages, 0.0))
        ]
    )
    seconds, sums = _with_sums(costs, choice, parts, ends)
    held = bytes_held(costs, choice)
    return Evaluated(
        seconds=seconds,
        forward=tuple(part.forward for part in parts),
        backward=tuple(part.backward + more for part, more in zip(parts, again)),
        sent=sent,
        messages=messages,
        sums=sums,
        in_flight=tuple(model.most_in_flight),
        held=held,
        fits=max(held) <= (inf if memory is None else memory),
    )


def bytes_held(costs: ModelCosts, choice: PipelineChoice) -> tuple[float, ...]:
    """Return, for each pipeline stage, the peak memory of a rank in bytes."""
    parts, owned = [*parts_of(costs, choice)], [*_owners(costs, choice)]
    model = _model_of(choice)
    found = []
    for stage, replicas in enumerate(choice.replicas):
        fixed, trained, fed = (
            _stage_sum(name, choice, parts, owned, stage) for name in ("fixed", "trained", "fed")
        )
        shared = costs.states * trained * (1 - 1 / replicas) if choice.zero else 0.0
        inputs = fed * choice.microbatches * costs.rows(choice.microbatches, replicas)
        mine = [(choice.stages[n], parts[n]) for n in range(stage, len(parts), choice.width)]
        saved = [part.received + (not chunk.recompute) * part.saved for chunk, part in mine]
        gradient = max(part.received for _, part in mine)
        most = max(nbytes for _, nbytes in model.held(stage, saved, saved, gradient))
        again = max(chunk.recompute * (part.saved + part.sent) for chunk, part in mine)
        working = most + again + max(part.working for _, part in mine)
        found.append(fixed - shared + inputs + working)
    return tuple(found)


def busiest(costs: ModelCosts, choice: PipelineChoice) -> float:
    """Return the compute time per step of the busiest stage, a lower bound on the step time."""
    work = [
        part.backward + (1 + stage.recompute) * part.forward
        for stage, part in zip(choice.stages, parts_of(costs, choice))
    ]
    width = choice.width
    return choice.microbatches * max(sum(work[stage::width]) for stage in range(width))


def _refuse(costs: ModelCosts, choice: PipelineChoice) -> None:
    stages, micros, width = choice.stages, choice.microbatches, choice.width
    ends = [0, *(stage.end for stage in stages)]
    if any(after <= before for before, after in pairwise(ends)) or ends[-1] != costs.count:
        raise ValueError(
            f"stages end at {ends[1:]}: every stage must contain at least one atom, and the last "
            f"stage must end at {costs.count}; use fewer stages"
        )
    if len(stages) % choice.chunks:
        raise ValueError(
            f"the number of model chunks, {len(stages)}, must be a multiple of the number of "
            f"chunks per stage, {choice.chunks}"
        )
    unequal = (stage.replicas != stages[n % width].replicas for n, stage in enumerate(stages))
    if any(unequal):
        raise ValueError(
            "all model chunks of a pipeline stage must have the same number of replicas"
        )
    if not 1 <= micros <= costs.batch:
        samples = counted(costs.batch, "sample")
        few = f"a batch of {samples} is too small for {micros} microbatches"
        raise ValueError(f"{few}; use a larger --batch or fewer --microbatches")
    most = max(choice.replicas)
    if most > costs.rows(micros, 1):
        raise ValueError(
            f"a microbatch of {counted(costs.rows(micros, 1), 'sample')} is too small for {most} "
            "replicas; use fewer replicas or microbatches"
        )


def _model_of(choice):
    """Return the `StepModel` that simulates the training steps of an arrangement.

    If the model is a single chunk, the schedule is ONE_STAGE instead of the arrangement's
    schedule.
    """
    name = ONE_STAGE if len(choice.stages) == 1 else choice.schedule
    return step_model(name, choice.width, choice.microbatches, choice.chunks)


def parts_of(costs: ModelCosts, choice: PipelineChoice) -> Iterator[PartNumbers]:
    """Yield the costs of each model chunk of an arrangement."""
    starts = (0, *(stage.end for stage in choice.stages))
    for before, stage in zip(starts, choice.stages):
        rows = costs.rows(choice.microbatches, stage.replicas)
        yield costs.part(rows, before, stage.end)


def _borders(costs, choice):
    """Return, for each chunk boundary, the bytes sent per microbatch and the send time in s."""
    stage_ranks, sent, seconds = ranks_of(choice.replicas), [], []
    for part, stage in enumerate(choice.stages[:-1]):
        here, there = (stage_ranks[number % choice.width] for number in (part, part + 1))
        rows = costs.rows(choice.microbatches, min(len(here), len(there)))
        sent.append(float(costs.chain(rows).crossing[stage.end]))
        seconds.append(costs.message(sent[-1], here, there))
    return tuple(sent), tuple(seconds)


def _with_sums(costs, choice, parts, ends):
    """Return the step time and the gradient all-reduce time of each stage, in seconds.

    If several stages hold the same weight, its gradient is reduced once over all ranks of these
    stages, after all of these stages have completed their backward passes. The update starts after
    all reductions, because gradient clipping needs the global gradient norm.
    """
    stage_ranks, owned = ranks_of(choice.replicas), [*_owners(costs, choice)]
    tied = [(sorted(owners), shared.parameters) for shared, owners in owned if len(owners) > 1]
    sums, updated = [], []
    for stage, ranks in enumerate(stage_ranks):
        trained = _stage_sum("trained", choice, parts, owned, stage)
        updated.append(trained / len(ranks) if choice.zero else trained)
        alone = trained - sum(nbytes for owners, nbytes in tied if stage in owners)
        sums.append(costs.summed(alone, ranks))
    shared = []
    for owners, nbytes in tied:
        ranks = tuple(rank for owner in owners for rank in stage_ranks[owner])
        shared.append((owners, costs.summed(nbytes, ranks)))
    end = max(reduced(ends, sums, shared))
    for owners, seconds in shared:
        for owner in owners:
            sums[owner] += seconds
    update = max(costs.run.update * nbytes for nbytes in updated)
    return float(end) + update + costs.run.step, tuple(sums)


def _owners(costs, choice):
    """Yield each shared weight or input, and the number of chunks per stage that read it."""
    ends = [stage.end for stage in choice.stages]
    for shared in costs.graph(1).shared:
        parts = {bisect_right(ends, atom) for atom in shared.atoms}
        yield shared, Counter(part % choice.width for part in parts)


_OF_SHARED = {"fixed": "memory", "trained": "parameters", "fed": "fed"}


def _stage_sum(name, choice, parts, owned, stage):
    """Sum a size in bytes over the chunks of a stage, counting each shared tensor once."""
    found = sum(getattr(part, name) for part in parts[stage :: choice.width])
    for shared, owners in owned:
        found -= max(0, owners[stage] - 1) * getattr(shared, _OF_SHARED[name])
    return found
