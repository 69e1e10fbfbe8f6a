"""Python counterparts of the commands `train`, `simulate` and `plan`, for notebooks and scripts.

For invalid input, each function raises a ValueError that contains the error lines of the command.
`options` maps input keys to values, for example {"train.steps": 3, "mesh.x": 2}, and overrides the
input file.  `source` is the path of an input file, or the name of an input shipped with hpc3d.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from hpc3d.config.load import literal
from hpc3d.config.package_data import DEFAULT_MACHINE

if TYPE_CHECKING:
    from hpc3d.analyze.opened_run import OpenedRun
    from hpc3d.library.found_layouts import FoundLayouts
    from hpc3d.library.stage_timeline import StageTimeline
    from hpc3d.library.step_prediction import StepPrediction
    from hpc3d.pipeline.ideal_run import Seconds

_TOP = 10  # default number of layouts

_Options = Mapping[str, Any]
_P = ParamSpec("_P")


def open_run(path: Path | str) -> OpenedRun:
    """Open a measured or simulated run.

    Parameters
    ----------
    path
        Run folder, such as results/NAME-STAMP, or the path of a trace.h5 file.

    Returns
    -------
    OpenedRun
        The run, whose tables and figures are computed on access.

    Raises
    ------
    ValueError
        If the path is neither a run folder nor a trace, or if the trace is damaged.
    """
    from hpc3d.analyze.opened_run import OpenedRun

    return OpenedRun(path)


def run_training(
    source: Path | str | None = None,
    options: _Options | None = None,
    ranks: int = 1,
    out: Path | str = "results",
    resume: OpenedRun | Path | str | None = None,
    quiet: bool = False,
) -> OpenedRun:
    """Train a model with mpirun on this machine.

    The call prints the log of the run and blocks until it ends. Ctrl-C terminates the ranks.

    Parameters
    ----------
    source, options
        Same as for `predict_step`.
    ranks, out
        Number of ranks, and parent folder of the new run folder.
    resume
        Run or run folder to resume from its last checkpoint. The layout may differ.
    quiet
        If true, nothing is printed; the log is only in train.log in the run folder.

    Returns
    -------
    OpenedRun
        The finished run.

    Raises
    ------
    ValueError
        If `train` rejects the input.
    RuntimeError
        If a rank or a run-time check fails.  The message contains the output and the exit code.
    """
    from hpc3d.library.launched_run import launched

    run = getattr(resume, "folder", resume)
    where = ["--run.out", out] if run is None else ["--resume", run]
    words = [str(word) for word in (source, *where) if word is not None]
    return open_run(launched(ranks, words + _words(options), quiet=quiet))


def predict_step(
    source: Path | str | None = None,
    options: _Options | None = None,
    ranks: int | None = None,
    machine: Path | str = DEFAULT_MACHINE,
) -> StepPrediction:
    """Predict the time, memory and communication of a training step on a machine.

    Parameters
    ----------
    source
        Input file, or the name of an input that comes with hpc3d (None: the default model).
    options
        Values that override input keys, such as {"train.steps": 3, "mesh.x": 2}.
    ranks
        Number of ranks (None: the product of the sizes in [mesh], if the input sets x, y or z).
    machine
        Machine file, or the name of a machine in inputs/machines.

    Returns
    -------
    StepPrediction
        The values of `python -m hpc3d.simulate --json`; times in s, sizes in B.

    Raises
    ------
    ValueError
        If the input is invalid, or the machine file does not exist.
    """
    from hpc3d.library.step_prediction import StepPrediction
    from hpc3d.predict.predicted_step import predicted_step

    return StepPrediction(predicted_step(source, _words(options), machine, ranks))


def _ranks_may_be_second(function: Callable[_P, FoundLayouts]) -> Callable[_P, FoundLayouts]:
    """Return `function`, which then also accepts the earlier order: source, ranks, options."""
    any_order: Callable[..., FoundLayouts] = function

    @wraps(function)
    def call(*given: _P.args, **named: _P.kwargs) -> FoundLayouts:
        if len(given) > 1 and isinstance(given[1], Integral):
            names = "source", "ranks", "options", "machine", "memory", "top"
            return any_order(**dict(zip(names, given)), **named)
        return function(*given, **named)

    return call


@_ranks_may_be_second
def find_layouts(
    source: Path | str,
    options: _Options | None = None,
    ranks: int = 0,
    machine: Path | str = DEFAULT_MACHINE,
    memory: float | None = None,
    top: int = _TOP,
) -> FoundLayouts:
    """Find the layouts with the shortest step times (docs/planning.md).

    Parameters
    ----------
    source, options, machine
        Same as for `predict_step`, but `source` is required.
    ranks
        Number of ranks (required).
    memory
        Memory per rank in B (None: the value in the machine file).
    top
        Maximum number of layouts to return.

    Returns
    -------
    FoundLayouts
        The layouts, fastest first. They use a memory-saving technique if none fits without one.

    Raises
    ------
    ValueError
        If the input is invalid, or no layout fits in memory with any technique.
    """
    from hpc3d.library.found_layouts import FoundLayouts
    from hpc3d.predict.machine.machine_file import load
    from hpc3d.predict.planning.planned_layouts import plan_layouts

    for name, value in {"ranks": ranks, "top": top}.items():
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name} = {value!r}: must be a positive integer")
    more = max(top, _TOP)  # rank at least this many, so that a small `top` cannot change the order
    found = plan_layouts(source, _words(options), ranks, load(machine), memory, more)
    return FoundLayouts(*found, top)


def simulate_schedule(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    steps: int = 1,
    memory: int | None = None,
    **times: Seconds,
) -> StageTimeline:
    """Simulate a pipeline schedule with ideal timing (docs/schedules.md).

    Parameters
    ----------
    name
        Schedule name from `hpc3d.SCHEDULES`, csv:FILE for a CSV file, or search for a search.
    stages, microbatches
        Number of pipeline stages, and of microbatches per step.
    chunks, steps
        Model chunks per stage, and training steps (for asynchronous schedules).
    memory
        For a search, the maximum number of microbatches with saved data on a stage.
    **times
        Seconds per microbatch and stage: `forward`, `backward` (input gradient) and `weight`
        (weight gradient), 1 by default; and `comm` (time of a message), 0 by default.  A list
        sets one value per model chunk, or for `comm` one per boundary between chunks.

    Returns
    -------
    StageTimeline
        Makespan, bubble, peak numbers of saved activations, and the diagram.

    Raises
    ------
    ValueError
        If the schedule does not exist or does not support the sizes.
    """
    from hpc3d.library.stage_timeline import StageTimeline
    from hpc3d.pipeline.ideal_run import ideal_run

    return StageTimeline(ideal_run(name, stages, microbatches, chunks, steps, times, memory))


def _words(options: _Options | None) -> list[str]:
    """Convert options to arguments `--section.key VALUE`, with each VALUE in TOML syntax."""
    return [word for key, value in (options or {}).items() for word in (f"--{key}", _text(value))]


def _text(value: Any) -> str:
    """Format a value as TOML; values of unsupported types become strings."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(int(value))  # also converts NumPy integers
    known = isinstance(value, bool | float | list | tuple | dict)
    return literal(value if known else str(value))
