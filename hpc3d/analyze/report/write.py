"""Output of a report as files: report.md, report.html, tables/ and figures/."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hpc3d.analyze.report import figure_list, html, markdown, plot_matplotlib, table_format
from hpc3d.analyze.report.comparison_tables import RUN, over_runs
from hpc3d.analyze.report.run_tables import OF_A_RUN

if TYPE_CHECKING:
    from hpc3d.analyze.report.run_analysis import Report

log = logging.getLogger(__name__)

_FILES, _FOLDERS = ("report.html", "report.md"), ("figures", "tables", "exports")


def clear(out: Path) -> None:
    """Remove an earlier report from a folder, and create the folder if it does not exist."""
    if (out / "report.md").is_file():
        for name in _FILES:
            (out / name).unlink(missing_ok=True)
        for name in _FOLDERS:
            if (out / name).exists():
                shutil.rmtree(out / name)
    out.mkdir(parents=True, exist_ok=True)


def write(report: Report, out: Path, tables_only: bool = False) -> None:
    """Write all files of a report, or only report.md and the tables if `tables_only`."""
    _write_tables(report, out / "tables")
    found = [] if tables_only else _pictures(report)
    images = [markdown.image(name, each) for named in found for name, each in named.items()]
    text = "\n".join([markdown.page(report), *images])
    (out / "report.md").write_text(text, encoding="utf-8")
    if found:
        (out / "figures").mkdir(exist_ok=True)
        pictures = [each for named in found for each in named.items()]
        for number, (name, picture) in enumerate(pictures, 1):
            log.info("drawing figure %d of %d", number, len(pictures))
            plot_matplotlib.save(plot_matplotlib.draw(picture.chart), out / "figures" / name)
        log.info("writing the page")
        page = html.page(report, found, out / "figures")
        (out / "report.html").write_text(page, encoding="utf-8")


def _write_tables(report, folder):
    """Write all nonempty tables. Each table contains the rows of all runs."""
    folder.mkdir(parents=True, exist_ok=True)
    for spec in over_runs([run.label for run in report.runs]):
        if rows := report.tables[spec.name]:
            table_format.write(spec, rows, folder)
    for spec in OF_A_RUN:
        rows = [{"run": run.label} | row for run in report.runs for row in run.tables[spec.name]]
        if rows:
            several = (RUN,) * (len(report.runs) > 1)
            table_format.write(spec._replace(fields=several + spec.fields), rows, folder)


def _pictures(report):
    """Return dicts from file name to figure: one dict for the comparison, then one per run."""
    found = [{each.name: each for each in figure_list.of_runs(report.runs, report.tables)}]
    for number, run in enumerate(report.runs, 1):
        suffix = f"-{number}" if len(report.runs) > 1 else ""
        found.append({each.name + suffix: each for each in figure_list.of_run(run)})
    return found
