"""Metrics of a run, stored in metrics.jsonl in the run folder as one JSON object per line.

The record of a training step has `step`, `steps` (of the run), `loss`, `learning_rate`,
`gradient_norm`, `tokens`, `seconds`, `tokens_per_s`, `communication` (fraction of the step time),
`peak_bytes` (maximum over ranks) and `time` (seconds since 1970).  A float16 run adds
`loss_scale`, the loss scale of the next step.  The record of an evaluation has `step` (the
preceding step), `validation_loss`, `perplexity`, `accuracy`, `evaluated_tokens`,
`evaluation_seconds` and `time`.  If there are several validation texts, `validation_loss` is the
mean of their losses, and `validation_loss/NAME` is the loss of one text.  A PyTorch module has no
`perplexity` and no `accuracy`, and its `evaluated_tokens` are samples.  Values that are
not finite are null.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from hpc3d.console.small_files import replacing
from hpc3d.runtime.trackers import InBackground, trackers_of

NAME = "metrics.jsonl"
VALIDATION_LOSS_OF = "validation_loss/"  # prefix of the keys of the losses of single texts
_MOST = 1e150  # largest valid absolute value, so that the product of two values does not overflow
_Record = dict[str, Any]
_Sink = Callable[[_Record], object]


class MetricsFile:
    """Writes the metrics of a run that starts or resumes after `start` completed steps.

    If the run is resumed, existing records of steps after `start` are removed.  Each new record is
    also passed to all `sinks`.  If a sink raises an exception, the exception is reported through
    `say` and the sink is disabled.
    """

    def __init__(
        self, folder: Path, start: int, sinks: Iterable[_Sink], say: Callable[[str], object]
    ) -> None:
        self.path = folder / NAME
        if self.path.exists():
            self._keep(start)
        self.file, self.sinks, self.say = self.path.open("a", encoding="utf-8"), [*sinks], say

    def _keep(self, start: int) -> None:
        """Remove the records of all steps after `start`; the file is replaced atomically."""
        with (
            self.path.open(encoding="utf-8", errors="replace") as lines,
            replacing(self.path) as kept,
            kept.open("w", encoding="utf-8") as file,
        ):
            for line in lines:
                record = _record(line) if line.endswith("\n") else None
                if record and record["step"] < start:
                    file.write(line)

    def write(self, **values: Any) -> None:
        record = {key: _finite(value) for key, value in values.items()} | {"time": time.time()}
        try:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
        except OSError as error:  # Python does not add the file name to write errors
            error.filename = str(self.path)
            raise
        for sink in [*self.sinks]:
            self._call(sink, partial(sink, record))

    def _call(self, sink: _Sink, function: Callable[[], object]) -> None:
        """Call a function of a sink; if it fails, report the error and disable the sink."""
        try:
            function()
        except Exception as error:  # user functions may raise anything
            self.sinks.remove(sink)
            self.say(
                f"metrics: {type(error).__name__}: {error}; this metrics sink is disabled for "
                "the rest of the run"
            )

    def end(self) -> None:
        """Wait until all trackers have received the records, and close them."""
        for sink in [*self.sinks]:
            self._call(sink, getattr(sink, "close", int))
        self.sinks = []


def read(folder: Path) -> list[_Record]:
    """Return the records that a run has written so far; an incomplete last line is ignored."""
    return MetricsReader(folder).more()[1]


class MetricsReader:
    """Reads the metrics of a run incrementally; `damaged` is the number of invalid lines."""

    def __init__(self, folder: Path) -> None:
        self.path, self.at, self.file, self.damaged = folder / NAME, 0, None, 0

    def more(self) -> tuple[bool, list[_Record]]:
        """Read the records written since the last call, except for an incomplete last line.

        Returns
        -------
        tuple
            A flag and the new records.  The flag is True if reading has restarted at the first
            record, because this is the first call or a resumed run has rewritten the file.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                anew = status.st_ino != self.file or status.st_size < self.at
                file.seek(0 if anew else self.at)
                whole = [line for line in file if line.endswith(b"\n")]
        except FileNotFoundError:
            return True, []
        self.at, self.file = (0 if anew else self.at) + sum(map(len, whole)), status.st_ino
        records = [record for record in map(_record, whole) if record]
        self.damaged = (0 if anew else self.damaged) + len(whole) - len(records)
        return anew, records


def _record(line: str | bytes) -> _Record | None:
    """Parse a line; return None if the line is invalid, for example because of a disk error.

    In a valid record, the step is an integer, and all values are valid numbers or `None`.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # ValueError includes invalid UTF-8
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    known = [value for value in record.values() if value is not None]
    sound = all(type(value) in (int, float) and abs(value) < _MOST for value in known)
    return record if sound else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sinks_of(
    hook: str | None,
    trackers: Iterable[str],
    folder: Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[_Sink]:
    """Return the optional sinks of a run's metrics: a user function and trackers.

    The trackers receive the `settings` of the run. If `folder` is `None`, they are checked, but
    not started. Raises ValueError if the function or a tracker is not available.
    """
    sinks = [_function(hook)] if hook else []
    kinds = trackers_of(trackers).values()
    if folder is not None:
        sinks += [InBackground(kind, folder, settings or {}) for kind in kinds]
    return sinks


def _function(hook: str) -> _Sink:
    """Import and return the user function `hook`, given as MODULE:FUNCTION."""
    module, _, name = hook.partition(":")
    # `python -m` adds the current folder to the import path, but the script `hpc3d` does not.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(import_module(module), name)
    except Exception as error:  # importing runs user code, which may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"run.metrics_hook = {hook!r}: {reason}; set it to an importable MODULE:FUNCTION"
        ) from None
    if not callable(found):
        raise ValueError(f"run.metrics_hook = {hook!r} is not a function; use MODULE:FUNCTION")
    return found
