"""Partition a torch module, or a cost-annotated graph, into pipeline stages.

    python -m hpc3d.partition inputs.partition.bert:large --ranks 8 --machine a100-selene
    python -m hpc3d.partition --graph COSTS.json --ranks 4 --microbatches 8
    python -m hpc3d.partition --graph COSTS.json --ranks 4 --objective load --bandwidth 10GB
    python -m hpc3d.partition compare MODULE:FACTORY --ranks N
    python -m hpc3d.partition MODULE:FACTORY --ranks N -o PLAN.json
    mpirun -np N python -m hpc3d.partition run PLAN.json
    python -m hpc3d.partition MODULE:FACTORY --ranks N -o PLAN.py
    torchrun --nproc-per-node N PLAN.py
    mpirun -np 2 python -m hpc3d.partition profile MODULE:FACTORY -o PROFILE.json

MODULE:FACTORY is a function that returns an nn.Module and its example inputs (a tuple or a dict),
whose dimension 0 is the batch of a step. The module is not changed. It is captured on fake
tensors, which need no memory. The costs of its operations come from a machine file, or from the
measurements of `profile`. The planner jointly searches for the stages, the replicas and
recomputation of each stage, the number of microbatches, and the schedule. Options fix individual
values.

COSTS.json is {"nodes": [{"id", "forward", "backward", "memory", "saved", "parameters"}],
"edges": [{"from", "to", "bytes"}], "together": [[ids]]}. Times are in seconds per microbatch.
"memory" is the permanent memory of a node in bytes, "saved" its memory per microbatch in flight,
and "parameters" the bytes that replicas reduce. Edges from one node with equal bytes are one value
with several consumers, unless their "value" keys differ. The nodes of a group in "together" are on
the same stage.

Values only flow forward from stage to stage. --objective time minimizes the step time of the
pipeline schedule. --objective load minimizes the load of the busiest stage: its compute time, and
the transfer times of the values that enter and leave it, each counted once.
"""

import gc
import json
import re
import sys
from argparse import ArgumentTypeError
from importlib import import_module
from pathlib import Path

from hpc3d.config.argument_types import integer, number_of_ranks, rate, size
from hpc3d.config.limits import INT32, MOST_PASSES, MOST_RANKS, TRAINED_TYPES
from hpc3d.config.package_data import DEFAULT_MACHINE, default_machine
from hpc3d.console.command_line import Parser, readable_time, run
from hpc3d.console.sanitize import Problems, counted, sanitized
from hpc3d.console.small_files import replacing
from hpc3d.pipeline.schedule import FOR_PARTITIONS
from hpc3d.runtime.optional_packages import need

_SCHEDULES = [each.name for each in FOR_PARTITIONS]
_OF_GRAPHS = [each.name for each in FOR_PARTITIONS if each.undivided]
_COMMANDS = {
    "compare": "hpc3d.partition.baselines.__main__",
    "profile": "hpc3d.partition.profiles.__main__",
}
_RUN = "hpc3d.partition.execution.module_run"
_TORCHRUN = "hpc3d.partition.execution.torchrun_file"

_OBJECTIVE = "objective to minimize (default: time)"
_CONVERT = "convert the module and its floating-point inputs to this data type"
_TENSOR = (
    "modules only: number of tensor-parallel ranks per replica, over which pairs of linear layers "
    "are split, or auto (default: 1)"
)
_DRAW = "modules only: draw the graph and the stage boundaries"
JSON = """\
print one JSON object on the last line, with the keys objective, schedule, microbatches, time (step
time [s]), load (of the busiest stage [s]), memory (maximum per rank [B]), proven (true if the plan
is proven optimal), stages (lists of operation ids), replicas, and borders (for each stage
boundary: nbytes (message size), behind (last operation before it), next_best (step time [s] if
only this boundary moves to the best nearby location) and instead (this location)).
The plan of a module also has the keys recompute, pieces, chunks (model chunks per stage), zero,
offload and tensor (ranks per replica). A piece is a group of operations that is never split across
stages. For each model chunk, recompute states whether it is recomputed, and pieces lists the
indices of its pieces. Each border of such a plan also has the key room, which is false if a faster
location does not fit in memory"""


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand or the planner; return exit code 0, or 2 if no plan can be made."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["run"]:
        from hpc3d.runtime import launch

        return launch.run("partition", lambda job: _run(job, [*words[1:]]))
    if words and words[0] in _COMMANDS:
        return import_module(_COMMANDS[words[0]]).main(words[1:])
    options = parser().parse_args(words)
    return run("partition", lambda: _plan(options))


def _run(job, words):
    job.from_root(lambda: need("partition run", "torch"))
    import_module(_RUN).run(job, words)


def parser() -> Parser:
    """Return the command-line parser."""
    parser = Parser("partition", __doc__)
    add = parser.add_argument
    text = "function that returns a module and its inputs"
    add("model", nargs="?", metavar="MODULE:FACTORY", help=text)
    add("--graph", type=Path, metavar="COSTS.json", help="graph with the cost of each node")
    ranks = {"type": number_of_ranks, "required": True, "metavar": "N"}
    add("--ranks", **ranks, help="number of ranks (stages times replicas)")
    text = (
        f"modules only: machine in inputs/machines, or a machine file (default: {DEFAULT_MACHINE})"
    )
    add("--machine", metavar="NAME|FILE", help=text)
    text = (
        "modules only: use measured compute costs instead of those in the machine file; without "
        "--machine, also use measured communication costs"
    )
    add("--profile", type=Path, metavar="PROFILE.json", help=text)
    add("--dtype", choices=TRAINED_TYPES, help=f"modules only: {_CONVERT}")
    text = "samples per step (default: batch size of the example inputs)"
    add("--batch", type=integer(1, INT32), metavar="B", help=text)
    text = (
        "memory per rank, in GB if no unit is given (default: from the machine file; for a graph: "
        "unlimited)"
    )
    add("--memory", type=size, metavar="32GB", help=text)
    text = "graphs only: bandwidth between pipeline stages in bytes/s (default: unlimited)"
    add("--bandwidth", type=rate, metavar="10GB", help=text)
    text = "number of microbatches per step (default: the planner chooses; for a graph: 1)"
    add("--microbatches", type=integer(1, MOST_PASSES), metavar="M", help=text)
    text = (
        "modules only: number of replicas, the same for all stages or one per stage, such as "
        "16,8,8 (default: the planner chooses)"
    )
    add("--replicas", type=_counts, metavar="R", help=text)
    asked = ", ".join(each.name for each in FOR_PARTITIONS if each.on_request)
    text = (
        f"pipeline schedule (default: the fastest one, except {asked}; a graph supports only "
        f"{' or '.join(_OF_GRAPHS)})"
    )
    add("--schedule", choices=_SCHEDULES, help=text)
    text = (
        "modules only: use activation checkpointing in no stage (none), in all stages (full), or "
        "in the stages that the planner selects (stage, the default)"
    )
    add("--recompute", choices=("none", "full", "stage"), help=text)
    text = "modules only: fraction of the memory to leave free (default: 0.1)"
    add("--margin", type=_fraction, metavar="X", help=text)
    text = "modules only: ZeRO stage; 1 shards the optimizer state over replicas (default: 0)"
    add("--zero", type=int, choices=(0, 1), help=text)
    text = "modules only: offload the optimizer state to host memory or disk"
    add("--offload", choices=("optimizer",), help=text)
    add("--tensor", type=_ways, metavar="T|auto", help=_TENSOR)
    add("--objective", choices=("time", "load"), default="time", help=_OBJECTIVE)
    text = (
        "modules only: write the plan to a file: JSON, to be executed by `partition run`, or "
        "Python, to be launched with torchrun"
    )
    add("-o", "--output", type=Path, metavar="PLAN.json|PLAN.py", help=text)
    add("--draw", type=Path, metavar="FILE.svg", help=_DRAW)
    add("--json", action="store_true", help=JSON)
    return parser


def _counts(text):
    return tuple(map(integer(1, MOST_RANKS), text.split(",")))


def _ways(text):
    return text if text == "auto" else integer(1, MOST_RANKS)(text)


def _fraction(text):
    if not re.fullmatch(r"0?\.[0-9]+|0", text):
        raise ArgumentTypeError(
            f"{text:.40}: must be a fraction from 0 to less than 1, such as 0.1"
        )
    return float(text)


def _plan(options):
    if (options.model is None) == (options.graph is None):
        raise ValueError("specify either MODULE:FACTORY or --graph COSTS.json, but not both")
    need("partition", "networkx")
    printed = (_plan_graph if options.graph else _plan_module)(options)
    if options.json:
        print(json.dumps(printed))


_MODULE_OPTIONS = (
    *("machine", "profile", "dtype", "batch", "replicas", "recompute", "margin", "zero", "tensor"),
    "offload",
    *("output", "draw"),
)


def _plan_graph(options):
    from hpc3d.partition import cost_file
    from hpc3d.partition.evaluation import Limits
    from hpc3d.partition.planner import planned

    given, problems = [name for name in _MODULE_OPTIONS if getattr(options, name) is not None], []
    if given:
        names = ", ".join(f"--{name}" for name in given)
        problems.append(
            f"{names}: not supported with --graph; remove this option, or plan for a module"
        )
    if options.schedule not in (None, *_OF_GRAPHS):
        known = " or ".join(_OF_GRAPHS)
        problems.append(f"--schedule {options.schedule}: not supported with --graph; use {known}")
    if problems:
        raise Problems(problems)
    graph = cost_file.load(options.graph)
    micros = options.microbatches or 1
    limits = Limits(options.ranks, options.memory, options.bandwidth, micros)
    plan = planned(graph, limits, options.objective, options.schedule)
    _show(plan, limits)
    return _as_json(plan, limits)


# Garbage collection threshold, in allocations. Frequent collections would be slow, because a
# captured model has millions of live objects.
_GC_THRESHOLD = 200_000


def _plan_module(options):
    need(options.model, "torch")
    from hpc3d.partition.capture import captured_of
    from hpc3d.partition.execution.random_operations import check_random_operations
    from hpc3d.partition.execution.staged_model import check_types
    from hpc3d.partition.module_plan import Wanted

    if options.bandwidth:
        raise ValueError(
            "--bandwidth: valid only with --graph; for a module, the bandwidth is in the machine "
            "file (--machine)"
        )
    gc.set_threshold(_GC_THRESHOLD)
    captured = captured_of(options.model, options.dtype)
    if options.output and captured.loss.node is None:
        raise ValueError(f"{options.model}: {captured.loss.text}; without a loss, omit -o")
    check_types(captured, trained=bool(options.output))
    for_torchrun = bool(options.output) and options.output.suffix == ".py"
    check_random_operations(captured, redraw=not for_torchrun)
    given = {name: getattr(options, name, None) for name in Wanted._fields}
    if for_torchrun:
        known = import_module(_TORCHRUN).SCHEDULES
        given["schedules"] = tuple(name for name in _SCHEDULES if name in known)
    asked = {name: value for name, value in given.items() if value is not None}
    if for_torchrun and options.tensor not in (None, 1):
        raise ValueError(
            f"--tensor {options.tensor}: not supported by {options.output}; write a .json file"
        )
    profile = _profile_of(options)
    plan = _best_plan(captured, options, Wanted(**asked), profile)
    _show_opaque(captured.opaque)
    _show_module(plan, options.ranks, captured)
    if options.draw:
        from hpc3d.partition.arc_diagram import arc_diagram

        with replacing(options.draw) as temporary:
            temporary.write_text(arc_diagram(plan.costs.graph(1), plan.choice), "utf-8")
    if options.output:
        from hpc3d.partition.plan_file import saved

        names = [str(each) for each in (options.profile, options.machine) if each]
        machine = " ".join(names) or DEFAULT_MACHINE
        device = profile and profile.device
        found = saved(plan, captured, options.model, machine, options.dtype, device)
        _write(options.output, found, captured)
    return _module_as_json(plan)


def _write(path, plan, captured):
    if path.suffix == ".py":
        torchrun_file = import_module(_TORCHRUN)
        text = torchrun_file.torchrun_file(plan, captured)
        for line in torchrun_file.warnings(captured):
            print(sanitized(line))
        command = f"torchrun --nproc-per-node {plan.ranks}"
    else:
        text, command = plan.text(), f"mpirun -np {plan.ranks} python -m hpc3d.partition run"
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")
    print(f"\n{command} {path}")


def _profile_of(options):
    """Return the profile of the module, or None."""
    from hpc3d.partition import measured_profile

    if not options.profile:
        return None
    tensor = options.tensor or 1
    if tensor != 1:
        raise ValueError(f"--tensor {tensor}: not supported with --profile; use --machine instead")
    return measured_profile.load(options.profile)


def _best_plan(captured, options, wanted, profile):
    """Return the best plan for the number of tensor-parallel ranks in the options."""
    from hpc3d.partition.evaluation import MOMENTS
    from hpc3d.partition.measured_profile import operations_of
    from hpc3d.partition.tensor_parallel.plans import tensor_plan
    from hpc3d.predict.machine import machine_file

    tensor, named = options.tensor or 1, options.machine
    if profile and not named:
        machine = profile.machine(options.ranks)
    else:
        machine = machine_file.load(named or default_machine())
    operations = operations_of(captured, profile)
    batch, moments = options.batch or captured.batch, 0 if options.offload else MOMENTS
    ways = None if tensor == "auto" else tensor
    return tensor_plan(operations, machine, batch, wanted, ways, moments)


def _show_opaque(modules):
    """Print the submodules that torch.export could not trace, grouped by reason."""
    reasons = {}
    for each in modules:
        reasons.setdefault(each.reason, {})[each.path] = None
    for reason, paths in reasons.items():
        names = _some([*paths])
        operations = "one opaque operation" if len(paths) == 1 else "one opaque operation each"
        print(
            sanitized(
                f"{names}: treated as {operations}, because torch.export cannot trace the code "
                f"({reason})"
            )
        )


def _show(plan, limits):
    stages = len(plan.stages)
    _show_head(plan.schedule, stages, limits.microbatches, stages, limits.ranks)
    _show_totals(plan.time, plan.load, plan.memory)
    if plan.all_cuts:
        proof = "optimal" if plan.proven else "search limit reached, possibly not optimal"
        searched = f"all {plan.cuts} downsets of the graph; {proof}"
    else:
        searched = (
            f"one topological order of {counted(plan.cuts - 1, 'node')}; possibly not optimal"
        )
    print(f"searched        {searched}\n")
    print("stage   forward [s]  backward [s]     in [MB]    out [MB] memory [MB]  nodes")
    for number, stage in enumerate(plan.stages):
        times = f"{stage.forward:12.6g}  {stage.backward:12.6g}"
        sizes = "".join(
            f"{nbytes / 1e6:12.6g}" for nbytes in (stage.bytes_in, stage.bytes_out, stage.held)
        )
        print(f"{number:5d}  {times}{sizes}  {sanitized(_some(stage.ids))}")
    _show_borders(plan.borders, plan.time)


def _show_head(schedule, stages, microbatches, used, ranks):
    micros = _counted(microbatches, "microbatch", "microbatches")
    print(f"{_counted(stages, 'stage', 'stages')}, {micros}, schedule {schedule}")
    if used < ranks:
        left = f"{_counted(ranks - used, 'rank', 'ranks')} of {ranks} left idle"
        print(f"{left}, because the step is shorter without them")


def _show_totals(seconds, load, memory):
    print(f"step time       {readable_time(seconds)}")
    print(f"busiest stage   {readable_time(load)} per microbatch, including messages")
    print(f"peak memory     {memory / 1e6:.6g} MB per rank")


def _show_borders(borders, seconds):
    if borders:
        print("\nboundary  message [MB]  last node; step time at the next-best location")
    for number, border in enumerate(borders, 1):
        print(
            f"{number:8d}  {border.nbytes / 1e6:12.6g}  {sanitized(_explained(border, seconds))}"
        )


def _show_largest(captured, graph, ranks):
    """Explain why ranks are idle if a single atom takes more time than an even share."""
    from hpc3d.partition.model_graph import largest_atom

    share, why = largest_atom(captured, graph)
    if share > 1 / ranks:
        print(sanitized(f"the largest piece takes {share:.0%} of the compute time: {why}"))


def _show_module(plan, ranks, captured):
    choice, step, loss, ways = plan.choice, plan.step, captured.loss, plan.costs.ways
    used = ways * choice.ranks
    _show_head(choice.schedule, choice.width, choice.microbatches, used, ranks)
    if ways > 1:
        print(f"tensor          each replica consists of {ways} ranks")
    if used < ranks:
        _show_largest(captured, plan.costs.graph(1), ranks)
    _show_totals(step.seconds, plan.load, max(step.held))
    if not plan.costs.states:
        print("offloaded       the optimizer state, which is not included")
    print(f"memory limit    {plan.memory / 1e6:.6g} MB per rank, excluding the margin")
    searched = f"one topological order of {counted(plan.costs.count, 'node')}, by simulation"
    print(f"searched        {searched}")
    none = f"none, so this plan cannot be run: {loss.text}"
    print(f"loss            {sanitized(none if loss.node is None else loss.text)}\n")
    print(
        "stage  ranks  recompute   forward [s]  backward [s]  all-reduce [s]  memory [MB]  nodes"
    )
    for chunk, (stage, ids) in enumerate(zip(choice.stages, plan.ids)):
        number = chunk % choice.width
        times = f"{step.forward[chunk]:12.6g}  {step.backward[chunk]:12.6g}"
        totals = f"{step.sums[number]:14.4g}  {step.held[number] / 1e6:11.6g}"
        again = "yes" if stage.recompute else "no"
        replicas = f"{ways * stage.replicas:5d}  {again:9}"
        print(f"{number:5d}  {replicas}  {times}  {totals}  {sanitized(_some(ids))}")
    _show_borders(plan.borders, step.seconds)


def _explained(border, seconds):
    if border.next_best is None:
        return f"{border.behind}; no other location nearby is possible"
    longer = 100 * (border.next_best / seconds - 1) if seconds else 0.0
    more = "" if getattr(border, "room", True) else "; a faster location does not fit in memory"
    return f"{border.behind}; {longer:+.2f} % if after {border.instead}{more}"


def _counted(count, one, many):
    return f"{count} {one if count == 1 else many}"


def _some(ids):
    """Format a list of ids; if it has five or more, show the first two, the last and the count."""
    if len(ids) <= 4:
        return " ".join(map(str, ids))
    return f"{ids[0]} {ids[1]} ... {ids[-1]} ({len(ids)})"


def _as_json(plan, limits):
    return {
        "objective": plan.objective,
        "schedule": plan.schedule,
        "microbatches": limits.microbatches,
        "proven": plan.proven,
        "time": plan.time,
        "load": plan.load,
        "memory": plan.memory,
        "stages": [stage.ids for stage in plan.stages],
        "replicas": [1] * len(plan.stages),
        "borders": [border._asdict() for border in plan.borders],
    }


def _module_as_json(plan):
    choice = plan.choice
    return {
        "objective": plan.objective,
        "schedule": choice.schedule,
        "microbatches": choice.microbatches,
        "proven": False,
        "time": plan.step.seconds,
        "load": plan.load,
        "memory": max(plan.step.held),
        "stages": plan.ids,
        "replicas": choice.replicas,
        "recompute": [stage.recompute for stage in choice.stages],
        "chunks": choice.chunks,
        "zero": choice.zero,
        "offload": plan.offload,
        "tensor": plan.costs.ways,
        "pieces": plan.pieces,
        "borders": [border._asdict() for border in plan.borders],
    }


if __name__ == "__main__":
    sys.exit(main())
