"""Find the fastest layout for a number of ranks, and explain why other layouts are slower.

    python -m hpc3d.plan gpt-3d-64 --ranks 64
    python -m hpc3d.plan INPUT.toml --ranks 1024 --machine a100-selene
    python -m hpc3d.plan INPUT.toml --ranks 64 --memory 40GB --apply planned.toml
    python -m hpc3d.plan INPUT.toml --ranks 64 --techniques
    python -m hpc3d.plan INPUT.toml --ranks 64 --memory 40GB --schedule search --csv schedule.csv

The command searches all layouts that the rules allow and that fit in the memory of a rank. It
varies the sizes of all mesh axes (the context axis c only if it may help), every scheme in
hpc3d.SCHEMES and the parallel.split of the input, the order of the axes on the nodes, the schedule
and its chunks, the microbatches, the ZeRO stage, activation checkpointing, and re-gathering. For
the best layouts, it also varies the layers per stage, hybrid sharding, the prefetching of weights,
the overlap of expert all-to-alls and the bucket size.

Lower bounds prune layouts that cannot be among the best. For the remaining layouts,
simulations of one layer, the embedding and the head yield an estimate of the step time, marked
with "~". The best layouts are then simulated in full.

If no layout fits, `plan` reports a technique that makes layouts fit, if possible one that leaves
the results unchanged. "*" marks layouts whose technique changes the results.

With --techniques, the command does not search. It prints the savings and the cost of each
technique for the layout of the input file.

With --schedule search, the command searches for a pipeline schedule for the layout of the input
file, with one model chunk per stage, that fits in memory. It prints the proven gap: the maximum
relative distance of the schedule's makespan from the optimum.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc3d.config.argument_types import number_of_ranks, positive, size
from hpc3d.config.package_data import DEFAULT_MACHINE, default_machine, input_of, machine_in_words
from hpc3d.console.command_line import Parser, readable_time, run
from hpc3d.console.sanitize import counted, sanitized
from hpc3d.pipeline.schedule import SEARCH

if TYPE_CHECKING:
    from argparse import Namespace

    from hpc3d.config.input_file import Config, MeshConfig
    from hpc3d.predict.planning.planned_layouts import PlannedLayouts, ResortedLayouts
    from hpc3d.predict.planning.ranking import RankedLayout, Ranking
    from hpc3d.predict.planning.resorts import FallbackLayout
    from hpc3d.predict.planning.search import Found

# Columns of the table of memory-saving techniques. Each key is the JSON key of a value that is
# divided by the value in the first row. Each tuple contains the JSON key of the absolute value (in
# bytes or seconds), the size of the printed unit in bytes or seconds, and the name of this unit.
_SHARES = {
    "of_peak": ("peak_bytes", 1e6, "MB"),
    "of_received": ("received_bytes", 1e6, "MB"),
    "of_step_time": ("step_time_s", 1e-3, "ms"),
}
_LEAST_CHANGE = 5e-4  # smallest relative change to print; below it, the row says "no change"
_JSON = """\
print one JSON object on the last line, with the keys machine, ranks, memory_bytes, layouts (the
fastest ones), named (the fastest layout of each scheme), losers (slower layouts by reason),
searched (counts), applied (the file written by --apply), unsearched (a line, if the scheme or
split of the input is valid on no mesh) and, for a mixture of experts, mixture as in the output of
simulate. Each layout has the keys layout (tables of the input file), step_time_s, simulated,
bubble, communication, axis, waits_s, peak_bytes, stage, memory and, for GPUs, cuda_graph (what the
CUDA graph of a step contains, or why there is none). If no layout fits by itself, the key resort
contains with (the changes of the technique, and exact, true if they preserve the results), nearest
(the layout closest to fitting) and others (layouts that fit with other techniques). With
--techniques, the keys are machine, ranks and techniques. Each technique has the key change, and
either refused, which is the reason why the technique is impossible, or peak_bytes, memory,
received_bytes, step_time_s, and their ratios to the first row (of_...). With --schedule, the keys
are machine, ranks, memory_bytes and schedule. The schedule has the keys makespan_s, bound_s, gap,
step_time_s, lists with in_flight, weight_inputs and peak_bytes of each stage, and input (the keys
schedule, step_time_s and peak_bytes of the input)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 for invalid input or if no layout fits in memory."""
    options, overrides = parser().parse_known_args(argv)
    return run("plan", lambda: plan(options, overrides))


def parser() -> Parser:
    """Return the command-line parser."""
    parser = Parser(
        "plan",
        __doc__,
        "exit codes: 0 success, 2 invalid input, or no layout fits (explained on standard error)",
        usage="%(prog)s INPUT.toml|RUN_DIR --ranks N [options] [--section.key value ...]",
    )
    add = parser.add_argument
    text = "input file, name of a shipped input, or run folder, whose config.toml is used"
    add("input", type=input_of, metavar="INPUT.toml|RUN_DIR", help=text)
    add("--ranks", type=number_of_ranks, required=True, metavar="N", help="number of ranks")
    text = f"machine in inputs/machines, or a machine file (default: {DEFAULT_MACHINE})"
    add("--machine", metavar="NAME|FILE", help=text)
    text = "memory per rank, in GB if no unit is given (default: memory of the machine)"
    add("--memory", type=size, metavar="80GB", help=text)
    add("--top", type=positive, metavar="K", help="number of layouts to show (default: 10)")
    add("--apply", metavar="FILE", help="write a new input file with the best layout")
    text = "print the savings and cost of each memory-saving technique for INPUT.toml"
    add("--techniques", action="store_true", help=text)
    text = "search for a pipeline schedule for the layout of INPUT.toml"
    add("--schedule", choices=[SEARCH], help=text)
    text = "with --schedule: write the schedule to a CSV file, for parallel.schedule = csv:FILE"
    add("--csv", metavar="FILE", help=text)
    add("--json", action="store_true", help=_JSON)
    return parser


def plan(options: Namespace, overrides: Sequence[str]) -> None:
    """Search for the best layouts or a schedule, or compare memory-saving techniques."""
    if options.csv and not options.schedule:
        raise ValueError(f"--csv {options.csv}: add --schedule {SEARCH}")
    if options.techniques:
        _techniques(options, overrides)
    elif options.schedule:
        _schedule(options, overrides)
    else:
        _search(options, overrides)


def _techniques(options: Namespace, overrides: Sequence[str]) -> None:
    """Print how much memory each technique saves and what it costs, for the input's layout."""
    from hpc3d.predict.machine import machine_file
    from hpc3d.predict.planning.ranking import shown_layout
    from hpc3d.predict.planning.techniques import effects
    from hpc3d.predict.simulation.simulator import load_resolved

    if options.apply or options.memory or options.top or options.schedule:
        others = "--apply, --memory, --top or --schedule"
        raise ValueError(f"--techniques cannot be combined with {others}")
    machine = machine_file.load(options.machine or default_machine())
    found = [*effects(options.input, overrides, options.ranks, machine)]
    rows = [each.plain(found[0]) for each in found]
    config = load_resolved(options.input, overrides, options.ranks)
    ranks = counted(options.ranks, "rank")
    named = machine_in_words(machine.name, options.machine)
    print(f"{ranks} of {named}; each row changes one key of {options.input}:")
    print(sanitized(shown_layout(config)), end="\n\n")
    print(f"{'change':<34}{'memory':>14}{'received':>22}{'step':>22}")
    for number, row in enumerate(rows):
        print(sanitized(_effect_line(row, number == 0)))
    if options.json:
        print(json.dumps({"machine": machine.name, "ranks": options.ranks, "techniques": rows}))


def _effect_line(row: Mapping[str, Any], first: bool) -> str:
    """Format the table row of a technique: peak memory, received bytes and step time.

    Each value is followed by its relative change from the first row.
    """
    if "refused" in row:
        return f"{row['change']:<34}  not possible: {row['refused']}"
    line = f"{row['change']:<34}"
    changes = {share: (row[share] or 1) - 1 for share in _SHARES}
    if not first and all(abs(change) < _LEAST_CHANGE for change in changes.values()):
        return f"{line}  no change"
    for share, (value, unit, name) in _SHARES.items():
        change = f"{changes[share]:+.1%}" if abs(changes[share]) >= _LEAST_CHANGE else ""
        line += f"{row[value] / unit:>11,.1f} {name}{change:>8}"
    return line.rstrip()


def _schedule(options: Namespace, overrides: Sequence[str]) -> None:
    """Search for a schedule, print its step time and peak memory, and write it to a CSV file."""
    from hpc3d.console.small_files import naming
    from hpc3d.pipeline.csv_schedule import to_csv
    from hpc3d.predict.machine import machine_file
    from hpc3d.predict.planning.planned_layouts import gigabytes
    from hpc3d.predict.planning.planned_schedule import plan_schedule
    from hpc3d.predict.planning.ranking import shown_layout

    if options.apply or options.top:
        raise ValueError("--schedule cannot be combined with --apply or --top")
    machine = machine_file.load(options.machine or default_machine())
    memory = options.memory or machine.memory_gb * 1e9
    planned = plan_schedule(options.input, overrides, options.ranks, machine, memory)
    found, plain = planned.found, planned.plain()
    named = machine_in_words(machine.name, options.machine)
    print(f"{counted(options.ranks, 'rank')} of {named}, {gigabytes(memory)} each:")
    print(sanitized(shown_layout(planned.config)), end="\n\n")
    print("schedule            step    memory")
    for name, step in ((planned.config.parallel.schedule, planned.before), (SEARCH, planned.step)):
        seconds, peak = readable_time(step.seconds), max(step.peaks)
        row = f"{name:<14}{seconds:>10s} {gigabytes(peak):>9s}"
        print(sanitized(row if peak <= memory else f"{row}, does not fit"))
    print(
        f"\nmakespan       {readable_time(found.seconds)} (passes of a step, without reductions)"
    )
    print(f"lower bound    {readable_time(found.bound)}, proven gap {found.gap:.2%}")
    print("in flight     ", *plain["in_flight"], "  (stage 0 first)")
    print("waiting for W ", *plain["weight_inputs"])
    if options.csv:
        with naming(options.csv):
            to_csv(options.csv, found.streams, found.placement)
        key = f"parallel.schedule = csv:{options.csv}"
        print(sanitized(f"the schedule was written to {options.csv}; to train with it, set {key}"))
    if options.json:
        about = {"machine": machine.name, "ranks": options.ranks, "memory_bytes": memory}
        print(json.dumps(about | {"schedule": plain}))


def _search(options: Namespace, overrides: Sequence[str]) -> None:
    """Search for layouts and print the best. If none fits, try memory-saving techniques."""
    from hpc3d.predict.machine import machine_file
    from hpc3d.predict.planning.planned_layouts import TOP, plan_layouts

    if options.apply and (Path(options.apply).is_dir() or not Path(options.apply).parent.is_dir()):
        raise ValueError(f"--apply {options.apply}: must be a file in an existing folder")
    if options.apply and Path(options.apply).is_file():
        raise ValueError(f"--apply {options.apply} already exists; choose a new file")
    machine = machine_file.load(options.machine or default_machine())
    memory = options.memory or machine.memory_gb * 1e9
    top = max(options.top or TOP, TOP)  # the ranking must not depend on --top
    planned, resorted = plan_layouts(options.input, overrides, options.ranks, machine, memory, top)
    _report(options, planned, memory, resorted)


def _report(
    options: Namespace, planned: PlannedLayouts, memory: float, resorted: ResortedLayouts | None
) -> None:
    """Print the best layouts, and write the best one to the input file given by --apply."""
    from hpc3d.predict.assumptions import lines, of_mixture
    from hpc3d.predict.error_intervals import described, interval
    from hpc3d.predict.planning.planned_layouts import TOP, gigabytes
    from hpc3d.predict.planning.ranked_layouts import searched

    config, found, ranking = planned.config, planned.found, planned.ranking
    best = planned.best[: options.top or TOP]
    any_mesh = "any p, d and e" if config.model.experts else "any p and d"
    named = {any_mesh: ranking.named(), _here(config.mesh): ranking.named(config.mesh)}
    losers = ranking.losers(best[0])
    vocabulary = ranking.search.estimator.vocabulary
    settled = replace(best[0].config, model=replace(config.model, vocabulary=vocabulary))
    if options.apply:
        _apply(options, config, best[0].config)
    machine = ranking.machine.name
    named_machine = machine_in_words(machine, options.machine)
    print(f"{counted(options.ranks, 'rank')} of {named_machine}, {gigabytes(memory)} each")
    print(*lines(settled), "", sep="\n")
    if resorted:
        print(*map(sanitized, _resort_lines(resorted)), "", sep="\n")
    show(best, named, losers, memory, _mark(resorted.fit) if resorted else " ")
    around = interval(best[0].config, ranking.machine, best[0].seconds)
    if around:
        print(f"\ninterval of the best layout: {described(around, best[0].seconds)}")
    _show_search(found, ranking)
    if options.apply:
        print(sanitized(f"the best layout was written to {options.apply}; train with it:"))
        print(sanitized(_train_command(options)))
    about = {"machine": machine, "ranks": options.ranks, "memory_bytes": memory}
    optional = {"mixture": of_mixture(settled), "unsearched": ranking.search.unsearched}
    optional |= {"resort": resorted and resorted.plain(), "interval": around}
    about |= {key: value for key, value in optional.items() if value}
    rest = {"searched": searched(found, ranking), "applied": options.apply}
    if options.json:
        print(json.dumps(about | _told(best, named, losers) | rest))


def _mark(fit: FallbackLayout) -> str:
    """Return "*" if a layout's memory-saving technique changes the results, otherwise a blank."""
    return " " if fit.resort.exact else "*"


def _resort_lines(resorted: ResortedLayouts) -> Iterator[str]:
    """Yield lines that explain which memory-saving technique makes the layouts fit in memory."""
    from hpc3d.library.found_layouts import line
    from hpc3d.predict.planning.planned_layouts import nearest_in_words
    from hpc3d.predict.planning.ranking import estimated

    resort = resorted.fit.resort
    nearest = nearest_in_words(resorted.nearest)
    yield f"No layout fits without offloading or a change of the results: {nearest}."
    yield f"All layouts below use {resort.text}, {resort.effect}."
    if resorted.others:
        yield "Other techniques that also make a layout fit:"
    for other in resorted.others:
        row = line(estimated(other.estimate))
        yield f"   {_mark(other)}{row}; with {other.resort.text}, {other.resort.effect}"


def _told(
    best: Sequence[RankedLayout],
    named: Mapping[str, Mapping[str, RankedLayout | str]],
    losers: Sequence[tuple[str, int, RankedLayout]],
) -> dict[str, Any]:
    """Return a dict for `--json`: best layouts, best layout of each scheme, and slower layouts."""
    from hpc3d.predict.planning.ranked_layouts import as_plain

    return {
        "layouts": [as_plain(row) for row in best],
        "named": {
            where: {
                name: None if isinstance(row, str) else as_plain(row) for name, row in rows.items()
            }
            for where, rows in named.items()
        },
        "losers": [
            {"reason": reason, "count": count, "nearest": as_plain(nearest)}
            for reason, count, nearest in losers
        ],
    }


def _here(mesh: MeshConfig) -> str:
    others = "".join(f" {axis}={getattr(mesh, axis)}" for axis in "ce" if getattr(mesh, axis) > 1)
    return f"p={mesh.p} d={mesh.d}{others} as in the input"


def _apply(options: Namespace, config: Config, planned: Config) -> None:
    """Write the input file of --apply with the mesh and parallel settings of the planned layout.

    Its first line is a comment with the command that trains with the file.
    """
    from hpc3d.config.load import load
    from hpc3d.config.resolve import resolve
    from hpc3d.console.small_files import naming
    from hpc3d.predict.planning.planned_layouts import input_with

    text = f"# {sanitized(_train_command(options))}\n{input_with(config, planned)}"
    with naming(options.apply):
        Path(options.apply).write_text(text, encoding="utf-8")
    resolve(load(options.apply, []), options.ranks)


def show(
    best: Sequence[RankedLayout],
    named: Mapping[str, Mapping[str, RankedLayout | str]],
    losers: Sequence[tuple[str, int, RankedLayout]],
    memory: float,
    mark: str = " ",
) -> None:
    """Print the best layouts, the best layout of each scheme, and why other layouts are slower.

    `mark` is printed before each of the best layouts.
    """
    from hpc3d.library.found_layouts import line, table
    from hpc3d.training.graphed_step import graph_in_words

    print(*table(best, mark), sep="\n")
    print("(comm.: exposed communication; axis: mesh axis with the longest waiting time)")
    if (first := best[0].config).train.backend == "cupy":
        print(f"CUDA graph of layout 1: {graph_in_words(first)}")
    if first.parallel.local_steps:
        workers = counted(first.workers, "worker")
        print(f"local updates: {workers} (mesh.d), as in the input; the step time is a mean")
    for where, rows in named.items():
        if all(isinstance(row, str) for row in rows.values()):
            schemes = ", ".join(rows)
            print(f"\nWith {where}, no layout of these schemes is valid: {schemes}")
            continue
        print(f"\nBest layout of each scheme, with {where}:")
        for name, row in rows.items():
            if isinstance(row, str):
                print(sanitized(f"{name}: none is valid; {row}"))
            else:
                print(f"{name}:\n   {mark}{line(row)}{_over(row, memory)}")
    print("\nWhy other layouts are slower (number of combinations, reason, best of the group):")
    print("(~: estimated from the simulation of one layer, the embedding and the head)")
    for reason, count, nearest in losers:
        print(f"{count:5d} {_because(reason, nearest)}")


def _show_search(found: Found, ranking: Ranking) -> None:
    """Print how many layouts the search excluded, considered, estimated and simulated."""
    sizes = len(found.timed) + len(found.cut) + len(found.left)
    print(
        f"\n{counted(found.considered, 'layout')}; {ranking.search.candidates.count:,} estimated, "
        f"{len(ranking.known)} simulated"
    )
    print(f"{counted(sizes, 'combination')} of mesh sizes and scheme:")
    print(f"{len(found.timed):5d} estimated: that of layout 1, and the groups above")
    print(f"{len(found.cut):5d} excluded by a lower bound on their step time")
    if found.left:
        print(f"{len(found.left):5d} less promising, skipped to save time")
    if line := ranking.search.unsearched:
        print(line)


def _train_command(options: Namespace) -> str:
    """Return the command that trains with the file of --apply.

    If the input is a run with checkpoints, the command resumes this run.
    """
    from hpc3d.checkpoints.sharded import steps_of

    command = ["mpirun", "-np", str(options.ranks), "python", "-m", "hpc3d.train", options.apply]
    config = Path(options.input)
    if config.name == "config.toml" and steps_of(config.parent / "checkpoints"):
        command += ["--resume", str(config.parent)]
    return shlex.join(command)


def _over(row: RankedLayout, memory: float) -> str:
    from hpc3d.predict.planning.planned_layouts import held

    return f": does not fit, {held(row)}" if row.peak > memory else ""


def _because(reason: str, row: RankedLayout) -> str:
    """Explain why a group of layouts is slower, citing its fastest layout."""
    from hpc3d.predict.planning.planned_layouts import held
    from hpc3d.predict.planning.ranking import shown_layout, written

    kind, _, axis = reason.partition(" ")
    again = written("recompute", row.config.parallel.recompute)
    texts = {
        "memory": lambda: f"memory limit exceeded: {held(row)}",
        "bubble": lambda: f"larger pipeline bubble: {row.bubble:.1%}",
        "compute": lambda: "longer computation: smaller GEMMs, or a larger optimizer update",
        "recompute": lambda: f"longer computation ({again})",
        "axis": lambda: f"longer waits on axis {axis}: {readable_time(row.waits[axis])}",
    }
    seconds = "~" * (not row.simulated) + readable_time(row.seconds)
    return f"{texts[kind]()}; {seconds} {shown_layout(row.config)}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
