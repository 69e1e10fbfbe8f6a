"""What the commands do, for Python: train, predict, plan and simulate, and what they find as
values.

Each raises ValueError with the lines that the command would print.  `options` are values of the
input file by key, as {"train.steps": 3, "mesh.x": 2}; `source` is a file, or the name of one that
comes with hpc3d.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc3d.config.load import literal
from hpc3d.shipped import DEFAULT_MACHINE

if TYPE_CHECKING:
    from hpc3d.analyze.opened_run import OpenedRun
    from hpc3d.library.found_layouts import FoundLayouts
    from hpc3d.library.stage_timeline import StageTimeline
    from hpc3d.library.step_prediction import StepPrediction
    from hpc3d.pipeline.ideal_run import Seconds

_TOP = 10  # layouts

Options = Mapping[str, Any]


def open_run(path: Path | str) -> OpenedRun:
    """The run in a folder results/NAME-STAMP, or of a trace; ValueError for any other path."""
    from hpc3d.analyze.opened_run import OpenedRun

    return OpenedRun(path)


def run_training(
    source: Path | str | None = None,
    options: Options | None = None,
    ranks: int = 1,
    out: Path | str = "results",
    resume: OpenedRun | Path | str | None = None,
) -> OpenedRun:
    """Train the input `source` (None: the default model) on so many ranks of this machine, by
    mpirun, into a new folder in `out`, and open the run.

    With `resume` that run goes on in its folder from its last checkpoint, on this or any other
    layout.  Blocks until the run has ended, and prints nothing: train.log in its folder has what
    the command prints.  An interrupt, as Ctrl-C or a notebook's button, ends the ranks.
    ValueError with what `train` refuses, RuntimeError if a rank or a check fails, with what it
    said and the exit code (README.md).
    """
    from hpc3d.library.launched_run import launched

    words = [] if source is None else [str(source)]
    if resume is None:
        words += ["--run.out", str(out)]
    else:
        words += ["--resume", str(getattr(resume, "folder", resume))]
    return open_run(launched(ranks, words + _words(options)))


def predict_step(
    source: Path | str | None = None,
    options: Options | None = None,
    ranks: int | None = None,
    machine: Path | str = DEFAULT_MACHINE,
) -> StepPrediction:
    """What a training step would cost on a machine, a file or a name of inputs/machines
    (docs/prediction.md).

    `ranks` may be any number; None is the product of [mesh].
    """
    from hpc3d.library.step_prediction import StepPrediction
    from hpc3d.predict.predicted_step import predicted_step

    return StepPrediction(predicted_step(source, _words(options), machine, ranks))


def find_layouts(
    source: Path | str,
    ranks: int,
    options: Options | None = None,
    machine: Path | str = DEFAULT_MACHINE,
    memory: float | None = None,
    top: int = _TOP,
) -> FoundLayouts:
    """The `top` layouts with the shortest steps on so many ranks of a machine, whose `memory` [B]
    a rank may fill (None: the machine's); where none fits as it is, with the first technique that
    helps (docs/planning.md).

    ValueError if none fits with any.
    """
    from hpc3d.library.found_layouts import FoundLayouts
    from hpc3d.predict.machine.machine_file import load
    from hpc3d.predict.planning.planned_layouts import plan_layouts

    for name, value in {"ranks": ranks, "top": top}.items():
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name} = {value!r}: must be a whole number, 1 or more")
    more = max(top, _TOP)  # what is first does not depend on how much is shown
    found = plan_layouts(source, _words(options), ranks, load(machine), memory, more)
    return FoundLayouts(*found, top)


def simulate_schedule(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    steps: int = 1,
    **times: Seconds,
) -> StageTimeline:
    """A pipeline schedule on an ideal clock: a pass starts when the one before it on its stage has
    ended and its input has come; messages never wait for each other (docs/schedules.md).

    `name` is one of `hpc3d.SCHEDULES`, or csv:FILE.  `times` are seconds of a microbatch on a
    stage: `forward`, `backward` (the part for the input) and `weight` (1 each), and `comm` of a
    message (0); or lists with a number for each part of the model, and for each border of `comm`.
    """
    from hpc3d.library.stage_timeline import StageTimeline
    from hpc3d.pipeline.ideal_run import ideal_run

    return StageTimeline(ideal_run(name, stages, microbatches, chunks, steps, times))


def _words(options: Options | None) -> list[str]:
    """Options as the words of a command line, where text stays text."""
    return [word for key, value in (options or {}).items() for word in (f"--{key}", _text(value))]


def _text(value: Any) -> str:
    """A value as TOML has it: what is no number, truth value, list or table is a text."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(int(value))  # NumPy's, too
    known = isinstance(value, bool | float | list | tuple | dict)
    return literal(value if known else str(value))
