"""Write tables, figures and an HTML page from the trace of one or several runs.

python -m hpc3d.report results/RUN
python -m hpc3d.report results/RUN-1D results/RUN-3D --out results/comparison
python -m hpc3d.report results/RUN --figures pdf --width 84mm
python -m hpc3d.report results/STUDY/runs/* --figures pdf --only loss,runs
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from hpc3d import trace
from hpc3d.analyze.export.formats import FORMATS, events_of, export
from hpc3d.analyze.metrics.wait_states import calls_of
from hpc3d.analyze.report import markdown, terminal
from hpc3d.analyze.report.figure_list import NAMES
from hpc3d.analyze.report.run_analysis import analyze_run, compare
from hpc3d.analyze.report.step_timeline import OTHERS
from hpc3d.analyze.report.write import clear, write
from hpc3d.config.argument_types import Joined, choice, figures, integer, real, several, width
from hpc3d.config.limits import INT32
from hpc3d.config.resolve import refuse
from hpc3d.console.command_line import Parser, run
from hpc3d.console.sanitize import reason_of, sanitized
from hpc3d.console.small_files import naming
from hpc3d.runtime.optional_packages import need
from hpc3d.trace.locate import NEWEST, trace_of

log = logging.getLogger("hpc3d.report")  # here, __name__ is "__main__"
_LONGEST = 50  # maximum number of characters of the other runs in the name of an output folder
_DIGITS = 6  # number of hexadecimal digits of the hash in this name

_DESCRIPTION = """\
Report the cost of a run from its trace: time, calls and bytes of a training step by phase, mesh
axis and operation, the time that ranks wait for each other, the critical path, memory by kind,
the loss, and the activity of each pipeline stage. If several runs are given, they are compared.

The command prints about a dozen lines and writes the full report to the output folder, where it
replaces an earlier report: report.html, a page that needs neither other files nor a network;
report.md; tables/ as CSV in SI units, Markdown and LaTeX; and, on request, figures/ as PNG, SVG
and PDF, and exports/ for other programs.

If the ranks have written new trace segments, they are merged into the trace first."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write a report; return 2 for invalid input."""
    options = parser().parse_args(argv)
    return run("report", lambda: _report(options))


def parser() -> Parser:
    """Return the command-line parser."""
    parser = Parser("report", _DESCRIPTION)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN_DIR|TRACE.h5", help="run folder or trace file")
    text = "run with which the others are compared (default: the first run)"
    add("--reference", type=Path, metavar="RUN_DIR|TRACE.h5", help=text)
    text = "output folder (default: RUN_DIR/report; for several runs,"
    text += " RUN_DIR/comparison-OTHERS-HASH of the first run)"
    add("--out", type=Path, metavar="DIR", help=text)
    text = "write only tables (requires no packages except NumPy and h5py)"
    add("--tables", action="store_true", help=text)
    text = "also write the figures as files in these formats: svg, pdf, png"
    many: dict[str, Any] = {"action": Joined, "default": []}
    add("--figures", type=figures, metavar="FORMAT,...", help=text, **many)
    text = "write only these figures as files: " + ", ".join(NAMES) + " (default: all)"
    names = partial(several, partial(choice, NAMES))
    add("--only", type=names, metavar="NAME,...", help=text, **many)
    text = "width of the figure files, such as 84mm or 3.3in (default: 7.2in)"
    add("--width", type=width, metavar="WIDTH", help=text)
    text = "training step to draw, from the newest trace of a run, or from TRACE.h5, such as"
    text += " RUN_DIR/trace-1.h5 of an earlier attempt (default: the step of median duration)"
    add("--step", type=integer(0, INT32), metavar="N", help=text)
    flops = real(lambda rate: 0 < rate < math.inf, "must be a positive rate, such as 1e12")
    add("--peak", type=flops, metavar="FLOPS", help="peak FLOP/s of one rank (for MFU and HFU)")
    text = "also export the events as perfetto, pipit, hta (Holistic Trace Analysis) or otf2"
    text += " (Vampir), with up to 400 bytes per event"
    formats = partial(several, partial(choice, [*FORMATS]))
    add("--export", type=formats, help=text, **many)
    text = "range of steps to export, or a single step (default: all steps)"
    add("--steps", type=_steps, default=(0, None), metavar="FIRST:LAST", help=text)
    add(
        "--merge",
        action="store_true",
        help="merge the trace segments again, even if trace.h5 exists",
    )
    add("--print", action="store_true", help="print all tables")
    add("--json", action="store_true", help="print all tables as one JSON object on the last line")
    return parser


def _steps(text):
    first, colon, last = text.partition(":")
    try:
        return int(first or 0), int(last) if last else None if colon else int(first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be a step or range, such as 3:5") from None


def _refuse(options):
    """Raise ValueError if options contradict each other or require a package that is missing."""
    if options.tables and options.figures:
        raise ValueError("--figures cannot be combined with --tables; omit one of them")
    if options.width and not options.figures:
        raise ValueError("--width is the width of figure files; add --figures pdf")
    if options.only and not options.figures:
        raise ValueError("--only selects figure files; add --figures pdf")
    if not options.tables:
        need("a report without --tables", "matplotlib", "jinja2", "bokeh")
    if "otf2" in options.export:
        need("--export otf2", "otf2")
    if options.reference not in (None, *options.runs):
        raise ValueError(f"--reference {options.reference}: name one of the runs of this report")
    files = [*map(_trace_file, options.runs)]
    again = (run for number, run in enumerate(options.runs) if files[number] in files[:number])
    refuse([f"{run}: this run was given twice; name it only once" for run in dict.fromkeys(again)])


def _trace_file(run):
    """Return the path that identifies the trace of a run, which may not be merged yet."""
    return (run / NEWEST if run.is_dir() else run).resolve()


def _default_folder(runs):
    """Return the default output folder, in the first run. Each selection of runs has its own."""
    files = [*map(_trace_file, runs)]
    folder = runs[0] if runs[0].is_dir() else runs[0].parent
    if len(runs) == 1:
        return folder / "report"
    others = "-".join(file.parent.name for file in files[1:])
    key = sha256("\n".join(map(str, files)).encode()).hexdigest()[:_DIGITS]
    return folder / f"comparison-{others[:_LONGEST]}-{key}"


def _report(options):
    _refuse(options)
    runs_in_order = sorted(options.runs, key=lambda run: run != options.reference)
    with ExitStack() as stack:
        paths = [_trace_path(path, options.merge) for path in runs_in_order]
        traces = [stack.enter_context(trace.open(path)) for path in paths]
        others, runs = 0 if options.tables else OTHERS, []
        for number, each in enumerate(traces, 1):
            log.info("reading run %d of %d", number, len(traces))
            runs.append(analyze_run(each, options.peak, options.step, others=others))
        report = compare(traces, runs)
        out = _cleared(options.out or _default_folder(options.runs))
        for number, each in enumerate(traces if options.export else (), 1):
            events = events_of(each, calls_of(each), *options.steps)
            name = str(number) if len(traces) > 1 else ""
            export(options.export, events, out / "exports" / name)
    with naming(out):
        write(report, out, options.tables, options.figures, options.width, options.only)
    if options.print:
        print(markdown.page(report))
    else:
        print(*map(sanitized, terminal.lines(report)), sep="\n")
    page = out if options.tables else out / "report.html"
    print(sanitized(f"written to {page}"))
    if options.json:
        print(json.dumps({"out": str(out), **_plain(report)}, allow_nan=False))


def _cleared(out):
    """Remove an earlier report from the output folder; return the folder."""
    try:
        clear(out)
    except OSError as error:
        raise ValueError(
            f"{out}: cannot write there ({reason_of(error)}); choose another folder with --out"
        ) from error
    return out


def _plain(report):
    """Return the tables of a report as JSON-compatible values."""
    keys = ("label", "run_id", "about", "missing", "violations")
    runs = [{**{key: getattr(run, key) for key in keys}, **run.tables} for run in report.runs]
    over = {key: rows for key, rows in report.tables.items() if key != "runs"}
    said = {"notes": report.notes, "differing": report.differing}
    return {"runs": runs, **said, "comparison": report.tables["runs"], **over}


def _trace_path(path, again):
    """Return the path of a run's trace, after merging its new segments into the trace."""
    if path.is_dir():
        return trace_of(path, again)
    if again:
        raise ValueError(f"{path}: --merge requires a run folder, not a trace file")
    return path


if __name__ == "__main__":
    sys.exit(main())
