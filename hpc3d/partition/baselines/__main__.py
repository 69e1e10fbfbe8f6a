"""Compare hpc3d's plan for a torch module with the plans of other planners.

    python -m hpc3d.partition compare inputs.partition.bert:large --ranks 32 --machine v100-8x4

All planners plan for the same machine, batch size and memory per rank, and the same cost model
evaluates all plans. The other planners are:

    GPipe         equal layers per stage, balanced times (torchgpipe), or replicas (hybrid)
    DeepSpeed     stages with balanced numbers of parameters
    Megatron-LM   tensor and data parallelism, with and without a pipeline
    PipeDream     PipeDream's partition with a synchronous schedule
    RaNNC         RaNNC's automatic partition

Some planners leave the number of microbatches, the recomputation or the replicas to the user. For
these planners, the fastest combination that fits in memory is used. All plans train with AdamW in
the data type of the module. hpc3d.partition.baselines lists the assumptions.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace

from hpc3d.config.argument_types import integer, number_of_ranks, size
from hpc3d.config.limits import INT32
from hpc3d.config.package_data import DEFAULT_MACHINE, default_machine
from hpc3d.console.command_line import Parser, run
from hpc3d.console.sanitize import counted, sanitized
from hpc3d.runtime.optional_packages import need

_MARGIN = 0.1
_JSON = """\
print one JSON object on the last line, with the keys batch, memory [B], and rows: one object per
planner with the keys name, stages, replicas, ways (tensor-parallel ranks), microbatches,
recompute, schedule, fits, fullest (maximum memory per rank [B]), step (step time [s]),
samples_s and note"""


def main(argv: list[str] | None = None) -> int:
    """Print a comparison of the planners; return exit code 2 if the request is invalid."""
    options = parser().parse_args(argv)
    return run("partition", lambda: _compare(options))


def parser() -> Parser:
    """Return the command-line parser."""
    parser = Parser("partition compare", __doc__)
    add = parser.add_argument
    add("model", metavar="MODULE:FACTORY", help="function that returns a module and its inputs")
    ranks = {"type": number_of_ranks, "required": True, "metavar": "N"}
    add("--ranks", **ranks, help="number of ranks in each plan")
    add(
        "--machine", metavar="NAME|FILE", help=f"machine name or file (default: {DEFAULT_MACHINE})"
    )
    memory = "memory per rank, of which 10 %% is left free (default: from the machine file)"
    add("--memory", type=size, metavar="32GB", help=memory)
    batch = "samples per step (default: batch size of the example inputs)"
    add("--batch", type=integer(1, INT32), metavar="B", help=batch)
    add("--json", action="store_true", help=_JSON)
    return parser


def _compare(options: Namespace) -> None:
    need("partition", "networkx")
    need(options.model, "torch")
    from hpc3d.partition.baselines.contenders import Task
    from hpc3d.partition.baselines.side_by_side import EVERYONE, HEAD, shown
    from hpc3d.partition.capture import captured_of
    from hpc3d.partition.operation_costs import Operations
    from hpc3d.predict.machine import machine_file

    machine = machine_file.load(options.machine or default_machine())
    captured = captured_of(options.model)
    memory = (options.memory or machine.memory_gb * 1e9) * (1 - _MARGIN)
    batch = options.batch or captured.batch
    task = Task.of(Operations(captured), machine, batch, options.ranks, memory)
    ranks = f"{counted(options.ranks, 'rank')} of {machine.name} with {memory / 1e9:.6g} GB each"
    print(f"{counted(batch, 'sample')} per step on {ranks}\n\n{HEAD}")
    rows = [*shown(task, EVERYONE)]
    if not any(row["fits"] for row in rows):
        raise ValueError(rows[0]["note"])
    print(*[f"\n{row['name']}: {sanitized(row['note'])}" for row in rows if row["note"]], sep="")
    if options.json:
        print(json.dumps({"batch": batch, "memory": memory, "rows": rows}))


if __name__ == "__main__":
    sys.exit(main())
