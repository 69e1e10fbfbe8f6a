"""Output of a report as files: report.md, report.html, tables/ and figures/."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpc3d.analyze.report import figure_list, html, markdown, plot_matplotlib, table_format
from hpc3d.analyze.report.comparison_tables import RUN, over_runs
from hpc3d.analyze.report.figure_list import NAMES
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


def write(
    report: Report,
    out: Path,
    tables_only: bool = False,
    formats: Sequence[str] = (),
    width: float | None = None,
    only: Sequence[str] = (),
) -> None:
    """Write the page of a report first, and then its other files.

    Parameters
    ----------
    tables_only
        If true, only report.md and the tables are written.
    formats
        Formats of the figure files, such as svg and pdf. The page is written again with the images
        for printing if the formats include png or svg.
    width, only
        Width of the figure files in inches, and the names of the figures (default: all NAMES).

    Raises
    ------
    ValueError
        If the runs have no figure with one of the names in `only`. All other files are written.
    """
    found = [] if tables_only else _pictures(report)
    named = {name: each for pictures in found for name, each in pictures.items()}
    kinds = {name: name.partition("-")[0] for name in named}
    drawn = {name: named[name] for name in named if formats and kinds[name] in (only or NAMES)}
    images = [each for each in html.IMAGES if each in formats]
    out.mkdir(parents=True, exist_ok=True)
    if found:
        _write_page(report, found, out)
    _write_tables(report, out / "tables")
    shown = [markdown.image(f"{name}.{images[0]}", drawn[name]) for name in drawn if images]
    (out / "report.md").write_text(markdown.page(report, shown), encoding="utf-8")
    _draw(drawn, out / "figures", formats, width)
    if drawn and images:
        _write_page(report, found, out)
    if absent := [each for each in only if each not in kinds.values()]:
        raise ValueError(f"--only {','.join(absent)}: these runs have no such figure")


def _draw(pictures, folder, formats, width):
    for number, (name, picture) in enumerate(pictures.items(), 1):
        log.info("drawing figure %d of %d", number, len(pictures))
        folder.mkdir(exist_ok=True)
        figure = plot_matplotlib.draw(picture.chart, width)
        plot_matplotlib.save(figure, folder / name, formats)


def _write_page(report, found, out):
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
    found = [{each.name: each for each in figure_list.of_runs(report)}]
    for number, run in enumerate(report.runs, 1):
        suffix = f"-{number}" if len(report.runs) > 1 else ""
        found.append({each.name + suffix: each for each in figure_list.of_run(run)})
    return found
