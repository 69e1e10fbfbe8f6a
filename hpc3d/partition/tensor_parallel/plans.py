"""Plans whose replicas consist of tensor-parallel ranks."""

from __future__ import annotations

from contextlib import suppress

from hpc3d.partition.evaluation import MOMENTS
from hpc3d.partition.model_graph import costs_of
from hpc3d.partition.module_plan import ModulePlan, Wanted, best_plan
from hpc3d.partition.operation_costs import Operations
from hpc3d.partition.tensor_parallel.split_costs import ShardedOperations, TensorCosts
from hpc3d.predict.machine.machine import Machine

_MOST_WAYS = 64  # largest number of tensor-parallel ranks tried


def tensor_plan(
    operations: Operations,
    machine: Machine,
    batch: int,
    wanted: Wanted,
    ways: int | None,
    moments: int = MOMENTS,
) -> ModulePlan:
    """Return the best plan whose replicas consist of `ways` tensor-parallel ranks.

    If `ways` is `None`, the powers of two that divide the number of ranks are compared. `moments`
    is as in ModelCosts. Raises ValueError if no such plan is possible.
    """
    model = operations, machine, batch, moments
    if ways is not None:
        return _plan(model, wanted, ways)
    found = []
    powers = [2**power for power in range(_MOST_WAYS.bit_length())]
    for each in (each for each in powers if wanted.ranks % each == 0):
        with suppress(ValueError):
            found.append(_plan(model, wanted, each))
    if not found:
        return _plan(model, wanted, 1)
    return min(
        found, key=lambda plan: plan.load if wanted.objective == "load" else plan.step.seconds
    )


def _plan(model, wanted, ways):
    operations, machine, batch, moments = model
    if ways == 1:
        return best_plan(costs_of(operations, machine, batch, moments=moments), wanted)
    if wanted.ranks % ways:
        raise ValueError(
            f"--tensor {ways} must divide --ranks {wanted.ranks}; use another number of ranks"
        )
    if wanted.zero:
        raise ValueError(f"--tensor {ways}: not supported with --zero 1; use --zero 0")
    split = ShardedOperations(operations, ways)
    costs = costs_of(split, machine, batch, moments=moments)
    return best_plan(TensorCosts(costs, ways), wanted._replace(ranks=wanted.ranks // ways))
