"""Partition any model into pipeline stages: from a torch module, or the costs of a graph.

python -m hpc3d.partition inputs.partition.bert:large --ranks 8 --machine a100-selene
python -m hpc3d.partition --graph COSTS.json --ranks 4 --microbatches 8
python -m hpc3d.partition --graph COSTS.json --ranks 4 --objective load --bandwidth 10GB
python -m hpc3d.partition compare MODULE:FACTORY --ranks N

MODULE:FACTORY is a function that returns an nn.Module and a tuple of example inputs, whose
dimension 0 is the batch of a step. The module is not changed, and needs no memory: it is captured
on fake tensors, and costs what the machine needs for its operations. --replicas of every stage and
--microbatches of each are searched where they are not given.

COSTS.json is {"nodes": [{"id", "forward", "backward", "memory", "saved", "parameters"}],
"edges": [{"from", "to", "bytes"}], "together": [[ids]]}: seconds of a microbatch; bytes that a
stage holds always (memory), per microbatch in flight (saved), and of what replicas sum
(parameters); bytes of the values between nodes. Edges from one node with equal bytes are one value
with several readers, unless a "value" tells them apart. Nodes in a group of "together" stay on one
stage.

Values only flow forward from stage to stage. --objective time is
the shortest step under a pipeline schedule, load the lightest heaviest stage: what it computes,
and once per value the transfer of each that enters it and of each that leaves it.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

from hpc3d.cli import Parser, number_of_ranks, rate, run, size, whole
from hpc3d.extras import need
from hpc3d.limits import INT32, MOST_PASSES, MOST_RANKS
from hpc3d.plain import plain
from hpc3d.shipped import shipped

_MACHINE = "machines/h100.toml"
_COMMANDS = {"compare": "hpc3d.partition.baselines.__main__"}

JSON = """\
print one JSON object on the last line: objective, schedule, microbatches, time [s] of a step,
load [s] and memory [B] of the heaviest and the fullest stage, proven, stages (ids), replicas,
borders (nbytes, behind, next_best [s], instead)"""


def main(argv: list[str] | None = None) -> int:
    """Plan what the command line says; the exit code is 2 for what cannot be planned."""
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in _COMMANDS:
        return import_module(_COMMANDS[words[0]]).main(words[1:])
    options = _parser().parse_args(words)
    return run("partition", lambda: _plan(options))


def _parser():
    parser = Parser("partition", __doc__)
    add = parser.add_argument
    add("model", nargs="?", metavar="MODULE:FACTORY", help="what returns a module and its inputs")
    add("--graph", type=Path, metavar="COSTS.json", help="a graph and its costs")
    add(
        "--ranks",
        type=number_of_ranks,
        required=True,
        metavar="N",
        help="stages, times their replicas",
    )
    add("--machine", metavar="NAME|FILE", help="of inputs/machines, for a module (h100)")
    add(
        "--batch",
        type=whole(1, INT32),
        metavar="B",
        help="samples of a step (those of the inputs)",
    )
    memory = "memory of a rank (default: the machine's; for a graph no limit)"
    add("--memory", type=size, metavar="32GB", help=memory)
    bandwidth = "bytes per second, for a graph (default: unlimited)"
    add("--bandwidth", type=rate, metavar="10GB", help=bandwidth)
    micros = whole(1, MOST_PASSES)
    add("--microbatches", type=micros, metavar="M", help="of a step (default: searched; graph: 1)")
    replicas = "of every stage, for a module (searched)"
    add("--replicas", type=whole(1, MOST_RANKS), metavar="R", help=replicas)
    add("--schedule", choices=("1f1b", "gpipe"), help="(default: the one with the shorter step)")
    add("--objective", choices=("time", "load"), default="time", help="what to minimise (time)")
    add("--json", action="store_true", help=JSON)
    return parser


def _plan(options):
    if (options.model is None) == (options.graph is None):
        raise ValueError("give either MODULE:FACTORY or --graph COSTS.json")
    need("partition", "networkx")
    plan, limits, replicas = (_of_file if options.graph else _of_module)(options)
    _show(plan, limits, replicas, options.ranks)
    if options.json:
        print(json.dumps(_as_json(plan, limits, replicas)))


def _of_file(options):
    from hpc3d.partition import cost_file
    from hpc3d.partition.planner import planned
    from hpc3d.partition.stages import Limits

    if options.machine or options.batch or options.replicas:
        raise ValueError("--machine, --batch and --replicas are for a module, not for a graph")
    graph = cost_file.load(options.graph)
    micros = options.microbatches or 1
    limits = Limits(options.ranks, options.memory, options.bandwidth, micros)
    return planned(graph, limits, options.objective, options.schedule), limits, 1


def _of_module(options):
    need(options.model, "torch")
    from hpc3d.partition.capture import capture, made
    from hpc3d.partition.module_plan import Wanted, planned_module
    from hpc3d.predict.machine import machine_file

    if options.bandwidth:
        raise ValueError("--bandwidth is for a graph: a module's plan asks the machine")
    machine = machine_file.load(options.machine or shipped(_MACHINE))
    captured = capture(*made(options.model))
    wanted = Wanted(**{name: getattr(options, name) for name in Wanted._fields})
    found = planned_module(captured, machine, wanted)
    return found.stages, found.limits, found.replicas


def _show(plan, limits, replicas, ranks):
    stages = _counted(len(plan.stages), "stage", "stages")
    stages += f" of {replicas} ranks" if replicas > 1 else ""
    micros = _counted(limits.microbatches, "microbatch", "microbatches")
    print(f"{stages}, {micros}, schedule {plan.schedule}")
    if idle := ranks - replicas * len(plan.stages):
        print(f"{_counted(idle, 'rank', 'ranks')} of {ranks} left idle: the step is shorter so")
    print(f"step            {plan.time:.6g} s")
    print(f"heaviest stage  {plan.load:.6g} s per microbatch")
    print(f"fullest stage   {plan.memory / 1e6:.6g} MB")
    print(f"{_how(plan)}\n")
    print("stage   forward [s]  backward [s]     in [MB]    out [MB]   held [MB]  nodes")
    for number, stage in enumerate(plan.stages):
        times = f"{stage.forward:12.6g}  {stage.backward:12.6g}"
        sizes = "".join(
            f"{nbytes / 1e6:12.6g}" for nbytes in (stage.bytes_in, stage.bytes_out, stage.held)
        )
        print(f"{number:5d}  {times}{sizes}  {plain(_some(stage.ids))}")
    if plan.borders:
        print("\nborder  crossing [MB]  behind; the next best place for it alone")
    for number, border in enumerate(plan.borders, 1):
        print(f"{number:6d}  {border.nbytes / 1e6:13.6g}  {plain(_explained(border, plan.time))}")


def _explained(border, seconds):
    if border.next_best is None:
        return f"{border.behind}; no other place fits"
    longer = 100 * (border.next_best / seconds - 1) if seconds else 0.0
    return f"{border.behind}; behind {border.instead} the step is {longer:+.2f} %"


def _counted(count, one, many):
    return f"{count} {one if count == 1 else many}"


def _how(plan):
    if plan.all_cuts:
        proof = "none is better" if plan.proven else "not proven: the search was cut off"
        return f"searched over all {plan.cuts} downsets of the graph: {proof}"
    return f"searched along the chain of the sorted nodes ({plan.cuts - 1}): others may be better"


def _some(ids):
    """The first and the last of some ids, and how many there are."""
    if len(ids) <= 4:
        return " ".join(map(str, ids))
    return f"{ids[0]} {ids[1]} ... {ids[-1]} ({len(ids)})"


def _as_json(plan, limits, replicas):
    return {
        "objective": plan.objective,
        "schedule": plan.schedule,
        "microbatches": limits.microbatches,
        "proven": plan.proven,
        "time": plan.time,
        "load": plan.load,
        "memory": plan.memory,
        "stages": [stage.ids for stage in plan.stages],
        "replicas": [replicas] * len(plan.stages),
        "borders": [border._asdict() for border in plan.borders],
    }


if __name__ == "__main__":
    sys.exit(main())
