"""Pipeline schedules: the order of passes on each stage, as a stream of instructions.

A schedule has no messages, reductions or optimizer updates: `hpc3d.pipeline.passes` adds them.  A
B without a W in the stream is the full backward pass.  docs/schedules.md has diagrams of all
schedules.  In the docstrings, p is the number of stages, i the zero-based stage index, m the
number of microbatches per step, v the number of chunks per stage, and t_f and t_b are the times of
a forward and a full backward pass on a stage.  "Bubble" is the idle time of a stage per step if
messages take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from itertools import accumulate, pairwise
from typing import NamedTuple

from hpc3d.console.sanitize import abbreviated, counted
from hpc3d.pipeline.instruction import Instruction, Placement, from_pattern
from hpc3d.pipeline.weight_versions import DoubleBuffered, InPlace, Stashed
from hpc3d.pipeline.zero_bubble import dualpipe_v, v_half, v_min, zb_h1, zb_h2, zb_v

ONE_STAGE, DEFAULT, GPIPE = "none", "1f1b", "gpipe"
PAIRED = "dualpipe-v"  # schedule whose forward and backward passes can overlap in pairs
SEARCH = "search"  # selects a schedule search instead of a known schedule
# Numbers of chunks per stage that layout searches try, if the schedule allows any number.
_CHUNKS = (2, 3, 4, 6, 8)


def none(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """Schedule for a single stage: each microbatch runs its forward and then its backward pass.

    Gradients accumulate over the microbatches (gradient accumulation).  The activations of only
    one microbatch are in flight.
    """
    return from_pattern("FB" * micros)


def gpipe(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """GPipe: all forward passes, then all backward passes from the last microbatch to the first.

    arXiv:1811.06965.  The bubble is (p-1)(t_f + t_b), which is (p-1)/(m+p-1) of the step
    time.  The activations of all m microbatches are in flight.
    """
    yield from (Instruction("F", mb) for mb in range(micros))
    yield from (Instruction("B", mb) for mb in reversed(range(micros)))


def one_f_one_b(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """1F1B: p-1-i warm-up forward passes on stage i, then forward and backward passes alternate.

    The remaining backward passes drain the pipeline.  This schedule is called PipeDream-flush
    in arXiv:2006.09503 and 1F1B in arXiv:2104.04473.  The bubble is (p-1)(t_f + t_b), as for
    GPipe, but the activations of only min(m, p-i) microbatches are in flight.
    """
    warmup = min(stages - 1 - stage, micros)
    return from_pattern("F" * warmup + "FB" * (micros - warmup) + "B" * warmup)


def interleaved(stage: int, stages: int, micros: int, chunks: int) -> Iterator[Instruction]:
    """Interleaved 1F1B with v model chunks per stage.

    arXiv:2104.04473, section 2.2.  Each group of microbatches runs through chunk 0 of all stages,
    then through chunk 1, and so on.  The bubble is (p-1)(t_f + t_b)/v, because each pass that
    fills the pipeline takes 1/v of the pass time of a full stage.  With groups of g microbatches,
    stage i starts with 2(p-1-i) + (v-1)g forward passes of chunks.  The activations of up to
    2p-1 + (v-1)g chunks are in flight, compared with p v under 1F1B.  A group has p microbatches.
    If p does not divide m, there are floor(m/p) groups of nearly equal sizes, with larger groups
    first.
    """
    edges = _group_edges(micros, max(1, micros // stages))
    groups = [range(*edge) for edge in pairwise(edges)]
    ahead = 2 * (stages - 1 - stage) + (chunks - 1) * len(groups[0])
    forward = [(mb, c) for group in groups for c in range(chunks) for mb in group]
    backward = [(mb, chunks - 1 - c) for group in groups for c in range(chunks) for mb in group]
    ahead = min(ahead, len(forward))
    yield from (Instruction("F", *pair) for pair in forward[:ahead])
    for here, back in zip(forward[ahead:], backward):
        yield Instruction("F", *here)
        yield Instruction("B", *back)
    yield from (Instruction("B", *pair) for pair in backward[len(forward) - ahead :])


def _group_edges(micros, groups):
    """Split the microbatches into groups of nearly equal size, with larger groups first.

    Returns an iterator over the group boundaries, from 0 to `micros`.
    """
    size, larger = divmod(micros, groups)
    return accumulate((size + (group < larger) for group in range(groups)), initial=0)


def pipedream(stage: int, stages: int, micros: int, steps: int = 1) -> Iterator[Instruction]:
    """PipeDream: 1F1B over the microbatches of all steps, with an update after each backward pass.

    arXiv:1806.03377.  Each microbatch is a separate minibatch.  The backward pass of a microbatch
    uses the same weights as its forward pass, so stage i stores p-i weight versions and the
    activations of p-i microbatches.  The gradients are computed with weights that are p-1-i
    updates old.  The only bubbles are the fill at the start of the run and the drain at its end.
    """
    return _updated(one_f_one_b(stage, stages, steps * micros), every=1)


def pipedream_2bw(stage: int, stages: int, micros: int, steps: int = 1) -> Iterator[Instruction]:
    """PipeDream-2BW: 1F1B over the microbatches of all steps, updating every m backward passes.

    arXiv:2006.09503.  The gradients of the m microbatches of a step accumulate.  All of these
    gradients are computed with the weights before the last update:
    W(t+1) = W(t) - rate dL(W(t-1)).  If m >= p, every stage therefore stores two weight versions.
    On stage i, the activations of p-i microbatches are in flight.  The only bubbles are at the
    start and the end of the run.
    """
    return _updated(one_f_one_b(stage, stages, steps * micros), every=micros)


def _updated(stream: Iterable[Instruction], every: int) -> Iterator[Instruction]:
    for instruction in stream:
        yield instruction
        if instruction.op == "B" and (instruction.mb + 1) % every == 0:
            yield Instruction("Step")


def _anything(name, stages, micros):
    """Accept all sizes, by returning `None` instead of an error message."""


def _one_stage(name, stages, micros):
    if stages > 1:
        return (
            f"mesh.p = {stages}: schedule {name} supports only one stage; use 1f1b or mesh.p = 1"
        )


def _one_a_stage(name, stages, micros):
    if micros < stages:
        return (
            f"parallel.microbatches = {micros}: schedule {name} needs at least one microbatch per "
            f"stage; use {stages} or more, or mesh.p = {micros}"
        )


class Schedule(NamedTuple):
    """Pipeline schedule and the sizes that it supports.

    `generate(stage, stages, micros)` returns the stream of a stage.  If `chunks` is `None`, any
    number of chunks is allowed, and `generate` takes it as another argument.  If the schedule is
    `asynchronous`, one stream covers all training steps, and `generate` also takes the number of
    steps.  `v_shaped` is as in `Placement`.  `rule(name, stages, micros)` returns an error
    message, or None if the sizes are valid.

    If `splits_backward` is true, the streams contain W.  `weights` is the class that manages
    weight versions.  If `update_per_microbatch` is true, every microbatch is a minibatch with its
    own optimizer update.  If `keeps_all` is true, all forward passes of a step come first, so all
    of its microbatches are in flight.  Stage i defers its W passes by i times `late_weights`
    backward passes.  Model partitioners consider an `on_request` schedule only if the user
    requests it.  A `lean` schedule needs less memory than the other V-shaped schedules, but is
    slower if there is at least one microbatch per stage.
    """

    name: str
    generate: Callable[..., Iterator[Instruction]]
    chunks: int | None = 1
    asynchronous: bool = False
    v_shaped: bool = False
    rule: Callable[[str, int, int], str | None] = _anything
    splits_backward: bool = False
    weights: type[InPlace] = InPlace
    update_per_microbatch: bool = False
    keeps_all: bool = False
    late_weights: int = 0
    on_request: bool = False
    lean: bool = False

    @property
    def search_chunks(self) -> tuple[int, ...]:
        """Numbers of chunks per stage that a layout search tries."""
        return (self.chunks,) if self.chunks else _CHUNKS

    @property
    def undivided(self) -> bool:
        """True if a stage has a single chunk and the backward pass is not split."""
        return self.chunks == 1 and not self.splits_backward

    @property
    def takes_partitions(self) -> bool:
        """True if the schedule supports any assignment of layers to model chunks, provided that
        chunk n is on stage n mod `stages`."""
        several = not self.forbids(2, 2, self.chunks or 2)
        return several and not self.asynchronous and not self.v_shaped

    def forbids(self, stages: int, micros: int, chunks: int) -> str | None:
        """Return `None` if the schedule supports these sizes, or else an error message with the
        key and a valid value."""
        sizes = {"mesh.p": stages, "parallel.microbatches": micros, "parallel.chunks": chunks}
        for key, size in sizes.items():
            if size < 1:
                return f"{key} = {size}: must be at least 1"
        if self.chunks and chunks != self.chunks:
            requires = f"schedule {self.name} requires {counted(self.chunks, 'chunk')} per stage"
            return f"parallel.chunks = {chunks}: {requires}; use {self.chunks}"
        return self.rule(self.name, stages, micros)

    def stream(
        self, stage: int, placement: Placement, micros: int, steps: int
    ) -> list[Instruction]:
        """Return the instruction stream of a stage as a list."""
        extra = [steps] if self.asynchronous else [placement.chunks] if not self.chunks else []
        return list(self.generate(stage, placement.stages, micros, *extra))


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule(ONE_STAGE, none, rule=_one_stage),
        Schedule(GPIPE, gpipe, keeps_all=True),
        Schedule(DEFAULT, one_f_one_b),
        Schedule("interleaved", interleaved, chunks=None, rule=_one_a_stage),
        Schedule("zb-h1", zb_h1, splits_backward=True, late_weights=1),
        Schedule("zb-h2", zb_h2, splits_backward=True, late_weights=2, on_request=True),
        Schedule("zb-v", zb_v, chunks=2, v_shaped=True, splits_backward=True),
        Schedule("v-half", v_half, chunks=2, v_shaped=True, splits_backward=True, lean=True),
        Schedule("v-min", v_min, chunks=2, v_shaped=True, splits_backward=True, lean=True),
        Schedule(PAIRED, dualpipe_v, chunks=2, v_shaped=True, splits_backward=True),
        Schedule(
            "pipedream", pipedream, asynchronous=True, weights=Stashed, update_per_microbatch=True
        ),
        Schedule(
            "pipedream-2bw",
            pipedream_2bw,
            asynchronous=True,
            rule=_one_a_stage,
            weights=DoubleBuffered,
        ),
    )
}

_OF_PARTITIONS = (each for each in SCHEDULES.values() if each.takes_partitions)
FOR_PARTITIONS = sorted(_OF_PARTITIONS, key=lambda each: each.name != DEFAULT)


def usual(stages: int) -> str:
    """Return the name of the default schedule for a number of stages."""
    return ONE_STAGE if stages == 1 else DEFAULT


def find(name: str) -> Schedule:
    """Return the schedule called `name`, or read it from FILE if `name` is csv:FILE.

    Raises ValueError if the name is unknown or the file is invalid.
    """
    from hpc3d.pipeline.csv_schedule import from_csv

    if name.startswith("csv:"):
        try:
            return _from_table(name, from_csv(name.removeprefix("csv:")))
        except ValueError as error:
            raise ValueError(f"parallel.schedule = {name}: {error}") from None
    if name not in SCHEDULES:
        near = get_close_matches(name, SCHEDULES, 1)
        hint = f"did you mean {near[0]}? Use" if near else "unknown schedule; use"
        given, known = abbreviated(repr(name)), ", ".join(SCHEDULES)
        raise ValueError(f"parallel.schedule = {given}: {hint} one of {known}, or csv:FILE")
    return SCHEDULES[name]


def _from_table(name, table):
    """Convert a schedule table from a file to a Schedule, which supports only the table's
    sizes."""

    def rule(name, stages, micros):
        if stages != table.placement.stages:
            return f"mesh.p = {stages}: must be {table.placement.stages}, as in {name}"
        if micros != table.micros:
            return f"parallel.microbatches = {micros}: must be {table.micros}, as in {name}"

    def generate(stage, stages, micros):
        return iter(table.streams[stage])

    return Schedule(
        name,
        generate,
        table.placement.chunks,
        v_shaped=table.placement.v_shaped,
        rule=rule,
        splits_backward=any(each.op == "W" for stream in table.streams for each in stream),
    )


def instruction_streams(
    name: str, stages: int, micros: int, chunks: int = 1, steps: int = 1
) -> tuple[list[list[Instruction]], Placement]:
    """Return the instruction stream of each stage, and the placement of the model chunks.

    The streams of a synchronous schedule cover one step, which a run repeats.  The streams of an
    asynchronous schedule cover `steps` steps, with consecutive microbatch numbers.  Raises
    ValueError for unsupported sizes.
    """
    schedule = find(name)
    problem = schedule.forbids(stages, micros, chunks)
    if steps < 1:
        problem = f"train.steps = {steps}: must be at least 1"
    elif steps > 1 and not schedule.asynchronous:
        problem = f"train.steps = {steps}: all steps of schedule {name} are identical; use 1"
    if problem:
        raise ValueError(problem)
    placement = Placement(stages, chunks, schedule.v_shaped)
    return [schedule.stream(stage, placement, micros, steps) for stage in range(stages)], placement
