"""Planner for the pipeline arrangement of a captured module on a machine.

The planner jointly chooses the stages, their replicas and recomputation, the number of
microbatches, and the schedule. hpc3d.partition.joint_search proposes candidates,
hpc3d.partition.evaluation simulates them, and hpc3d.partition.improvement improves the best few.
If the graph has few downsets, the planner also searches all of them for the best partition with
the same number of replicas on every stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from hpc3d.console.sanitize import counted
from hpc3d.partition.atom_graph import bits
from hpc3d.partition.coarse_chain import border_of, sums_of
from hpc3d.partition.downsets import Downsets, cuts_of
from hpc3d.partition.evaluation import (
    Evaluated,
    Limits,
    ModelCosts,
    PipelineChoice,
    StageChoice,
    as_size,
    busiest,
    bytes_held,
    evaluated,
)
from hpc3d.partition.improvement import improved, next_best
from hpc3d.partition.joint_search import Allowed, JointSearch, fastest, lightest
from hpc3d.pipeline.schedule import DEFAULT, FOR_PARTITIONS, find

_MOST_MICROBATCHES = 128  # largest number of microbatches tried
_LOOKED_AT = 250  # maximum number of simulated arrangements with one chunk per stage
_AT_LEAST, _IMPROVED = 4, 8  # minimum and maximum number of arrangements to improve
_FAR = 1.1  # maximum time of a candidate's busiest stage, relative to the best step time
_SCHEDULES = tuple(each.name for each in FOR_PARTITIONS if not each.on_request)
_RECOMPUTE = {"none": (False,), "full": (True,), "stage": (False, True)}
_MOST_DOWNSETS, _FEW_PASSES = 1_000, 100_000  # limits of the search over all downsets
_MOST_LAID_OUT = 2**14  # maximum number of stages * microbatches in a simulated schedule
_CLOSE = 1e-3  # relative accuracy of the memory reported in an error message


class Wanted(NamedTuple):
    """Requirements for a plan.

    `ranks` is the number of ranks. `memory` is the memory of a rank in bytes (None: value of the
    machine description); the fraction `margin` is left free. `replicas` contains one number for
    all stages or one number per stage. If `replicas`, `microbatches` or `schedule` is `None`, the
    planner searches for the best value; `schedules` lists the candidate schedules. `recompute` is
    "none", "full", or "stage" (searched for each stage). If `zero` is 1, replicas shard the
    optimizer moments.
    """

    ranks: int
    memory: float | None = None
    replicas: tuple[int, ...] | None = None
    microbatches: int | None = None
    schedule: str | None = None
    recompute: str = "stage"
    objective: str = "time"
    margin: float = 0.1
    zero: int = 0
    schedules: tuple[str, ...] = _SCHEDULES


class ModuleBorder(NamedTuple):
    """Boundary between two model chunks.

    `nbytes` is the number of bytes that the busiest rank sends per microbatch. `behind` is the id
    of the last operation before the boundary. `instead` is the id of the last operation before the
    best alternative location nearby, and `next_best` is the step time in seconds if only this
    boundary moves there. Both are `None` if no nearby location fits in memory. `room` is False if
    a nearby location would shorten the step, but does not fit in memory.
    """

    nbytes: float
    behind: str
    next_best: float | None
    instead: str | None
    room: bool


class ModulePlan(NamedTuple):
    """Planned arrangement `choice`, with its predicted `step`.

    `borders` describes the boundaries between chunks, and `memory` is the memory limit in bytes
    per rank. The chunks of `choice` end at atoms of the chain in `costs`.
    """

    choice: PipelineChoice
    step: Evaluated
    borders: list[ModuleBorder]
    costs: ModelCosts
    memory: float
    objective: str

    @property
    def offload(self) -> list[str]:
        """Data that the plan offloads, as in `parallel.offload`."""
        return [] if self.costs.states else ["optimizer"]

    @property
    def ids(self) -> list[list[str]]:
        """Ids of the operations in each model chunk, in model order."""
        return self._of_parts("ids")

    @property
    def pieces(self) -> list[list[int]]:
        """Indices of the captured module's pieces in each model chunk; chunks are in model order.

        Chunk n is on stage n mod S of S pipeline stages.
        """
        return [sorted(pieces) for pieces in self._of_parts("pieces")]

    @property
    def load(self) -> float:
        """Load of the heaviest stage in seconds per microbatch, including its messages."""
        parts = zip(self.step.forward, self.step.backward, strict=True)
        messages = (0.0, *self.step.messages, 0.0)
        loads = [sum(each) + sum(messages[part : part + 2]) for part, each in enumerate(parts)]
        width = self.choice.width
        return max(sum(loads[stage::width]) for stage in range(width))

    def _of_parts(self, name):
        starts = (0, *(stage.end for stage in self.choice.stages))
        atoms = self.costs.graph(1).atoms
        return [
            [each for atom in atoms[before : stage.end] for each in getattr(atom, name)]
            for before, stage in zip(starts, self.choice.stages)
        ]


def best_plan(costs: ModelCosts, wanted: Wanted) -> ModulePlan:
    """Return the best plan found by the search for the objective in `wanted`.

    Raises ValueError if the request is inconsistent, or if no partition fits in the memory of a
    rank; the message reports how much memory would suffice.
    """
    if not costs.count:
        raise ValueError(
            "no output of the model depends on its inputs; check what the module returns"
        )
    memory = (1 - wanted.margin) * (wanted.memory or costs.machine.memory_gb * 1e9)
    allowed = _allowed(costs, wanted, memory)
    _refuse_few(costs, wanted, allowed)
    if wanted.objective == "load":
        found = [*_lightest(costs, allowed)]
    else:
        found = [*_quickest(costs, allowed)]
    if not found:
        raise ValueError(_nothing_fits(costs, allowed, wanted))
    costs, choice, step = min(found, key=lambda each: each[2].seconds)
    borders = [*_borders(costs, choice, step, memory)]
    return ModulePlan(choice, step, borders, costs, memory, wanted.objective)


def _allowed(costs, wanted, memory):
    stages = min(wanted.ranks, costs.count)
    if wanted.microbatches and stages * wanted.microbatches > _MOST_LAID_OUT:
        raise ValueError(
            f"--microbatches {wanted.microbatches}: must be at most {_MOST_LAID_OUT // stages} "
            f"with up to {counted(stages, 'stage')}; use fewer microbatches or ranks"
        )
    rows = max(wanted.replicas or (1,))
    counts = [2**power for power in range(_MOST_MICROBATCHES.bit_length())]
    counts = [wanted.microbatches] if wanted.microbatches else counts
    micros = tuple(
        count for count in counts if count <= costs.batch and rows <= costs.rows(count, 1)
    )
    if not micros:
        shares = [f"{rows} replicas"] if rows > 1 else []
        shares += [f"{wanted.microbatches} microbatches"] if wanted.microbatches else []
        samples = counted(costs.batch, "sample")
        raise ValueError(
            f"a batch of {samples} is too small for {' of '.join(shares)}; use a larger --batch"
        )
    return Allowed(
        wanted.ranks,
        memory,
        micros,
        (wanted.schedule,) if wanted.schedule else wanted.schedules,
        wanted.replicas,
        _RECOMPUTE[wanted.recompute],
        wanted.zero,
    )


def _refuse_few(costs, wanted, allowed):
    given = wanted.replicas or ()
    used = sum(given) if given[1:] else max((1, *given))
    if used > wanted.ranks:
        raise ValueError(
            f"--replicas {','.join(map(str, given))} requires {counted(used, 'rank')}, but "
            f"--ranks is {wanted.ranks}; use fewer replicas or more ranks"
        )
    stages = allowed.stages if given else 1
    if costs.count < stages:
        raise ValueError(
            f"the model has only {counted(costs.count, 'piece')}, too few for a pipeline of "
            f"{stages} stages (only values with the batch in dimension 0 can be sent between "
            "pieces); use --replicas or fewer ranks"
        )


def _quickest(costs, allowed):
    """Improve the best simulated arrangements; yield (costs, arrangement, predicted Step)."""
    search = JointSearch(costs, allowed)
    found = search.found()
    several = [each for each in found if each.chunks > 1]
    found = [each for each in found if each.chunks == 1][:_LOOKED_AT] + several
    found = _sorted_on_the_clock(costs, found)
    # Local search does not change the schedule or the number of stages, so the best arrangement
    # of each combination is improved.
    kinds = {(each.schedule, each.width): each for each in reversed(found)}
    best = sorted(kinds.values(), key=found.index)[:_IMPROVED]
    best += [each for each in found if each not in best][: max(0, _AT_LEAST - len(best))]
    chains = [(costs, each) for each in best]
    chains += [*_over_downsets(costs, allowed, best)]
    for chain, choice in chains:
        yield chain, *improved(chain, choice, allowed, search.positions)


def _sorted_on_the_clock(costs, choices):
    """Return the arrangements, sorted by simulated step time.

    Arrangements are omitted if the compute time of their busiest stage alone is far above the best
    step time.
    """
    seconds, best = {}, inf
    for choice in sorted(choices, key=lambda each: busiest(costs, each)):
        if busiest(costs, choice) > _FAR * best:
            break
        seconds[choice] = evaluated(costs, choice).seconds
        best = min(best, seconds[choice])
    return sorted(seconds, key=seconds.__getitem__)


def _over_downsets(costs, allowed, choices) -> Iterator[tuple[ModelCosts, PipelineChoice]]:
    """Yield the fastest partition over all downsets, if the graph has branches and few downsets.

    The numbers of replicas and microbatches are taken from the best arrangement in `choices` with
    the same number of replicas on all stages.
    """
    alike = [each for each in choices if len({*each.replicas}) == 1 and each.chunks == 1]
    downsets = costs.graph(1).downsets(_MOST_DOWNSETS)
    names = [name for name in allowed.schedules if find(name).undivided]
    plain = False in allowed.recompute and (allowed.replicas or (1,))[1:] == ()
    if not (alike and names and plain) or not downsets or len(downsets) == costs.count + 1:
        return
    micros, replicas = alike[0].microbatches, alike[0].replicas[0]
    cuts = Downsets(costs.graph(costs.rows(micros, replicas)), downsets)
    limits = _limits(costs, allowed, replicas, micros)
    found = fastest(cuts, limits, tuple(names), _FEW_PASSES)
    if found:
        name = found.schedule if len(found.ends) > 1 else DEFAULT
        chain, stages = _along(costs, cuts, found.ends, replicas)
        choice = PipelineChoice(stages, micros, name, 1, allowed.zero)
        if max(bytes_held(chain, choice)) <= allowed.memory:
            yield chain, choice


def _limits(costs, allowed, replicas, micros):
    border = border_of(costs, allowed.ranks)
    return Limits(
        allowed.ranks // replicas,
        allowed.memory,
        border.bandwidth,
        micros,
        latency=border.latency,
        sums=sums_of(costs, replicas) if replicas > 1 else None,
        keeps_received=True,
    )


def _along(costs, cuts, ends, replicas):
    """Reorder the atoms so that each stage is contiguous; return the new costs and the stages."""
    if not cuts.exact:
        return costs, tuple(StageChoice(int(end), replicas) for end in ends)
    stages = [[*bits(cuts.stage(*cut))] for cut in pairwise((0, *ends))]
    ends = accumulate(map(len, stages))
    chain = costs.reordered([atom for atoms in stages for atom in atoms])
    return chain, tuple(StageChoice(end, replicas) for end in ends)


def _lightest(costs, allowed):
    """Minimize the maximum stage load; yield (costs, arrangement, predicted step).

    The arrangement has the smallest allowed numbers of microbatches and replicas. Nothing is
    yielded if no such arrangement fits in memory.
    """
    micros, replicas = allowed.microbatches[0], (allowed.replicas or (1,))[0]
    cuts = cuts_of(costs.graph(costs.rows(micros, replicas)))
    limits = _limits(costs, allowed, replicas, micros)
    name = allowed.schedules[0]
    ends = lightest(cuts, limits._replace(sums=None, all_in_flight=find(name).keeps_all))
    if ends:
        chain, stages = _along(costs, cuts, ends, replicas)
        choice = PipelineChoice(stages, micros, name, 1, allowed.zero)
        step = evaluated(chain, choice, allowed.memory)
        if step.fits:
            yield chain, choice, step


def _borders(costs, choice, step, memory):
    atoms = costs.graph(1).atoms
    for border, nbytes in enumerate(step.sent):
        other, seconds, tight = next_best(costs, choice, step, border, memory)
        instead = other and atoms[other.stages[border].end - 1].ids[-1]
        behind = atoms[choice.stages[border].end - 1].ids[-1]
        yield ModuleBorder(nbytes, behind, seconds, instead, not tight)


def _nothing_fits(costs, allowed, wanted):
    """Return the error message for a model that does not fit, with the memory that it needs."""
    if not JointSearch(costs, allowed._replace(memory=inf)).fits():
        return (
            f"--schedule {wanted.schedule} does not support the requested stages and "
            "microbatches; use more --microbatches, fewer --replicas, or another --schedule"
        )
    low, high = allowed.memory, 2 * allowed.memory
    while not JointSearch(costs, allowed._replace(memory=high)).fits():
        low, high = high, 2 * high
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        fits = JointSearch(costs, allowed._replace(memory=middle)).fits()
        low, high = (low, middle) if fits else (middle, high)
    enough = high / (1 - wanted.margin)
    others = ["more ranks"] + ["--zero 1"] * (not wanted.zero)
    others += ["--offload optimizer"] * bool(costs.states)
    others += ["--recompute stage"] * (wanted.recompute == "none")
    return (
        f"no partition over {counted(wanted.ranks, 'rank')} fits in {allowed.memory:.6g} bytes "
        f"per rank ({wanted.margin:.0%} is left free); at least {high:.6g} bytes are needed; use "
        f"--memory {as_size(enough)}, {', '.join(others[:-1])} or {others[-1]}"
    )
