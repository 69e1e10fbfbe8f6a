"""Partition a captured module into stages. All ranks compute the same partition."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from hpc3d.config.limits import TRAINED_TYPES
from hpc3d.partition.capture import Captured, loss_of, state_of
from hpc3d.partition.execution.stage_program import (
    StageProgram,
    graded,
    stage_programs,
)
from hpc3d.partition.tensor_parallel.shards import SplitDim

_HAS_GRADIENT_TYPE = hasattr(torch.Tensor, "grad_dtype")
Owners = dict[str, tuple[int, ...]]  # maps a weight name to the stages that hold a copy


class StagedModel(NamedTuple):
    """Model that is partitioned into chunks, which are assigned to pipeline stages.

    `programs` contains the programs of all model chunks in model order; chunk n is on pipeline
    stage n mod S. `replicas` has one number for each of the S stages, and `recompute` is True for
    each chunk with recomputation. `graded` contains the sent values and outputs that have a
    gradient. `loss` is the output to minimize, a mean over samples. `owners` maps each weight
    name to the stages that hold the weight.
    """

    captured: Captured
    programs: list[StageProgram]
    replicas: tuple[int, ...]
    recompute: tuple[bool, ...]
    graded: frozenset[fx.Node]
    loss: fx.Node
    owners: Owners

    @property
    def ways(self) -> int:
        """Number of tensor-parallel ranks of each replica."""
        sharding = self.programs[0].sharding
        return sharding.ways if sharding else 1

    @property
    def splits(self) -> Mapping[str, SplitDim]:
        """Placements of the weights that are split over tensor-parallel ranks."""
        sharding = self.programs[0].sharding
        return sharding.weights if sharding else {}

    @property
    def dtype(self) -> str:
        """Data type of the parameters."""
        (dtype,) = _types(self.captured)
        return dtype


def staged_model(
    captured: Captured,
    parts: Sequence[Sequence[int]],
    replicas: Sequence[int],
    recompute: Sequence[bool],
    redraw: bool = True,
    split: bool = False,
    ways: int = 1,
) -> StagedModel:
    """Partition a captured module into model chunks, as specified by a plan.

    If `redraw` is True, random operations such as dropout draw the same numbers on every layout;
    if it is False, they use torch's generator. If `split` is True, backward passes defer the
    weight gradients. Each replica of a stage consists of `ways` tensor-parallel ranks. Raises
    ValueError if the model has no loss, parameters of several dtypes, or unsupported random
    operations.
    """
    check_types(captured)
    programs = stage_programs(captured, parts, redraw, split)
    with_gradient = graded(captured, programs)
    if ways > 1:
        programs = stage_programs(captured, parts, redraw, split, ways)
    loss = loss_of(captured)
    if loss is None:
        raise ValueError(captured.loss.text)
    assert loss in with_gradient, loss
    if loss not in programs[-1].outputs:
        raise ValueError(
            f"the loss, {loss.name}, must be computed by the last stage; make a new plan"
        )
    width = len(replicas)
    owners = owners_of(
        _weights(captured, programs[stage::width], parts[stage::width]) for stage in range(width)
    )
    layout = tuple(replicas), tuple(recompute)
    return StagedModel(captured, programs, *layout, frozenset(with_gradient), loss, owners)


def _weights(captured, programs, parts):
    """Return the names of the weights that a stage reads, and of those that no stage reads."""
    read = [name for program in programs for name in program.weights]
    held = [name for part in parts for piece in part for name in captured.pieces[piece].weights]
    return [*read, *held]


def check_types(captured: Captured, trained: bool = True) -> str:
    """Return the data type of the trained parameters, or "" if there are none.

    Raises ValueError unless all of them have the same type, one of TRAINED_TYPES. If `trained` is
    true, there must be such parameters, and 16-bit parameters require a version of torch that
    accumulates gradients in float32.
    """
    types = _types(captured)
    if (types or trained) and (len(types) != 1 or not {*types} <= {*TRAINED_TYPES}):
        found = ", ".join(f"{dtype} ({name})" for dtype, name in sorted(types.items())) or "none"
        raise ValueError(
            "all trained parameters must have the same data type, "
            f"{', '.join(TRAINED_TYPES[:-1])} or {TRAINED_TYPES[-1]}; found: {found}; make the "
            f"plan with --dtype {TRAINED_TYPES[1]} or another type"
        )
    if trained:
        _refuse_16_bits(*types)
    return next(iter(types), "")


def _refuse_16_bits(dtype: str) -> None:
    """Raise ValueError if this version of torch cannot accumulate the gradients in float32."""
    if getattr(torch, dtype).itemsize == 2 and not _HAS_GRADIENT_TYPE:
        raise ValueError(
            f"parameters in {dtype}: torch {torch.__version__} cannot accumulate their gradients "
            "in float32; install a version of torch that has torch.Tensor.grad_dtype"
        )


def _types(captured):
    """Return a dict from the data type of trained parameters to the name of one of them."""
    state = state_of(captured)
    return {
        str(state[name].dtype).removeprefix("torch."): name
        for name in sorted(state, reverse=True)
        if state[name].requires_grad
    }


def owners_of(names: Iterable[Iterable[str]]) -> Owners:
    """Return a dict from weight name to the stages that hold the weight.

    `names` contains the weight names of each stage.
    """
    found = defaultdict(list)
    for stage, here in enumerate(names):
        for name in dict.fromkeys(here):
            found[name].append(stage)
    return {name: tuple(stages) for name, stages in found.items()}
