"""Run or simulate all points of a parameter study, and tabulate the results.

python -m hpc3d.sweep STUDY.toml --list
python -m hpc3d.sweep STUDY.toml
"""

from __future__ import annotations

import logging
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from hpc3d.config.argument_types import FIGURES, Joined, figures, integer, width
from hpc3d.console.command_line import Parser, complain, run
from hpc3d.console.exit_codes import FAILED
from hpc3d.console.sanitize import Problems, counted, lines_of
from hpc3d.library.launched_run import launched
from hpc3d.runtime.mpi_launcher import launch_command
from hpc3d.studies.sweep_points import MOST_POINTS, SweepPoint, points_of

log = logging.getLogger("hpc3d.sweep")  # here, __name__ is "__main__"

_JOB = Path("jobs", "sweep.sbatch")
_DESCRIPTION = """\
Run all points of a parameter study, and tabulate the results. STUDY.toml is an input file with an
additional table [sweep], which lists the values of some keys:

    [sweep]
    ranks = 2
    seed = [1, 2, 3]
    model.hidden = [64, 128]
    layouts = [
        { label = "1-D", parallel.scheme = "1d", mesh.x = 2, mesh.y = 1, mesh.z = 1 },
        { label = "data parallel", mesh.d = 2, mesh.x = 1, mesh.y = 1, mesh.z = 1 },
    ]

Each combination of the values is a point: 12 points in this example. A list of tables is an axis
that sets several keys together. `repetitions` is the number of runs of each combination. `ranks`
is the number of ranks. If `machine` is set, the points are simulated on this machine
instead of trained. --sweep.KEY A,B,C sets an axis on the command line.

If an axis or a point is invalid, nothing is run. Finished points are not run again, so repeat the
command to continue after an interruption; a run with a checkpoint is resumed. A failed point
is reported, and the remaining points are run.

The output folder contains runs.csv and runs.h5, with one row per run; summary.csv, summary.md and
summary.tex, with means and 95 % confidence intervals over seeds and repetitions; the figure
summary.png, .svg and .pdf, if an axis is numeric; and the run folders in runs/."""
_EXITS = "exit codes: 0 success, 1 a point failed, 2 invalid input (explained on standard error)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 if a point failed, or 2 for invalid input."""
    options, overrides = parser().parse_known_args(argv)
    return run("sweep", lambda: _sweep(options, overrides))


def parser() -> Parser:
    """Return the command-line parser."""
    usage = "%(prog)s STUDY.toml [options] [--section.key value ...] [--sweep.KEY A,B,C ...]"
    parser = Parser("sweep", _DESCRIPTION, epilog=_EXITS, usage=usage)
    add = parser.add_argument
    add("study", type=Path, metavar="STUDY.toml", help="input file with a table [sweep]")
    text = "output folder (default: results/STUDY)"
    add("--out", type=Path, metavar="DIR", help=text)
    only = parser.add_mutually_exclusive_group()
    text = "only list the points, and the sbatch command that runs them as a job array"
    only.add_argument("--list", action="store_true", help=text)
    text = "only run point K, without writing tables (for job arrays)"
    only.add_argument("--point", type=integer(0, MOST_POINTS - 1), metavar="K", help=text)
    text = "only write the tables of the finished points"
    only.add_argument("--table", action="store_true", help=text)
    text = "formats of the figure: svg, pdf, png (default: all)"
    form = "FORMAT,..."
    add("--figures", type=figures, action=Joined, default=FIGURES, metavar=form, help=text)
    text = "width of the figure, such as 84mm or 3.3in (default: 7.2in)"
    add("--width", type=width, metavar="WIDTH", help=text)
    text = "command that starts N ranks when followed by -n N (default: mpirun)"
    add("--launcher", type=shlex.split, default=[], metavar="COMMAND", help=text)
    return parser


def _sweep(options: Namespace, overrides: Sequence[str]) -> int:
    points = points_of(options.study, overrides)
    folder = options.out or Path("results", options.study.stem)
    if options.list:
        _list(points, folder, _words(options, overrides))
        return 0
    chosen = points
    if options.point is not None:
        if options.point >= len(points):
            raise ValueError(f"--point {options.point}: the last point is {len(points) - 1}")
        chosen = [points[options.point]]
    failed = 0 if options.table else _run(chosen, folder, options.launcher)
    if options.point is None and failed < len(points):
        _tabulate(points, folder, options)
    return FAILED if failed else 0


def _words(options: Namespace, overrides: Sequence[str]) -> str:
    """Return the arguments that select the study and its output folder, quoted for a shell."""
    out = ["--out", str(options.out)] if options.out else []
    return shlex.join([str(options.study), *out, *overrides])


def _list(points: Sequence[SweepPoint], folder: Path, words: str) -> None:
    from hpc3d.studies.sweep_results import finished

    done = [finished(point, folder) is not None for point in points]
    for point, is_done in zip(points, done, strict=True):
        print(f"{point.number:5d}  {'finished' if is_done else 'unfinished':10}  {point}")
    print(f"{counted(len(points), 'point')}, {sum(done)} finished")
    ranks = max(point.ranks for point in points)
    array = f"--array=0-{len(points) - 1} --ntasks={ranks}"
    print(f"as a job array: sbatch {array} {_JOB} {words}")
    if not _JOB.exists():
        print(f"{_JOB} is not in this folder: python -m hpc3d.init FOLDER copies it to FOLDER")


def _run(points: Sequence[SweepPoint], folder: Path, launcher: Sequence[str]) -> int:
    """Run the unfinished points, and return the number of points that failed."""
    from hpc3d.studies.sweep_results import finished

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the ranks as on Ctrl-C
    trained = [point for point in points if point.machine is None and not finished(point, folder)]
    if trained and not launcher:  # report a missing launcher once, before the first point
        launch_command(max(point.ranks for point in trained))
    failed = 0
    for point in points:
        if finished(point, folder):
            continue
        print(f"point {point.number}: {point}", flush=True)
        log.info("point %d of 0 to %d", point.number, points[-1].number)
        try:
            _finish(point, folder, launcher)
        except (ValueError, RuntimeError) as error:
            complain("sweep", [f"point {point.number}: {line}" for line in lines_of(error)])
            failed += 1
    return failed


def _finish(point: SweepPoint, folder: Path, launcher: Sequence[str]) -> None:
    """Simulate or train a point; resume a run that has a checkpoint."""
    from hpc3d.studies.sweep_results import finished, interrupted, simulate, write_input

    if point.machine is not None:
        simulate(point, folder)
        return
    resumed = interrupted(point, folder)
    words = ["--resume", str(resumed)] if resumed else [str(write_input(point, folder))]
    launched(point.ranks, words, launcher)
    if not finished(point, folder):
        raise RuntimeError("the run stopped before its last step; repeat the command to continue")


def _tabulate(points: Sequence[SweepPoint], folder: Path, options: Namespace) -> None:
    """Write and print the tables of the finished points."""
    from hpc3d.studies.sweep_results import finished, row_of
    from hpc3d.studies.sweep_table import write

    rows = [row_of(point, path) for point in points if (path := finished(point, folder))]
    if not rows:
        raise Problems([f"{folder}: no point is finished; run the study without --table"])
    axes = {
        axis: [*dict.fromkeys(point.values[axis] for point in points)] for axis in points[0].values
    }
    print(write(rows, axes, folder, options.figures, options.width))
    if left := len(points) - len(rows):
        print(f"{counted(left, 'point')} not finished")
    print(f"written to {folder}/runs.* and {folder}/summary.*")


if __name__ == "__main__":
    sys.exit(main())
