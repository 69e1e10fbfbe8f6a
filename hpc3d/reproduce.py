"""Train the configuration of a run again, and compare the losses and the communicated bytes.

python -m hpc3d.reproduce RUN_DIR
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count, pairwise, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hpc3d.config.argument_types import real
from hpc3d.console import small_files
from hpc3d.console.command_line import Parser, complain, run
from hpc3d.console.exit_codes import CHECK_FAILED, FAILED
from hpc3d.console.sanitize import counted, sanitized

if TYPE_CHECKING:
    import numpy as np

    from hpc3d.config.input_file import Config

log = logging.getLogger("hpc3d.reproduce")  # here, __name__ is "__main__"

_DESCRIPTION = """\
Train the configuration of a run again, from the first step, with the same number of ranks, and
compare the results. RUN_DIR is the folder of a run, which may have been stopped early or resumed.
The second run is stored in a new folder. It has no trackers and no time limit.

The losses agree if their largest relative difference is at most --tolerance. On the same machine,
they are usually identical: training depends on the seed, not on time. The bytes that each rank
receives must be equal. They are not compared if the run was resumed or has no trace. The command
also lists the differences between the environments of the runs: versions, hardware, and hashes of
the data."""
_EXITS = (
    "exit codes: 0 losses and bytes agree, 1 training failed, 2 invalid input (explained on "
    "standard error), 3 losses or bytes differ"
)
_TOLERANCES = {"float64": 1e-10, "float32": 1e-4}  # of losses; 16-bit types: _COARSE
_COARSE = 1e-2
# Keys of environment.json that may always differ.
_VARYING = ("created_utc", "load", "other_cpu_share", "ranks")
# Keys of the configuration that do not affect the losses of a resumed run.
_NEUTRAL = ("train.steps ", "train.max_minutes ", "run.", "checkpoint.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 2 for invalid input, or 3 if the results differ."""
    options = parser().parse_args(argv)
    return run("reproduce", lambda: _reproduce(options))


def parser() -> Parser:
    """Return the command-line parser."""
    parser = Parser("reproduce", _DESCRIPTION, epilog=_EXITS)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN_DIR", help="folder of the run")
    text = "parent folder of the second run (default: the parent folder of RUN_DIR)"
    add("--out", type=Path, metavar="DIR", help=text)
    positive = real(lambda number: 0 <= number < 1, "must be a number from 0 to 1")
    text = "largest relative difference of losses (default: 1e-10 in float64, 1e-4 in float32, "
    text += "1e-2 in 16-bit types)"
    add("--tolerance", type=positive, metavar="X", help=text)
    text = "command that starts N ranks when followed by -n N (default: mpirun)"
    add("--launcher", type=shlex.split, default=[], metavar="COMMAND", help=text)
    add("--json", action="store_true", help="also print the results as JSON on the last line")
    return parser


def _reproduce(options: Namespace) -> int:
    from hpc3d.config.load import load, to_toml
    from hpc3d.library.launched_run import launched

    before = options.run.absolute()
    if not (before / "config.toml").is_file():
        raise ValueError(f"{before} is not the folder of a run; use the folder with config.toml")
    config = load(before / "config.toml", [], of_run=True)
    steps = _steps_to_repeat(before, config)
    ranks = config.grid().size
    log.info("training %s on %s", counted(steps, "step"), counted(ranks, "rank"))
    again = _without_side_effects(config, steps, options.out or before.parent)
    if threads := _environment(before).get("threads_per_rank"):
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    _bytes(before)  # raises ValueError, before the training, if the trace is damaged
    with TemporaryDirectory(prefix="hpc3d-") as scratch:
        source = Path(scratch, "config.toml")
        source.write_text(to_toml(again), encoding="utf-8")
        try:
            after = launched(ranks, [str(source)], options.launcher)
        except RuntimeError as error:
            complain("reproduce", [str(error)])
            return FAILED
    tolerance = options.tolerance
    if tolerance is None:
        tolerance = _TOLERANCES.get(config.train.dtype, _COARSE)
    found = compared(before, after, tolerance)
    print("\n".join(map(sanitized, _lines(before, found))))
    if options.json:
        print(json.dumps(found))
    return 0 if found["losses_agree"] and found["bytes_agree"] is not False else CHECK_FAILED


def _without_side_effects(config: Config, steps: int, out: Path) -> Config:
    """Return the configuration of the second run, without trackers and a time limit."""
    train = replace(config.train, steps=steps, max_minutes=0.0)
    own = replace(config.run, out=str(out.absolute()), trackers=(), metrics_hook=None)
    return replace(config, train=train, run=own)


def _steps_to_repeat(run: Path, config: Config) -> int:
    """Return the number of steps that a run has completed.

    Raises
    ------
    ValueError
        If the run cannot be repeated from its configuration.
    """
    losses = _losses(run)
    if config.torch.factory:
        raise ValueError(f"{run}: the run trains a PyTorch module; run command.txt again instead")
    if not losses:
        raise ValueError(f"{run}: the run has not completed a step; use another run")
    if min(losses) > 0:
        raise ValueError(
            f"{run}: the log starts at step {min(losses)}, so the run continued from other "
            "weights; use a run that starts at step 0"
        )
    return max(losses) + 1


def compared(before: Path, after: Path, tolerance: float) -> dict[str, Any]:
    """Compare two runs of the same configuration.

    Returns
    -------
    dict
        The folder of the second run, the number of steps that both have completed, the largest
        relative difference of their losses (None if only one of two losses is finite), the first
        step with a difference above the tolerance, and whether losses and bytes agree.
        `bytes_agree` is None if the bytes cannot be compared. `settings` has a line for each
        attempt of the first run that changed the settings.
    """
    old, new = _losses(before), _losses(after)
    steps = sorted({*old} & {*new})
    apart = {step: _difference(old[step], new[step]) for step in steps}
    finite = [each for each in apart.values() if each is not None]
    largest = max(finite) if len(finite) == len(apart) else None
    wrong = [step for step, each in apart.items() if each is None or each > tolerance]
    resumed = (before / "config-1.toml").exists()
    traffic = [None, None] if resumed else [_bytes(run) for run in (before, after)]
    known = all(each is not None for each in traffic)
    return {
        "folder": str(after),
        "steps": len(steps),
        "largest_difference": largest,
        "tolerance": tolerance,
        "first_different_step": wrong[0] if wrong else None,
        "settings": [*_settings(before)],
        "losses_agree": largest is not None and largest <= tolerance and {*old} == {*new},
        "bytes": int(traffic[1].sum()) if traffic[1] is not None else None,
        "bytes_agree": traffic[0].tolist() == traffic[1].tolist() if known else None,
        "environment": [*_changes(*(_environment(run) for run in (before, after)))],
    }


def _losses(run: Path) -> dict[int, float | None]:
    from hpc3d.runtime.metrics_file import read

    return {record["step"]: record["loss"] for record in read(run) if "loss" in record}


def _settings(run: Path) -> Iterator[str]:
    """Yield a line for each attempt of a resumed run that changed settings of the training."""
    import hpc3d.trace
    from hpc3d.analyze.attempts import Attempts
    from hpc3d.checkpoints.resume import changes
    from hpc3d.config.load import load

    earlier = (run / f"config-{number}.toml" for number in count(1))
    texts = [*takewhile(Path.is_file, earlier), run / "config.toml"]
    starts = {}
    if len(texts) > 1 and (run / "trace.h5").exists():
        with hpc3d.trace.open(run / "trace.h5") as trace:
            starts = {each.number: each.first for each in Attempts(trace).attempts}
    for number, pair in enumerate(pairwise(texts), 2):
        with suppress(ValueError):  # a damaged configuration of an earlier attempt
            lines = changes(*(load(text, [], of_run=True) for text in pair))
            found = [line for line in lines if not line.startswith(_NEUTRAL)]
            if found:
                where = f"at step {starts[number]}" if number in starts else "at a resume"
                yield f"{where}: {', '.join(found)}"


def _difference(old: float | None, new: float | None) -> float | None:
    if old is None or new is None:
        return 0.0 if old == new else None
    return abs(new - old) / max(abs(old), abs(new), sys.float_info.min)


def _bytes(run: Path) -> np.ndarray | None:
    """Return the bytes that each rank has received, or None if the run has no trace."""
    import numpy as np

    import hpc3d.trace
    from hpc3d.analyze.metrics.columns import with_label

    path = run / "trace.h5"
    if not path.exists():
        return None
    with hpc3d.trace.open(path) as trace:
        events = trace.events
        received = events["bytes"] * ~with_label(events, "op", ["send"])
        return np.bincount(events["rank"], received).astype(np.int64)


def _environment(run: Path) -> dict[str, Any]:
    path = run / "environment.json"
    if not path.is_file():
        return {}
    try:
        found = dict(json.loads(small_files.read(path)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a JSON object ({error}); restore or remove it") from None
    return {key: value for key, value in found.items() if key not in _VARYING}


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a line for each key of environment.json with different values."""
    for key in [*old, *(key for key in new if key not in old)]:
        values = old.get(key), new.get(key)
        if all(isinstance(value, dict) for value in values):
            yield from _changes(*values, f"{prefix}{key}.")
        elif values[0] != values[1]:
            yield f"{prefix}{key}: {values[0]} in the first run, {values[1]} in the second run"


def _lines(before: Path, found: Mapping[str, Any]) -> Iterator[str]:
    yield f"first run    {before}"
    yield f"second run   {found['folder']}"
    largest, steps = found["largest_difference"], counted(found["steps"], "step")
    if largest == 0:
        losses = "identical"
    elif largest is None:
        losses = "DIFFERENT: some losses are finite in one run only"
    else:
        verdict = "agree" if found["losses_agree"] else "DIFFERENT"
        losses = f"{verdict}, largest relative difference {largest:.2g}"
    if found["first_different_step"] is not None:
        losses += f", first in step {found['first_different_step']}"
    yield f"losses       {losses}, {steps}, tolerance {found['tolerance']:g}"
    if found["settings"]:
        new = "the second run uses the newest settings in all steps"
        yield f"settings     changed {'; '.join(found['settings'])}; {new}"
    agree = {True: "identical", False: "DIFFERENT", None: "not compared: resumed or no trace"}
    total = "" if found["bytes"] is None else f", {found['bytes']:,} bytes received in total"
    yield f"bytes        {agree[found['bytes_agree']]}{total}"
    changed = found["environment"]
    yield f"environment  {'; '.join(changed) if changed else 'identical'}"


if __name__ == "__main__":
    sys.exit(main())
