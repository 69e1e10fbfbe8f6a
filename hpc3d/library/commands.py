"""What the commands do, for Python: train, predict and plan, and what they find as values.

Each raises ValueError with the line that the command would print.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc3d.analyze.opened_run import OpenedRun
from hpc3d.plain import Problems

_KEPT = re.compile(r"^run kept in (.+)$", re.MULTILINE)
_SAID = re.compile(r"^hpc3d\.train: (?!\d+ s: )(.+)$", re.MULTILINE)
_MACHINE = "h100"

Options = Mapping[str, Any]


def open_run(path: Path | str) -> OpenedRun:
    """The run in a folder results/NAME-STAMP, or of a trace; ValueError where there is none."""
    return OpenedRun(path)


def run_training(
    source: Path | str | None = None,
    options: Options | None = None,
    ranks: int = 1,
    out: Path | str = "results",
) -> OpenedRun:
    """Train the input `source` (a file or a shipped name; None: the default model) on so many
    ranks of this machine, by mpirun, with `options` such as {"train.steps": 3}, and open the run.

    Blocks until it has ended.  ValueError with what `train` refuses, or why a rank failed.
    """
    words = [*([] if source is None else [str(source)]), *_words(options), "--run.out", str(out)]
    command = [sys.executable, "-m", "hpc3d.train", *words]
    if ranks > 1:
        command = [_mpirun(), "-np", str(ranks), *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    kept = _KEPT.search(done.stdout)
    if done.returncode or not kept:
        raise Problems(_SAID.findall(done.stderr) or [done.stderr.strip()[-2000:]])
    return OpenedRun(kept[1])


def predict_step(
    source: Path | str | None = None,
    options: Options | None = None,
    ranks: int | None = None,
    machine: str = _MACHINE,
) -> dict[str, Any]:
    """What a training step would cost on a machine: `step_time_s`, `tokens_per_s`, `bubble`,
    `communication` (a share), `mfu`, `memory` [B] and `bytes` by axis and operation, as
    `python -m hpc3d.simulate --json` has them (docs/prediction.md)."""
    from hpc3d.predict.machine.machine_file import load
    from hpc3d.predict.simulation.simulator import load_resolved, simulate
    from hpc3d.predict.simulation.summary import summary

    config = load_resolved(source, _words(options), ranks)
    known = load(machine)
    return summary(simulate(config, config.model.vocabulary, known), config, known)


def find_layouts(
    source: Path | str,
    ranks: int,
    options: Options | None = None,
    machine: str = _MACHINE,
    memory: float | None = None,
    top: int = 10,
) -> list[dict[str, Any]]:
    """The layouts with the shortest steps on so many ranks of a machine, whose `memory` [B] a rank
    may fill (None: the machine's), as `python -m hpc3d.plan --json` has them: `layout` (tables of
    an input file), `step_time_s`, `simulated`, `bubble`, `communication`, `peak_bytes`; none where
    none fits (docs/planning.md)."""
    from hpc3d.predict.machine.machine_file import load
    from hpc3d.predict.planning.ranked_layouts import allowed, as_plain, ranked

    known = load(machine)
    config = allowed(source, _words(options))
    _, ranking = ranked(config, ranks, known, memory or known.memory_gb * 1e9, max(top, 10))
    return [as_plain(row) for row in ranking.best(top)[:top]]


def _words(options: Options | None) -> list[str]:
    """Options as the words of a command line."""
    from hpc3d.config.load import literal

    return [
        word
        for key, value in (options or {}).items()
        for word in (f"--{key}", value if isinstance(value, str) else literal(value))
    ]


def _mpirun() -> str:
    """The launcher on PATH, or that of this Python's environment."""
    beside = Path(sys.executable).parent / "mpirun"
    found = shutil.which("mpirun") or (str(beside) if beside.is_file() else None)
    if found is None:
        raise ValueError("there is no mpirun: pip install 'hpc3d[mpi]' brings one")
    return found
