"""Locate the trace of a run; merge its segments first if the trace is missing or outdated."""

from __future__ import annotations

from pathlib import Path

from hpc3d.console.small_files import read
from hpc3d.trace.merge import merge
from hpc3d.trace.previous_attempts import latest_with_steps
from hpc3d.trace.reader import Trace
from hpc3d.trace.segment import count_segments
from hpc3d.trace.trace_config import configured

NEWEST = "trace.h5"  # name of the trace of a run's newest attempt


def trace_of(run_dir: Path | str, again: bool = False) -> Path:
    """Return the path of a run's trace file.

    The segments are merged first if the trace lacks any of them, or if `again` is true.
    Raises ValueError if the folder has neither segments nor a trace.
    """
    path, segments = Path(run_dir) / NEWEST, count_segments(run_dir)
    if not segments and (again or not path.exists()):
        raise ValueError(_absent(Path(run_dir)))
    return path if path.exists() and not again and _has(path, segments) else merge(run_dir)


def _has(path, segments):
    """Return True if a trace was merged from at least as many segments as exist now."""
    with Trace(path) as trace:
        return trace.attrs.get("segments", 0) >= sum(segments.values())


def _absent(run_dir):
    """Return an error message that states why a folder has no trace, and how to obtain one."""
    if (run_dir / NEWEST).exists():
        return f"{run_dir}: no segments to merge; omit --merge to use the existing trace.h5"
    if count_segments(run_dir.absolute().parent):
        return f"{run_dir}: a folder of trace segments; specify its parent folder"
    settings = run_dir / "config.toml"
    if not settings.is_file():
        study = any(run_dir.glob("runs/*/config.toml"))
        runs = f"its runs, {run_dir}/runs/*" if study else "one, such as results/NAME-STAMP"
        return f"{run_dir}: not a run folder; specify {runs}"
    if configured(read(settings).decode(errors="replace"), "trace", "enabled") is False:
        return f"{run_dir}: no trace was recorded; set trace.enabled = true and run again"
    if before := latest_with_steps(run_dir):
        return f"{run_dir}: no trace of this attempt yet; use an earlier attempt's trace, {before}"
    return (
        f"{run_dir}: no trace yet; segments are written after 30 s and one step, or at the end of "
        "the run; wait if the run is active, or start it again if it was killed"
    )
