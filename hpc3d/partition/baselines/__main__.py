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
import sys
from typing import TYPE_CHECKING

from hpc3d.config.argument_types import integer, number_of_ranks, size
from hpc3d.config.limits import INT32
from hpc3d.config.package_data import DEFAULT_MACHINE, default_machine
from hpc3d.console.command_line import Parser, run
from hpc3d.console.sanitize import counted, sanitized
from hpc3d.runtime.optional_packages import need

if TYPE_CHECKING:
    from argparse import Namespace

_MARGIN = 0.1
_JSON = """\
print one JSON object on the last line: batch, memory [B], and rows (name, stages, replicas, ways,
microbatches, recompute, schedule, fits, fullest [B], step [s], samples_s, note)"""


def main(argv: list[str] | None = None) -> int:
    """Compare the planners; return exit code 2 if the request cannot be planned."""
    options = _parser().parse_args(argv)
    return run("partition", lambda: _compare(options))


def _parser():
    parser = Parser("partition compare", __doc__)
    add = parser.add_argument
    add("model", metavar="MODULE:FACTORY", help="what returns a module and its inputs")
    ranks = {"type": number_of_ranks, "required": True, "metavar": "N"}
    add("--ranks", **ranks, help="that every planner may use")
    add("--machine", metavar="NAME|FILE", help=f"of inputs/machines ({DEFAULT_MACHINE})")
    add("--memory", type=size, metavar="32GB", help="of a rank, 10 %% of it left free (machine's)")
    batch = "samples of a step (those of the inputs)"
    add("--batch", type=integer(1, INT32), metavar="B", help=batch)
    add("--json", action="store_true", help=_JSON)
    return parser


def _compare(options: Namespace) -> None:
    need("partition", "networkx")
    need(options.model, "torch")
    from hpc3d.partition.baselines.contenders import Task
    from hpc3d.partition.baselines.side_by_side import HEAD, everyone, shown
    from hpc3d.partition.capture import captured_of
    from hpc3d.partition.operation_costs import Operations
    from hpc3d.predict.machine import machine_file

    machine = machine_file.load(options.machine or default_machine())
    captured = captured_of(options.model)
    memory = (options.memory or machine.memory_gb * 1e9) * (1 - _MARGIN)
    batch = options.batch or captured.batch
    task = Task.of(Operations(captured), machine, batch, options.ranks, memory)
    ranks = f"{counted(options.ranks, 'rank')} of {machine.name}, {memory / 1e9:.6g} GB of each"
    print(f"{counted(batch, 'sample')} on {ranks}\n\n{HEAD}")
    rows = [*shown(task, everyone(captured))]
    if not any(row["fits"] for row in rows):
        raise ValueError(rows[0]["note"])
    print(*[f"\n{row['name']}: {sanitized(row['note'])}" for row in rows if row["note"]], sep="")
    if options.json:
        print(json.dumps({"batch": batch, "memory": memory, "rows": rows}))


if __name__ == "__main__":
    sys.exit(main())
