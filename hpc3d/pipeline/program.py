"""What the stages of a run execute: the schedule of its input file, lowered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.pipeline.forward_only import forward_only
from hpc3d.pipeline.instruction import Instruction, Placement
from hpc3d.pipeline.passes import check, lower
from hpc3d.pipeline.schedule import find, instruction_streams
from hpc3d.pipeline.weight_versions import InPlace

if TYPE_CHECKING:
    from hpc3d.pipeline.passes import Group

STEP = (Instruction("Step"),)


class Program(NamedTuple):
    """The groups of instructions of every stage, and where the parts of the model lie.

    They are those of one training step, or under an asynchronous schedule those of all steps,
    where microbatches of up to `ahead` steps more are in flight before a step is over.  A training
    step has so many `updates`, and what only evaluates has none; where microbatches are `alone`,
    each is a minibatch with an update of its own.  `weights` are what the schedule does with older
    ones.
    """

    stages: list | dict
    placement: Placement
    asynchronous: bool
    ahead: int
    alone: bool
    updates: int
    weights: type

    def of(self, stage: int) -> Program:
        """The program without the groups of other stages."""
        return self._replace(stages={stage: self.stages[stage]})

    @property
    def training(self) -> bool:
        """Whether there are backward passes."""
        return self.updates > 0

    def steps(self, stage: int) -> Iterator[Sequence[Group]]:
        """The groups of a stage, training step by training step."""
        groups = self.stages[stage]
        return cut(groups, self.updates) if self.asynchronous else repeat(groups)


def cut(groups: Sequence[Group], updates: int) -> Iterator[Sequence[Group]]:
    """Groups cut after every `updates`-th Step; those after the last one belong to it."""
    ends = [place for place, group in enumerate(groups, 1) if group == STEP]
    edges = [0, *ends[updates - 1 : -1 : updates], len(groups)]
    return (groups[start:stop] for start, stop in pairwise(edges))


def program_of(config: Any) -> Program:
    """The program of a run; ValueError for what the schedule forbids or `check` finds."""
    parallel, stages = config.parallel, config.mesh.p
    schedule = find(parallel.schedule)
    asynchronous, alone = schedule.asynchronous, schedule.update_per_microbatch
    steps = config.train.steps if asynchronous else 1
    compute, placement = instruction_streams(
        parallel.schedule, stages, parallel.microbatches, parallel.chunks, steps
    )
    ahead = -(-(stages - 1) // parallel.microbatches) if asynchronous else 0
    try:
        lowered = lower(compute, placement, parallel.overlap)
        check(lowered, placement, steps * parallel.microbatches)
    except ValueError as error:
        raise ValueError(f"parallel.schedule = {parallel.schedule}: {error}") from None
    updates = parallel.microbatches if alone else 1
    return Program(lowered, placement, asynchronous, ahead, alone, updates, schedule.weights)


def forward_program_of(config: Any) -> Program:
    """The program that evaluates a batch of a run on its mesh: forward passes alone, through the
    parts of the model where its schedule has them, with the newest weights of each stage."""
    parallel = config.parallel
    schedule, micros = find(parallel.schedule), parallel.microbatches
    placement = Placement(config.mesh.p, parallel.chunks, schedule.v_shaped)
    lowered = lower(forward_only(placement, micros), placement)
    check(lowered, placement, micros, passes="F")
    return Program(lowered, placement, False, 0, False, 0, InPlace)
