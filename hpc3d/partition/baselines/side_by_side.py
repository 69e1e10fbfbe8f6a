"""Table that compares hpc3d's plan for a captured module with the plans of other systems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hpc3d.partition.baselines import contenders
from hpc3d.partition.baselines.contenders import Contender, Task
from hpc3d.partition.baselines.rannc_plan import rannc
from hpc3d.partition.baselines.tensor_pipeline import megatron, megatron_pipeline
from hpc3d.partition.module_plan import Wanted, best_plan
from hpc3d.pipeline.schedule import ONE_STAGE

HEAD = (
    "planner                stages  replicas    microbatches  recompute  schedule     "
    "memory [GB]         step [s]  samples/s  step / ours"
)


def ours(task: Task) -> Contender:
    """Return hpc3d's plan; if no plan exists, the `note` of the result gives the reason."""
    try:
        found = best_plan(task.costs, Wanted(task.ranks, task.memory, margin=0.0))
    except ValueError as error:
        return Contender("ours", None, None, str(error))
    return Contender("ours", found.choice, found.step, costs=found.costs)


# All planners, in the order of the table rows.
EVERYONE: tuple[Callable[[Task], Contender], ...] = (
    ours,
    contenders.data_parallel,
    contenders.gpipe,
    contenders.torchgpipe,
    contenders.gpipe_hybrid,
    contenders.by_parameters,
    megatron,
    megatron_pipeline,
    contenders.pipedream,
    rannc,
)


def shown(task: Task, planners: Iterable[Callable[[Task], Contender]]) -> Iterator[dict]:
    """Yield the table rows, one per planner, and print each row as soon as it is available."""
    first = None
    for planner in planners:
        row = as_row(planner(task), task.costs.batch)
        first = first or row
        print(_line(row, first["step"]), flush=True)
        yield row


def as_row(contender: Contender, batch: int) -> dict[str, Any]:
    """Convert a planner's result to a table row; times are in s, sizes in bytes."""
    name, choice, step, note, ways, _ = contender
    row = {"name": name, "note": note, "ways": ways}
    if choice is None or step is None:
        return row | dict.fromkeys(_NUMBERS)
    again = {stage.recompute for stage in choice.stages}
    numbers = (
        choice.width,
        list(choice.replicas),
        choice.microbatches,
        "some" if len(again) > 1 else "all" if again == {True} else "none",
        choice.schedule if choice.stages[1:] else ONE_STAGE,
        step.fits,
        max(step.held),
        step.seconds,
        batch / step.seconds,
    )
    return row | dict(zip(_NUMBERS, numbers, strict=True))


_NUMBERS = (
    "stages",
    "replicas",
    "microbatches",
    "recompute",
    "schedule",
    "fits",
    "fullest",
    "step",
    "samples_s",
)


def _line(row, step):
    name = f"{row['name']:21s}"
    if row["step"] is None:
        return f"{name}       -"
    fullest = f"{row['fullest'] / 1e9:.3g}{'' if row['fits'] else ' (too large)'}"
    ratio = f"{row['step'] / step:.3f}" if step and row["fits"] else "-"
    return (
        f"{name}  {row['stages']:6d}  {_replicas(row):10s}  {row['microbatches']:12d}  "
        f"{row['recompute']:9s}  {row['schedule']:11s}  {fullest:17s}{row['step']:11.4g}"
        f"{row['samples_s']:11.4g}{ratio:>13s}"
    )


def _replicas(row):
    """Format the replicas of each stage; " x N" indicates N tensor-parallel ranks per replica."""
    counts = row["replicas"]
    text = str(counts[0]) if len({*counts}) == 1 else ",".join(map(str, counts))
    text = text if len(text) <= 10 else f"{min(counts)} to {max(counts)}"
    return f"{text} x {row['ways']}" if row["ways"] > 1 else text
