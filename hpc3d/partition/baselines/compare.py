"""Compare our plan of a torch module with those of others, under the same costs.

python -m hpc3d.partition compare inputs.partition.bert:large --ranks 32 --machine v100-8x4

Every planner has the same machine, batch and memory, and an arrangement of its own: GPipe with
equally many layers on each rank, or about equal times (torchgpipe), or with replicas (hybrid);
stages of about equally many parameters (DeepSpeed); Megatron-LM without and with a pipeline;
PipeDream's partition, run synchronously; RaNNC's. Microbatches, recomputation and replicas are the
fastest that fit where the planner leaves them to its user. All are in the type of the module, with
AdamW; hpc3d.partition.baselines says what is assumed of each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from hpc3d.cli import Parser, number_of_ranks, run, size, whole
from hpc3d.extras import need
from hpc3d.limits import INT32
from hpc3d.plain import plain
from hpc3d.shipped import shipped

if TYPE_CHECKING:
    from argparse import Namespace

    from hpc3d.partition.baselines.contenders import Contender, Task
    from hpc3d.partition.capture import Captured

_MACHINE = "machines/h100.toml"
_MARGIN = 0.1
_HEAD = (
    "planner                stages  replicas    microbatches  recompute  schedule     "
    "fullest [GB]    step [s]  samples/s  to ours"
)
_JSON = """\
print one JSON object on the last line: batch, memory [B], and rows (name, stages, replicas, ways,
microbatches, recompute, schedule, fits, fullest [B], step [s], samples_s, note)"""


def main(argv: list[str]) -> int:
    """Compare what the command line says; the exit code is 2 for what cannot be planned."""
    options = _parser().parse_args(argv)
    return run("partition", lambda: _compare(options))


def _parser():
    parser = Parser("partition compare", __doc__)
    add = parser.add_argument
    add("model", metavar="MODULE:FACTORY", help="what returns a module and its inputs")
    ranks = {"type": number_of_ranks, "required": True, "metavar": "N"}
    add("--ranks", **ranks, help="that every planner may use")
    add("--machine", metavar="NAME|FILE", help="of inputs/machines (h100)")
    add("--memory", type=size, metavar="32GB", help="of a rank, 10 %% of it left free (machine's)")
    batch = "samples of a step (those of the inputs)"
    add("--batch", type=whole(1, INT32), metavar="B", help=batch)
    add("--json", action="store_true", help=_JSON)
    return parser


def _compare(options: Namespace) -> None:
    need("partition", "networkx")
    need(options.model, "torch")
    from hpc3d.partition.baselines.contenders import Task
    from hpc3d.partition.capture import capture, made
    from hpc3d.partition.operation_costs import Operations
    from hpc3d.predict.machine import machine_file

    machine = machine_file.load(options.machine or shipped(_MACHINE))
    captured = capture(*made(options.model))
    memory = (options.memory or machine.memory_gb * 1e9) * (1 - _MARGIN)
    batch = options.batch or captured.batch
    task = Task.of(Operations(captured), machine, batch, options.ranks, memory)
    ranks = f"{options.ranks} ranks of {machine.name}, {memory / 1e9:.6g} GB of each"
    print(f"{batch} samples on {ranks}\n\n{_HEAD}")
    rows = [*_shown(task, everyone(captured))]
    if not any(row["fits"] for row in rows):
        raise ValueError(rows[0]["note"])
    print(*[f"\n{row['name']}: {plain(row['note'])}" for row in rows if row["note"]], sep="")
    if options.json:
        print(json.dumps({"batch": batch, "memory": memory, "rows": rows}))


def everyone(captured: Captured) -> list[Callable[[Task], Contender]]:
    """Ours, of a captured module, and all others, in the order in which they are shown."""
    from hpc3d.partition.baselines import contenders
    from hpc3d.partition.baselines.rannc_plan import rannc
    from hpc3d.partition.baselines.tensor_pipeline import megatron, megatron_pipeline

    return [
        lambda task: ours(captured, task),
        contenders.data_parallel,
        contenders.gpipe,
        contenders.torchgpipe,
        contenders.gpipe_hybrid,
        contenders.by_parameters,
        megatron,
        megatron_pipeline,
        contenders.pipedream,
        rannc,
    ]


def ours(captured: Captured, task: Task) -> Contender:
    """The plan of hpc3d.partition.module_plan, which has the reason where there is none."""
    from hpc3d.partition.baselines.contenders import Contender
    from hpc3d.partition.module_plan import Wanted, planned_module

    wanted = Wanted(task.ranks, task.memory, task.costs.batch, margin=0.0)
    try:
        found = planned_module(captured, task.costs.machine, wanted)
    except ValueError as error:
        return Contender("ours", None, None, str(error))
    return Contender("ours", found.choice, found.step)


def _shown(task: Task, planners: Iterable[Callable[[Task], Contender]]) -> Iterator[dict]:
    """The rows, each printed as soon as it is there."""
    first = None
    for planner in planners:
        row = as_row(planner(task), task.costs.batch)
        first = first or row
        print(_line(row, first["step"]), flush=True)
        yield row


def as_row(contender: Contender, batch: int) -> dict[str, Any]:
    """A contender as plain values: seconds, bytes; None for what it does not have."""
    name, choice, step, note, ways = contender
    row = {"name": name, "note": note, "ways": ways}
    if choice is None or step is None:
        return row | dict.fromkeys(_NUMBERS)
    again = {stage.recompute for stage in choice.stages}
    numbers = (
        choice.width,
        list(choice.replicas),
        choice.microbatches,
        "some" if len(again) > 1 else "all" if again == {True} else "none",
        choice.schedule if choice.stages[1:] else "none",
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
    fullest = f"{row['fullest'] / 1e9:.3g}{'' if row['fits'] else ' (no room)'}"
    ratio = f"{row['step'] / step:.3f}" if step and row["fits"] else "-"
    return (
        f"{name}  {row['stages']:6d}  {_replicas(row):10s}  {row['microbatches']:12d}  "
        f"{row['recompute']:9s}  {row['schedule']:11s}  {fullest:14s}{row['step']:10.4g}"
        f"{row['samples_s']:11.4g}{ratio:>9s}"
    )


def _replicas(row):
    """Of every stage, and x the ranks that share the layers of each."""
    counts = row["replicas"]
    text = str(counts[0]) if len({*counts}) == 1 else ",".join(map(str, counts))
    text = text if len(text) <= 10 else f"{min(counts)} to {max(counts)}"
    return f"{text} x {row['ways']}" if row["ways"] > 1 else text
