"""Reports from traces: tables, figures and a page of one run or of several side by side.

python -m hpc3d.report results/RUN
python -m hpc3d.report results/RUN-1D results/RUN-3D --out results/comparison
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hpc3d import trace
from hpc3d.analyze.export.formats import FORMATS, events_of, export
from hpc3d.analyze.metrics.wait_states import calls_of
from hpc3d.analyze.report import markdown, terminal
from hpc3d.analyze.report.run_analysis import analyze_run, compare
from hpc3d.analyze.report.step_timeline import OTHERS
from hpc3d.analyze.report.write import clear, write
from hpc3d.console.command_line import Parser, run
from hpc3d.console.sanitize import reason_of, sanitized
from hpc3d.runtime.optional_packages import need
from hpc3d.trace.locate import trace_of
from hpc3d.trace.segment import naming

log = logging.getLogger("hpc3d.report")  # as a command __name__ is another

_DESCRIPTION = """\
Report what a run cost, from its trace: time, calls and bytes of a training step by phase, mesh
axis and operation, who waited for whom, the critical path, memory by kind, and the loss; of a
pipeline also what each stage did. Several runs are also compared with each other.

A dozen lines are printed, the whole report is written to the output folder: report.html, one page
that needs no other file and no network; report.md; figures/ as PNG and SVG; tables/ as CSV in SI
units, Markdown and LaTeX; and, on request, exports/ for other programs. A report that lies there
is replaced.
The trace is merged first if the ranks have written more than it has."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write a report; return 2 for invalid input."""
    options = _parser().parse_args(argv)
    return run("report", lambda: _report(options))


def _parser():
    parser = Parser("report", _DESCRIPTION)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN_DIR|TRACE.h5", help="a run, or its trace")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="output folder (default: RUN_DIR/report, of the first run)",
    )
    add("--tables", action="store_true", help="no figures and no page: needs NumPy and h5py only")
    add("--step", type=int, help="the step to be drawn (default: one that took the median time)")
    add("--peak", type=_peak, metavar="FLOPS", help="FLOP/s of one rank at best: gives MFU")
    add(
        "--export",
        type=_formats,
        default=[],
        metavar="FORMAT,...",
        help="also write the events for Perfetto (perfetto), Pipit (pipit) and Holistic Trace"
        " Analysis (hta), which are large: up to 400 bytes an event; and for Vampir (otf2)",
    )
    add(
        "--steps",
        type=_steps,
        default=(0, None),
        metavar="FIRST:LAST",
        help="the steps to be exported, or the only one (default: all)",
    )
    add("--merge", action="store_true", help="merge the segments again, even if trace.h5 exists")
    add("--print", action="store_true", help="print all tables, and not a dozen lines")
    add("--json", action="store_true", help="print all tables as one JSON object on the last line")
    return parser


def _peak(text):
    try:
        peak = float(text)
    except ValueError:
        peak = math.nan
    if not 0 < peak < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give FLOP/s, such as 1e12")
    return peak


def _formats(text):
    formats = text.split(",")
    if wrong := set(formats) - FORMATS.keys():
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: not one of {', '.join(FORMATS)}")
    return formats


def _steps(text):
    first, several, last = text.partition(":")
    try:
        return int(first or 0), int(last) if last else None if several else int(first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: give FIRST:LAST, such as 3:5") from None


def _report(options):
    if not options.tables:
        need("a report without --tables", "matplotlib", "jinja2", "bokeh")
    if "otf2" in options.export:
        need("--export otf2", "otf2")
    with ExitStack() as stack:
        paths = [_trace_path(path, options.merge) for path in options.runs]
        traces = [stack.enter_context(trace.open(path)) for path in paths]
        others, runs = 0 if options.tables else OTHERS, []
        for number, each in enumerate(traces, 1):
            log.info("reading run %d of %d", number, len(traces))
            runs.append(analyze_run(each, options.peak, options.step, others=others))
        report = compare(traces, runs)
        out = _cleared(options.out or _run_dir(options.runs[0]) / "report")
        for each, name in zip(traces, _folders(report)):
            if options.export:
                events = events_of(each, calls_of(each), *options.steps)
                export(options.export, events, out / "exports" / name)
    with naming(out):
        write(report, out, options.tables)
    print(
        markdown.page(report)
        if options.print
        else "\n".join(map(sanitized, terminal.lines(report)))
    )
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
            f"{out}: cannot write there ({reason_of(error)}); name another folder with --out"
        ) from error
    return out


def _folders(report):
    """Return the subfolder of each run in exports/."""
    return [str(n) if len(report.runs) > 1 else "" for n in range(1, 1 + len(report.runs))]


def _plain(report):
    """Return the tables of a report as values for JSON."""
    keys = ("label", "run_id", "about", "missing", "violations")
    runs = [{**{key: getattr(run, key) for key in keys}, **run.tables} for run in report.runs]
    over = {key: rows for key, rows in report.tables.items() if key != "runs"}
    said = {"notes": report.notes, "differing": report.differing}
    return {"runs": runs, **said, "comparison": report.tables["runs"], **over}


def _trace_path(path, again):
    """Return the trace of a run, after merging segments that it lacks."""
    if path.is_dir():
        return trace_of(path, again)
    if again:
        raise ValueError(f"{path}: --merge wants the folder of a run")
    return path


def _run_dir(path):
    return path if path.is_dir() else path.parent


if __name__ == "__main__":
    sys.exit(main())
