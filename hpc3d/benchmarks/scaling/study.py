"""Predict and measure the scaling of tensor parallelism: the command `bench scaling`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc3d.benchmarks import harness
from hpc3d.benchmarks.scaling import growth, scaling_rows, scaling_table
from hpc3d.benchmarks.scaling.points import SCHEMES, Point, points
from hpc3d.config.argument_types import Joined, choice, number_of_ranks, positive, several
from hpc3d.config.load import load
from hpc3d.config.package_data import shipped
from hpc3d.console.command_line import Parser
from hpc3d.console.sanitize import Problems, counted
from hpc3d.predict.machine import machine_file

if TYPE_CHECKING:
    from argparse import Namespace

    from hpc3d.config.input_file import Config
    from hpc3d.predict.machine.machine import Machine

_DESCRIPTION = """\
Tabulate how the step time of tensor parallelism grows with the number of ranks, in the form of
arXiv:2105.14450: the forward and backward time of a step, the time per sequence, the bytes that
rank 0 receives, the peak memory of a rank, and the growth of the time per sequence.

In weak scaling (the default), the hidden size and the batch size grow with the cube root of the
number of ranks; the input contains their values for the largest number of ranks. In strong
scaling, they are constant. All sizes are rounded to multiples of the number of ranks.

With --machine, the rows are predicted. With --measure, they are measured on this machine. With
--runs, they are read from the runs of jobs/weak-scaling.sbatch or jobs/strong-scaling.sbatch.
The options can be combined.

With --grow, the table also contains the fitted exponents of time, received bytes and peak memory,
and the theoretical exponent of the received bytes. Tokens, hidden size and layers grow on the
largest number of ranks; ranks grow as in weak scaling.

The table (CSV, Markdown, LaTeX) and the figure (SVG, PDF, PNG) are
written to DIR/scaling."""
_RANKS = "1,4,8,16,27,36,64"
_INPUT = "gpt-3d-64.toml"
_ROUNDS = 6  # minimum number of runs for a confidence interval of the median


def parser() -> Parser:
    """Return the command-line parser of `bench scaling`."""
    usage = "%(prog)s [options] [--section.key value ...]"
    parser = Parser("bench scaling", _DESCRIPTION, usage=usage)
    add = parser.add_argument
    text = f"model for the largest number of ranks (default: inputs/{_INPUT})"
    add("--input", type=Path, metavar="INPUT.toml", help=text)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--weak", action="store_true", help="weak scaling (default)")
    kind.add_argument("--strong", action="store_true", help="strong scaling")
    text = "quantity that grows"
    kind.add_argument(
        "--grow", choices=growth.QUANTITIES, metavar="|".join(growth.QUANTITIES), help=text
    )
    text = f"numbers of ranks (default: {_RANKS})"
    numbers = partial(several, number_of_ranks)
    add("--ranks", type=numbers, action=Joined, default=_RANKS, help=text)
    text = f"schemes (default: all: {', '.join(SCHEMES)})"
    add(
        "--schemes",
        action=Joined,
        type=partial(several, partial(choice, SCHEMES)),
        default=",".join(SCHEMES),
        help=text,
    )
    text = "predict the rows on this machine (the name or path of a machine file)"
    add("--machine", metavar="NAME|FILE", help=text)
    text = "measure the rows on this machine"
    add("--measure", action="store_true", help=text)
    text = f"number of runs per measured row (default: {_ROUNDS})"
    add("--rounds", type=positive, default=_ROUNDS, metavar="N", help=text)
    text = "read the measured rows from the run folders in DIR"
    add("--runs", type=Path, metavar="DIR", help=text)
    text = "folder for the table, the figure and the runs (default: results)"
    add("--out", type=Path, default=Path("results"), metavar="DIR", help=text)
    add("--json", action="store_true", help="print one JSON object on the last line")
    return parser


def main(options: Namespace, overrides: Sequence[str]) -> None:
    """Print and write the table of a scaling study."""
    if not (options.machine or options.measure or options.runs):
        raise Problems(["scaling: use --machine NAME, --measure or --runs DIR"])
    config = load(options.input or shipped(_INPUT), overrides)
    machine = machine_file.load(options.machine) if options.machine else None
    wanted = machine or options.measure
    found, missing = _placed(options, config, machine) if wanted else ([], [])
    table = [scaling_rows.predicted(point, config, machine) for point in found] if machine else []
    folder = options.out / "scaling"
    busy = {}
    if options.measure:
        with harness.watched() as busy:
            table += _measured(found, options, overrides, folder / "runs")
    if options.runs:
        table += scaling_rows.recorded(options.runs)
    table = scaling_table.with_growth(table)
    _print(options, table, missing)
    if options.json:
        print(json.dumps({"rows": table, "missing": missing, **busy}))


def _print(options: Namespace, table: Sequence[dict[str, Any]], missing: Sequence[str]) -> None:
    """Print and write the table, the combinations that are impossible, and the findings."""
    grow, weak = options.grow, not options.strong
    name = grow or ("weak" if weak else "strong")
    scaling_table.write(table, name, options.out / "scaling", figure=grow in (None, "ranks"))
    print(scaling_table.text(table, name), *missing, sep="\n")
    if grow:
        print(growth.table(growth.exponents(table, grow)))
    else:
        print(*scaling_table.findings(table, weak), sep="\n")
    print(f"written to {options.out / 'scaling' / name}.*")


def _placed(
    options: Namespace, config: Config, machine: Machine | None
) -> tuple[list[Point], list[str]]:
    """Return the points with their meshes, and a line for each combination that is impossible."""
    grow = options.grow if options.grow != "ranks" else None
    ranks = [max(options.ranks)] if grow else sorted(options.ranks)
    weak, shared = not options.strong, options.grow is None
    found, missing = points(config, ranks, options.schemes, weak, shared)
    placed = []
    for point in found:
        try:
            placed.append(scaling_rows.with_mesh(point, config, machine))
        except ValueError as error:
            reason = str(error).splitlines()[0]
            missing.append(
                f"{point.scheme}: not possible on {counted(point.ranks, 'rank')}: {reason}"
            )
    if grow:
        placed = [each for point in placed for each in growth.grown(point, grow)]
    return placed, missing


def _measured(
    found: Sequence[Point], options: Namespace, overrides: Sequence[str], folder: Path
) -> list[dict[str, Any]]:
    """Run each point `--rounds` times, all points in each round, and return the measured rows."""
    path = str(options.input or shipped(_INPUT))
    runs: dict[Point, list[Path]] = {point: [] for point in found}
    for number in range(options.rounds):
        for point, folders in runs.items():
            print(
                f"round {number + 1}: {point.scheme}, {counted(point.ranks, 'rank')}", flush=True
            )
            words = [path, *overrides, *point.options()]
            folders.append(harness.run(point.ranks, words, str(folder))["folder"])
    return [scaling_rows.measured(point, folders) for point, folders in runs.items()]
