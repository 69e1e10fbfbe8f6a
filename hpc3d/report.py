"""Reports from traces: tables and figures of one run or of several side by side.

python -m hpc3d.report results/RUN
python -m hpc3d.report results/RUN-1D results/RUN-3D --out results/comparison
"""

import argparse
import csv
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from hpc3d import trace
from hpc3d.analyze.figures import draw_loss
from hpc3d.analyze.gantt import draw_gantt
from hpc3d.analyze.pipeline import observe
from hpc3d.analyze.tables import comparison_rows, distinct, median_step, summarize
from hpc3d.trace.merge import merge

DESCRIPTION = """\
Report what a run cost, from its trace: time, calls and bytes of a training step by phase, mesh
axis and operation, memory by kind, and the loss; of a pipeline also what each stage did. Several
runs are also compared with each other.

The report is printed and written to the output folder: report.md, loss.png, pipeline.png (a step
above its schedule on an ideal clock), and every table as CSV in SI units. The trace is merged
first if the run has only its ranks' segments yet."""


class Field(NamedTuple):
    """A column of a printed table: the key of the rows, the heading, and how to write a value."""

    key: str
    heading: str
    write: Callable = str


def _milliseconds(value):
    return f"{value * 1e3:,.2f}"


def _percent(value):
    return f"{value:.1%}"


def _count(value):
    return f"{value:,.1f}"


def _prefixed(value):
    """Four digits and an SI prefix: 12345678 is 12.35 M."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g} {prefix}"
    return f"{value:.4g}"


RUNS = (
    Field("run", "run"),
    Field("ranks", "ranks", "{:d}".format),
    Field("step_s_median", "step [ms]", _milliseconds),
    Field("tokens_per_s", "tokens/s", _prefixed),
    Field("communication_share", "communication", _percent),
    Field("communication_calls", "calls", _count),
    Field("communication_bytes", "received [B]", _prefixed),
    Field("loss", "last loss [nat]", "{:.6f}".format),
    Field("loss_difference", "loss difference [nat]", "{:.1e}".format),
)
STEP = (
    Field("steps", "steps", "{:d}".format),
    Field("step_s_min", "min [ms]", _milliseconds),
    Field("step_s_median", "median [ms]", _milliseconds),
    Field("step_s_max", "max [ms]", _milliseconds),
    Field("forward_s", "forward [ms]", _milliseconds),
    Field("backward_s", "backward [ms]", _milliseconds),
    Field("tokens_per_s", "tokens/s", _prefixed),
    Field("communication_share", "communication", _percent),
)
TIME = (
    Field("category", "category"),
    Field("phase", "phase"),
    Field("axis", "axis"),
    Field("op", "operation"),
    Field("seconds", "time [ms]", _milliseconds),
    Field("share", "share", _percent),
    Field("calls", "calls", _count),
    Field("bytes", "received [B]", _prefixed),
    Field("flop_per_s", "rate [flop/s]", _prefixed),
)
PASSES = """\
Step {step}, which took the median time, on the first rank of each stage; simulated is its schedule
on an ideal clock. In flight: microbatches and chunks from F to the end of B."""
PIPELINE = (
    Field("stage", "stage", "{:d}".format),
    Field("ranks", "ranks", "{:d}".format),
    Field("passes", "passes", "{:d}".format),
    Field("forward_s", "F [ms]", _milliseconds),
    Field("backward_s", "BW [ms]", _milliseconds),
    Field("input_s", "B [ms]", _milliseconds),
    Field("weight_s", "W [ms]", _milliseconds),
    Field("idle_share", "idle", _percent),
    Field("idle_share_simulated", "idle, simulated", _percent),
    Field("in_flight", "in flight", "{:d}".format),
    Field("in_flight_simulated", "in flight, simulated", "{:d}".format),
)
MEMORY = (
    Field("kind", "kind"),
    Field("peak", "highest peak [B]", _prefixed),
    Field("rank", "on rank", "{:d}".format),
)


def main(argv=None):
    """Print and write a report; the exit code is 2 for what cannot be reported."""
    options = _parser().parse_args(argv)
    try:
        _report(options)
    except (ValueError, OSError) as error:
        print(f"hpc3d.report: {error}", file=sys.stderr)
        return 2
    return 0


def _parser():
    parser = argparse.ArgumentParser(
        "python -m hpc3d.report",
        description=DESCRIPTION,
        epilog="exit codes: 0 good, 2 bad input (one line on stderr says what)",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN_DIR|TRACE.h5", help="a run, or its trace")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="output folder (default: RUN_DIR/report, of the first run)",
    )
    add("--merge", action="store_true", help="merge the segments again, even if trace.h5 exists")
    add("--json", action="store_true", help="print all tables as one JSON object on the last line")
    return parser


def _report(options):
    found, panels = zip(*(_read(path, options.merge) for path in options.runs))
    runs = distinct(found)
    comparison = comparison_rows(runs)
    out = options.out or _run_dir(options.runs[0]) / "report"
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(runs, comparison)
    print(text)
    figures = _draw(runs, panels, out)
    page = "\n".join([text, *(f"![{title}]({name})\n" for name, title in figures.items())])
    (out / "report.md").write_text(page, encoding="utf-8")
    _write_csv(out / "runs.csv", comparison)
    for table in ("time", "memory", "loss", "pipeline"):
        rows = [{"run": run.label} | row for run in runs for row in getattr(run, table)]
        if rows or table != "pipeline":
            _write_csv(out / f"{table}.csv", rows)
    print(f"written to {out}")
    if options.json:
        tables = {"runs": [asdict(run) for run in runs], "comparison": comparison}
        print(json.dumps({"out": str(out), **tables}, allow_nan=False))


def _read(path, again):
    """The Run of a trace, and the panels of its pipeline if it is one."""
    with trace.open(_trace_path(path, again)) as opened:
        run = summarize(opened)
        rows, panels = observe(opened, median_step(opened))
        return replace(run, pipeline=rows), panels


def _draw(runs, panels, out):
    """Draw the loss, and the pipeline of each run that is one; {file: title}."""
    draw_loss(runs, out / "loss.png")
    figures = {"loss.png": "Loss by training step"}
    for number, (run, above) in enumerate(zip(runs, panels), 1):
        if above:
            name = f"pipeline-{number}.png" if len(runs) > 1 else "pipeline.png"
            figures[name] = f"Pipeline of {run.label}"
            draw_gantt(above, out / name)
    return figures


def _trace_path(path, again):
    """The trace of a run, merged now if it was not before."""
    if path.is_dir():
        merged = path / "trace.h5"
        return merge(path) if again or not merged.exists() else merged
    if again:
        raise ValueError(f"{path}: --merge wants the folder of a run")
    return path


def _run_dir(path):
    return path if path.is_dir() else path.parent


def markdown(runs, comparison):
    """The report as Markdown that reads well as plain text, too."""
    sections = ["# Report", "Calls, times and bytes are means a rank and step."]
    sections += ["## Runs", _table(RUNS, comparison)]
    for run in runs:
        sections += [f"## {run.label}", f"Run {run.run_id}.", *_incomplete(run)]
        sections += ["### Step", _table(STEP, run.step)]
        sections += ["### Time of a step", _table(TIME, run.time)]
        sections += [*_pipeline(run), "### Memory", _table(MEMORY, run.memory)]
    return "\n\n".join(sections) + "\n"


def _incomplete(run):
    lines = [f"* {line}" for line in run.missing]
    return ["The trace is incomplete; missing are:", "\n".join(lines)] if lines else []


def _pipeline(run):
    if not run.pipeline:
        return []
    rows = run.pipeline
    known = [field for field in PIPELINE if any(row[field.key] is not None for row in rows)]
    return ["### Pipeline", PASSES.format(step=rows[0]["step"]), _table(known, rows)]


def _table(fields, rows):
    columns = [_column(field, [row[field.key] for row in rows]) for field in fields]
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns))


def _column(field, values):
    """Heading, rule and cells of one width, text to the left and numbers to the right."""
    cells = [field.heading, *("-" if value is None else field.write(value) for value in values)]
    width = max(map(len, cells))
    if field.write is str:
        rule, adjust = "-" * width, str.ljust
    else:
        rule, adjust = "-" * (width - 1) + ":", str.rjust
    heading, *cells = [adjust(cell, width) for cell in cells]
    return [heading, rule, *cells]


def _write_csv(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0] if rows else ())
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
