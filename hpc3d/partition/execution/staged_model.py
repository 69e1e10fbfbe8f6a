"""A captured module that is cut into stages: what every rank knows of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

from hpc3d.partition.capture import Captured, loss_of
from hpc3d.partition.execution.stage_program import (
    StageProgram,
    graded,
    stage_programs,
)
from hpc3d.partition.execution.tied_weights import Owners, owners_of
from hpc3d.partition.execution.torch_weights import state_of


class StagedModel(NamedTuple):
    """`programs` of all parts in the order of the model, of which part number n is on pipeline
    stage n mod S; `replicas` of the S stages and by part whether it is computed again
    (`recompute`).

    `graded` are the values with a gradient that cross borders, `loss` is the output that is
    minimised, a mean over samples, and `owners` are the stages of each weight.
    """

    captured: Captured
    programs: list[StageProgram]
    replicas: tuple[int, ...]
    recompute: tuple[bool, ...]
    graded: frozenset[fx.Node]
    loss: fx.Node
    owners: Owners

    @property
    def chunks(self) -> int:
        return len(self.programs) // len(self.replicas)

    @property
    def dtype(self) -> str:
        """The type of the parameters."""
        (dtype,) = _types(self.captured)
        return dtype


def staged_model(
    captured: Captured,
    parts: Sequence[Sequence[int]],
    replicas: Sequence[int],
    recompute: Sequence[bool],
    redraw: bool = True,
    split: bool = False,
) -> StagedModel:
    """The StagedModel of a plan; without `redraw` random operations stay torch's own, with `split`
    backward passes leave the gradients of weights for later.

    ValueError for a model that cannot be trained: without a loss, with several types of
    parameters, or with random operations that have no rule.
    """
    if len(types := _types(captured)) != 1 or not types <= {"float32", "float64"}:
        found = ", ".join(sorted(types)) or "none"
        raise ValueError(f"parameters of one type are trained, float32 or float64; found: {found}")
    programs = stage_programs(captured, parts, redraw, split)
    with_gradient = graded(captured, programs)
    loss = loss_of(captured)
    if loss not in with_gradient:
        raise ValueError("the model must return its loss, a number with a gradient")
    if loss not in programs[-1].outputs:
        raise ValueError(
            f"the loss, {loss.name}, must be computed by the last stage: plan it anew"
        )
    width = len(replicas)
    owners = owners_of(
        [name for program in programs[stage::width] for name in program.weights]
        for stage in range(width)
    )
    return StagedModel(
        captured,
        programs,
        tuple(replicas),
        tuple(recompute),
        frozenset(with_gradient),
        loss,
        owners,
    )


def _types(captured):
    """Those of the parameters that are trained, or of all floating-point ones."""
    return {
        str(tensor.dtype).removeprefix("torch.")
        for tensor in state_of(captured).values()
        if tensor.requires_grad
    }
