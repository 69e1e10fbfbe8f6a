"""What a step takes and holds in any arrangement of a captured module on a pipeline, under one
cost model: for the planner, for those it is compared with, and for reports.

The module is a chain of atoms, which is cut into parts; a pipeline stage has one part, or several
of an interleaved schedule, and runs them on its replicas, which share a microbatch by rows.

    step      the schedule on its clock, the sums of gradients of every stage, and the update when
              all have their sums
    messages  of a microbatch: bytes / min(replicas at both ends), and a latency for each peer
    memory    weights, gradients and moments, which replicas share under ZeRO 1
              + the inputs of a step
              + microbatches in flight (saved + received), or with recomputation
                microbatches in flight (received) + saved and sent of one
              + the gradient of one that is sent while the next one is computed
              + the gradients that the backward pass has at its fullest moment beyond `saved`

A rank is that with most rows: ceil(ceil(batch / microbatches) / replicas).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from hpc3d.partition.atom_graph import Graph
from hpc3d.partition.downsets import Chain
from hpc3d.pipeline.schedule import DEFAULT, ONE_STAGE
from hpc3d.pipeline.step_model import step_model
from hpc3d.pipeline.timeline import Cost
from hpc3d.plain import counted
from hpc3d.predict.machine.machine import Machine

MOMENTS = 2  # of AdamW, arrays of a parameter's size that the optimiser keeps


class Wire(NamedTuple):
    """What something that moves takes: seconds for nothing, and bytes/s."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        return self.latency * (nbytes > 0) + nbytes / self.bandwidth


class Limits(NamedTuple):
    """What a plan may use: stages at most, bytes of a rank and bytes/s of a link (None: any), the
    microbatches of a step, and whether all of them are in flight on every stage (GPipe), or no
    more than there are stages from there on (1F1B).

    `latency` is that of a message, and `sums` what replicas take at the end of a step to sum the
    gradients of a stage (None: there is one of each).  With `keeps_received` a stage also holds
    what crossed the border before it, for every microbatch in flight.
    """

    ranks: int
    memory: float | None = None
    bandwidth: float | None = None
    microbatches: int = 1
    all_in_flight: bool = False
    latency: float = 0.0
    sums: Wire | None = None
    keeps_received: bool = False

    def seconds(self, nbytes: float) -> float:
        """Of a transfer."""
        return Wire(self.latency, self.bandwidth or inf).seconds(nbytes)


def load(graph: Graph, members: int, limits: Limits) -> float:
    """Seconds of a stage for a microbatch: what it computes forward and backward, and once per
    value the transfer of each that enters it and of each that leaves it."""
    computed = graph.total("forward", members) + graph.total("backward", members)
    moved = graph.bytes_in(members) + graph.bytes_out(members)
    return computed + limits.seconds(moved)


def held(graph: Graph, members: int, in_flight: float) -> float:
    """Bytes that a stage holds with so many microbatches in flight."""
    return graph.total("memory", members) + in_flight * graph.total("saved", members)


def as_size(nbytes: float) -> str:
    """A size as an option takes it, not below `nbytes`."""
    unit, name = (1e6, "MB") if nbytes >= 1e7 else (1, "B")
    return f"{-(-nbytes // unit):.0f}{name}"


class StageChoice(NamedTuple):
    """A part of the chain: how many atoms lie before its end, on how many replicas it runs, and
    whether its forward pass is run again for backward instead of saving what that needs."""

    end: int
    replicas: int = 1
    recompute: bool = False


class PipelineChoice(NamedTuple):
    """An arrangement: all parts in the order of the model, the `microbatches` that the batch is
    cut into, the `schedule`, the parts of each pipeline stage (`chunks`), and whether its replicas
    share the moments of the optimiser (`zero` = 1).

    Of S pipeline stages, part number n is on n mod S; the parts of a stage have equal replicas.
    """

    stages: tuple[StageChoice, ...]
    microbatches: int = 1
    schedule: str = DEFAULT
    chunks: int = 1
    zero: int = 0

    @property
    def width(self) -> int:
        """The number of pipeline stages."""
        return len(self.stages) // self.chunks

    @property
    def replicas(self) -> tuple[int, ...]:
        """Of each pipeline stage."""
        return tuple(stage.replicas for stage in self.stages[: self.width])

    @property
    def ranks(self) -> int:
        """Those that it uses."""
        return sum(self.replicas)


class RunCosts(NamedTuple):
    """Seconds that a rank takes beside operations and calls: for a microbatch in a part `forward`
    and `backward`, for a `step`, and to `update` a byte of parameters."""

    forward: float = 0.0
    backward: float = 0.0
    step: float = 0.0
    update: float = 0.0


class PartNumbers(NamedTuple):
    """What a rank does and holds for a part: seconds of a microbatch, without recomputation, of
    `backward` those for the gradients of weights (`weight`), and bytes."""

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
    """A step: its seconds; by part the seconds of a microbatch forward and backward, with what is
    run again; by border the bytes that the busiest rank sends of a microbatch, and the seconds of
    it; by pipeline stage the seconds of its sums of gradients, the microbatches in flight, and the
    bytes that a rank holds; whether these are within the memory."""

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
    """The costs of a model on a machine for steps of `batch` samples, by the rows that a rank has
    of a microbatch: `graph_of` makes the Graph of so many, whose atoms are the same for all, and
    `run` is what comes with any operations (None: nothing).

    Ranks of a stage are neighbours, and stages follow each other.  A border that lies anywhere on
    several nodes is as slow as a link between nodes.
    """

    def __init__(
        self,
        graph_of: Callable[[int], Graph],
        machine: Machine,
        batch: int,
        run: RunCosts | None = None,
    ) -> None:
        self.graph, self.machine, self.batch = cache(graph_of), machine, batch
        self.run = run or RunCosts()
        self._chains: dict[int, Chain] = {}
        self._parts: dict[tuple[int, int, int], PartNumbers] = {}

    @property
    def count(self) -> int:
        """The number of atoms."""
        return len(self.graph(1))

    def reordered(self, order: list[int]) -> ModelCosts:
        """The same along another chain of the atoms, which keeps to their order."""

        def graph_of(rows):
            return self.graph(rows).ordered(order)

        return ModelCosts(graph_of, self.machine, self.batch, self.run)

    def rows(self, microbatches: int, replicas: int) -> int:
        """Samples of a microbatch on the rank with most."""
        microbatch = -(-self.batch // microbatches)
        return -(-microbatch // replicas)

    def chain(self, rows: int) -> Chain:
        """The sums along its atoms, and the bytes that cross between them."""
        if rows not in self._chains:
            self._chains[rows] = Chain(self.graph(rows))
        return self._chains[rows]

    def part(self, rows: int, before: int, after: int) -> PartNumbers:
        """Of the atoms between two places of the chain."""
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
        """Seconds in which a stage hands on a microbatch, `nbytes` on the rank with most."""
        if not nbytes:
            return 0.0
        ends = min(senders[0], receivers[0]), max(senders[-1], receivers[-1])
        again = _peers(len(senders), len(receivers)) - 1
        call = self.machine.call
        return again * call("send", 0, ends) + call("send", nbytes, ends)

    def summed(self, nbytes: float, ranks: range | tuple[int, ...]) -> float:
        """Seconds of the sum of so many bytes over ranks, of which each receives what it lacks
        twice: of the parts and of the sums."""
        if not nbytes or len(ranks) == 1:
            return 0.0
        return self.machine.call("all_reduce", 2 * (1 - 1 / len(ranks)) * nbytes, ranks)


def _peers(one, other):
    """With how many ranks of the other stage a rank shares rows, at most."""
    few, many = sorted((one, other))
    return max(-(-(each + 1) * many // few) - each * many // few for each in range(few))


def evaluated(costs: ModelCosts, choice: PipelineChoice, memory: float | None = None) -> Evaluated:
    """The step of an arrangement, and whether it fits `memory` bytes of a rank (None: any).

    ValueError for one that cannot be run: its parts, replicas or microbatches do not go together.
    """
    _refuse(costs, choice)
    clock = _clock(choice)
    parts = [*_parts(costs, choice)]
    again = [stage.recompute * part.forward for stage, part in zip(choice.stages, parts)]
    sent, messages = _borders(costs, choice)
    ends = clock.ends(
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
        in_flight=tuple(clock.most_in_flight),
        held=held,
        fits=max(held) <= (inf if memory is None else memory),
    )


def bytes_held(costs: ModelCosts, choice: PipelineChoice) -> tuple[float, ...]:
    """Of a rank of every pipeline stage, at most."""
    return tuple(_held(costs, choice, [*_parts(costs, choice)], _clock(choice).peaks))


def busiest(costs: ModelCosts, choice: PipelineChoice) -> float:
    """Seconds that the busiest stage computes in a step, which takes longer than that."""
    work = [
        part.backward + (1 + stage.recompute) * part.forward
        for stage, part in zip(choice.stages, _parts(costs, choice))
    ]
    width = choice.width
    return choice.microbatches * max(sum(work[stage::width]) for stage in range(width))


def _refuse(costs: ModelCosts, choice: PipelineChoice) -> None:
    """ValueError for an arrangement that cannot be run."""
    stages, micros, width = choice.stages, choice.microbatches, choice.width
    ends = [0, *(stage.end for stage in stages)]
    if any(after <= before for before, after in pairwise(ends)) or ends[-1] != costs.count:
        raise ValueError(
            f"stages end at {ends[1:]}: every one must have an atom, and the last end at "
            f"{costs.count}; use fewer stages"
        )
    if len(stages) % choice.chunks:
        raise ValueError(f"{len(stages)} parts are not {choice.chunks} of every stage")
    unequal = (stage.replicas != stages[n % width].replicas for n, stage in enumerate(stages))
    if any(unequal):
        raise ValueError("parts of one pipeline stage run on the same replicas")
    if not 1 <= micros <= costs.batch:
        samples = counted(costs.batch, "sample")
        raise ValueError(f"{micros} microbatches cannot share {samples}: use --batch")
    most = max(choice.replicas)
    if most > costs.rows(micros, 1):
        raise ValueError(
            f"{most} replicas cannot share the {costs.rows(micros, 1)} samples of a microbatch: "
            "use fewer replicas or microbatches"
        )


def _clock(choice):
    """Of one stage forward and backward follow each other."""
    name = ONE_STAGE if len(choice.stages) == 1 else choice.schedule
    return step_model(name, choice.width, choice.microbatches, choice.chunks)


def _parts(costs, choice):
    starts = (0, *(stage.end for stage in choice.stages))
    for before, stage in zip(starts, choice.stages):
        rows = costs.rows(choice.microbatches, stage.replicas)
        yield costs.part(rows, before, stage.end)


def _places_of(replicas: tuple[int, ...]) -> list[range]:
    """The ranks of every stage, one stage after the other."""
    return [range(last - count, last) for last, count in zip(accumulate(replicas), replicas)]


def _borders(costs, choice):
    """Bytes and seconds of a microbatch over every border."""
    places, sent, seconds = _places_of(choice.replicas), [], []
    for part, stage in enumerate(choice.stages[:-1]):
        here, there = (places[number % choice.width] for number in (part, part + 1))
        rows = costs.rows(choice.microbatches, min(len(here), len(there)))
        sent.append(float(costs.chain(rows).crossing[stage.end]))
        seconds.append(costs.message(sent[-1], here, there))
    return tuple(sent), tuple(seconds)


def _with_sums(costs, choice, parts, ends):
    """Seconds of the step, and those of every stage for its sums of gradients.

    A weight on several stages is summed once over all their ranks, when the last of them is done.
    The norm of the gradient needs all sums, and the update needs the norm.
    """
    places, owned = _places_of(choice.replicas), [*_owners(costs, choice)]
    tied = [(sorted(owners), shared.parameters) for shared, owners in owned if len(owners) > 1]
    sums = []
    for stage, ranks in enumerate(places):
        alone = _stage_sum("trained", choice, parts, owned, stage)
        alone -= sum(nbytes for owners, nbytes in tied if stage in owners)
        sums.append(costs.summed(alone, ranks))
    ends = [end + seconds for end, seconds in zip(ends, sums)]
    for owners, nbytes in tied:
        ranks = tuple(rank for owner in owners for rank in places[owner])
        seconds, start = costs.summed(nbytes, ranks), max(ends[owner] for owner in owners)
        for owner in owners:
            ends[owner] = start + seconds
            sums[owner] += seconds
    update = max(costs.run.update * nbytes for nbytes in _updated(costs, choice, parts, owned))
    return float(max(ends)) + update + costs.run.step, tuple(sums)


def _updated(costs, choice, parts, owned):
    """Bytes of the parameters that a rank of every stage updates."""
    for stage, replicas in enumerate(choice.replicas):
        trained = _stage_sum("trained", choice, parts, owned, stage)
        yield trained / replicas if choice.zero else trained


def _owners(costs, choice):
    """Every weight that several atoms share, and by stage how many of its parts have it."""
    ends = [stage.end for stage in choice.stages]
    for shared in costs.graph(1).shared:
        parts = {bisect_right(ends, atom) for atom in shared.atoms}
        yield shared, Counter(part % choice.width for part in parts)


_OF_SHARED = {"fixed": "memory", "trained": "parameters", "fed": "fed"}


def _stage_sum(name, choice, parts, owned, stage):
    """Bytes of all parts of a stage, in which what they share counts once."""
    found = sum(getattr(part, name) for part in parts[stage :: choice.width])
    for shared, owners in owned:
        found -= max(0, owners[stage] - 1) * getattr(shared, _OF_SHARED[name])
    return found


def _held(costs, choice, parts, peaks):
    """By stage the bytes of a rank, with what is in flight at the FullMoments `peaks`."""
    owned = [*_owners(costs, choice)]
    for stage, (replicas, moments) in enumerate(zip(choice.replicas, peaks)):
        fixed, trained, fed = (
            _stage_sum(name, choice, parts, owned, stage) for name in ("fixed", "trained", "fed")
        )
        shared = MOMENTS * trained * (1 - 1 / replicas) if choice.zero else 0.0
        inputs = fed * choice.microbatches * costs.rows(choice.microbatches, replicas)
        mine = [(choice.stages[n], parts[n]) for n in range(stage, len(parts), choice.width)]
        yield fixed - shared + inputs + _kept(mine, moments)


def _kept(mine, moments):
    """Bytes that come and go with the microbatches of a stage's parts."""
    kept = [part.received + (not choice.recompute) * part.saved for choice, part in mine]
    gradient = max(part.received for _, part in mine)
    most = max(
        sum(count * each for count, each in zip(counts, kept)) + sending * gradient
        for counts, sending in moments
    )
    again = max(choice.recompute * (part.saved + part.sent) for choice, part in mine)
    return most + again + max(part.working for _, part in mine)
