"""Pipeline program of a run: the schedule in its input file, lowered to instruction groups."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise, repeat
from typing import Any, NamedTuple

from hpc3d.pipeline.forward_only import forward_only
from hpc3d.pipeline.instruction import Instruction, Placement
from hpc3d.pipeline.passes import Group, check, lower
from hpc3d.pipeline.schedule import find, instruction_streams
from hpc3d.pipeline.weight_versions import InPlace

STEP = (Instruction("Step"),)


class Program(NamedTuple):
    """Instruction groups of every stage, and the placement of the model chunks.

    `stages` contains the groups of one training step if the schedule is synchronous, and of all
    training steps if it is asynchronous.  At the end of a step of an asynchronous schedule,
    microbatches of up to `ahead` later steps are in flight.  `updates` is the number of optimizer
    updates per training step, and 0 for an evaluation.  `alone` is true if each microbatch is a
    minibatch with its own optimizer update.  `weights` is the class that manages weight versions.
    """

    stages: list | dict
    placement: Placement
    asynchronous: bool
    ahead: int
    alone: bool
    updates: int
    weights: type

    def of(self, stage: int) -> Program:
        """Return a copy of this program with only the groups of `stage`."""
        return self._replace(stages={stage: self.stages[stage]})

    @property
    def training(self) -> bool:
        """True if the program has backward passes."""
        return self.updates > 0

    def with_few(self, stage: int, micros: Collection[int]) -> list[Group]:
        """Return the groups of instructions of a step of `stage` with only these microbatches.

        Gradients are reduced when all passes have ended.
        """
        groups = self.stages[stage]
        passes = (tuple(each for each in group if each.mb in micros) for group in groups)
        rest = ((each,) for group in groups for each in group if each.mb < 0)
        return [*filter(None, passes), *rest]

    def steps(self, stage: int) -> Iterator[Sequence[Group]]:
        """Return an iterator that yields the groups of a stage for one training step at a time."""
        groups = self.stages[stage]
        return cut(groups, self.updates) if self.asynchronous else repeat(groups)


def cut(groups: Sequence[Group], updates: int) -> Iterator[Sequence[Group]]:
    """Split the groups of a whole run into one sequence per training step.

    A training step ends after `updates` Step instructions. Groups after the last Step instruction
    belong to the last training step.
    """
    ends = [count for count, group in enumerate(groups, 1) if group == STEP]
    edges = [0, *ends[updates - 1 : -1 : updates], len(groups)]
    return (groups[start:stop] for start, stop in pairwise(edges))


def program_of(config: Any) -> Program:
    """Return the training program of a run.

    Raises ValueError if the schedule does not support the sizes, or if `check` reports an error.
    """
    parallel, stages = config.parallel, config.mesh.p
    schedule = find(parallel.schedule)
    asynchronous, alone = schedule.asynchronous, schedule.update_per_microbatch
    steps = config.train.steps if asynchronous else 1
    compute, placement = instruction_streams(
        parallel.schedule, stages, parallel.microbatches, parallel.chunks, steps
    )
    ahead = -(-(stages - 1) // parallel.microbatches) if asynchronous else 0
    try:
        lowered = lower(compute, placement, parallel.overlap, parallel.overlap_experts)
        check(lowered, placement, steps * parallel.microbatches)
    except ValueError as error:
        raise ValueError(f"parallel.schedule = {parallel.schedule}: {error}") from None
    updates = parallel.microbatches if alone else 1
    return Program(lowered, placement, asynchronous, ahead, alone, updates, schedule.weights)


def placement_of(config: Any) -> Placement:
    """Return the assignment of model chunks to pipeline stages."""
    parallel = config.parallel
    return Placement(config.mesh.p, parallel.chunks, find(parallel.schedule).v_shaped)


def forward_program_of(config: Any) -> Program:
    """Return the program that evaluates one batch on the mesh of a run.

    The program has forward passes only.  It keeps the schedule's placement of model chunks, and
    each stage uses its newest weights.
    """
    placement, micros = placement_of(config), config.parallel.microbatches
    lowered = lower(forward_only(placement, micros), placement)
    check(lowered, placement, micros, passes="F")
    return Program(lowered, placement, False, 0, False, 0, InPlace)
