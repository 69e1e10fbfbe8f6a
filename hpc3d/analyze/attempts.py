"""Attempts of a resumed run, combined into one sequence of steps and evaluations.

The first start of a run and each resumption are attempts. An attempt begins with the step after
the checkpoint that it loads, and supersedes this step and all later steps of earlier attempts.
Every step therefore counts once. The values come from the traces of all attempts and from
metrics.jsonl, which also contains steps that no trace recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpc3d.analyze.metrics.parallel_layout import configured_layout, layout_of
from hpc3d.analyze.metrics.pipeline_step import valid_config
from hpc3d.analyze.metrics.step import evaluation_rows, loss_rows, ratio
from hpc3d.console.small_files import read
from hpc3d.runtime import metrics_file
from hpc3d.runtime.metrics_file import VALIDATION_LOSS_OF
from hpc3d.trace.locate import NEWEST
from hpc3d.trace.previous_attempts import earlier_traces
from hpc3d.trace.reader import Trace

_LOSS = {"loss": "loss", "grad_norm": "gradient_norm", "seconds": "seconds"}
_EVALUATION = {
    "loss": "validation_loss",
    "accuracy": "accuracy",
    "tokens": "evaluated_tokens",
    "seconds": "evaluation_seconds",
    "perplexity": "perplexity",
}
_TEXT = dict.fromkeys(("accuracy", "tokens", "perplexity"))  # values that no record contains


class Attempt(NamedTuple):
    """Attempt of a run, from its trace, or from metrics.jsonl if it was killed without a trace.

    `losses` are the rows of the steps that this attempt trained, in ascending order, and
    `evaluations` those of its evaluations. `tokens` is the number of tokens per step.
    """

    number: int
    file: str
    layout: str
    ranks: int | None
    losses: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    tokens: float

    @property
    def first(self) -> int:
        """Return the first step of this attempt."""
        return self.losses[0]["step"]


class Attempts:
    """Attempts of a run, from the first to the newest.

    Parameters
    ----------
    trace
        Trace of the newest attempt. If it is not the trace.h5 of a run folder, it is treated as
        the only attempt.
    """

    def __init__(self, trace: Trace) -> None:
        folder = trace.path.parent
        is_newest = trace.path.name == NEWEST
        aside = earlier_traces(folder) if is_newest else {}
        starts = [*folder.glob("config-*.toml")] if is_newest else []
        self.records = metrics_file.read(folder) if is_newest else []
        self.number = 1 + max([len(starts), *aside.values()])
        found, seen = [], set[tuple[int, int]]()
        for path, number in reversed(aside.items()):
            with suppress(ValueError), Trace(path) as earlier:  # a damaged trace is omitted
                found.append(_attempt(earlier, number, seen))
        found.append(_attempt(trace, self.number, seen))
        self.attempts = [each for each in found if each.losses]
        if self.attempts and self.attempts[0].number == 2:
            first = _first_attempt(self.records, self.attempts[0].first, folder)
            self.attempts = [*first, *self.attempts]

    def losses(self) -> list[dict[str, Any]]:
        """Return one row per step of the run with its loss, gradient norm and time in seconds.

        If the run was resumed, `attempt` is the number of the attempt that trained the step, or
        None if this is unknown, and `superseded` lists the earlier attempts that also trained it.
        """
        rows = self._combined("losses", "loss", _LOSS)
        resumed = len(self.attempts) > 1
        for row in rows:
            others = [each.number for each in self.attempts if row["step"] in _steps(each)]
            others = [number for number in others if number != row["attempt"]]
            row["superseded"] = ", ".join(map(str, others)) or None if resumed else None
        return rows

    def evaluations(self) -> list[dict[str, Any]]:
        """Return one row per evaluation of the run, in ascending order of steps.

        `texts` contains a row for each of several validation texts.
        """
        return self._combined("evaluations", "validation_loss", _EVALUATION)

    def _combined(self, rows_of, key, columns):
        """Combine the rows of all attempts and the records of metrics.jsonl that have `key`.

        Rows of a trace take precedence, so that the time of a step has one source. A record with
        another loss replaces a row of an earlier attempt, because the newest attempt to train the
        step may have recorded no trace.
        """
        found: dict[int, dict[str, Any]] = {}
        for attempt in self.attempts:
            found = {step: row for step, row in found.items() if step < attempt.first}
            number = attempt.number if self.number > 1 else None
            rows = getattr(attempt, rows_of)
            found |= {row["step"]: row | {"attempt": number} for row in rows}
        newest = {row["step"] for row in getattr(self.attempts[-1], rows_of)}
        for record in self.records:
            step = record["step"]
            if key in record and step not in newest:
                row, known = _row(record, columns), found.get(step)
                if not known or not _close(known["loss"], row["loss"]):
                    found[step] = row | {"attempt": self._untraced(step)}
        return [found[step] for step in sorted(found)]

    def _untraced(self, step: int) -> int | None:
        """Return the newest attempt if it began before `step`, which its trace lacks."""
        return self.number if self.number > 1 and step > self.attempts[-1].first else None

    def table(self) -> list[dict[str, Any]]:
        """Return one row per attempt of a resumed run, and no rows if it was not resumed.

        `from` and `to` are the first and the last step that the attempt trained. The steps from
        `superseded` on were trained again by a later attempt. `step_s` is the median step time,
        without the first step of the attempt, which is a warmup.
        """
        if len(self.attempts) < 2:
            return []
        rows = []
        for index, each in enumerate(self.attempts):
            again = min((later.first for later in self.attempts[index + 1 :]), default=None)
            last, seconds = each.losses[-1]["step"], _steady_seconds(each.losses)
            row = {"attempt": each.number, "layout": each.layout, "ranks": each.ranks}
            row |= {"first": each.first, "last": last}
            row["superseded"] = again if again is not None and again <= last else None
            row |= {"step_s": seconds, "tokens_per_s": ratio(each.tokens, seconds)}
            rows.append(row | {"file": each.file})
        return rows


def _row(record: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a record of metrics.jsonl as a row of the losses or evaluations of an attempt."""
    row = {"step": record["step"]}
    row |= {name: record.get(field) for name, field in columns.items()}
    return row | {"texts": _text_rows(record)} if columns is _EVALUATION else row


def _first_attempt(records: Sequence[dict[str, Any]], end: int, folder: Path) -> Iterator[Attempt]:
    """Yield the first attempt if it was killed before it wrote a trace, from metrics.jsonl.

    `end` is the first step of the second attempt. The layout comes from config-1.toml.
    """
    records = [each for each in records if each["step"] < end]
    steps = [each for each in records if "loss" in each]
    if steps:
        losses = [_row(each, _LOSS) for each in steps]
        evaluations = [_row(each, _EVALUATION) for each in records if "validation_loss" in each]
        tokens = steps[-1].get("tokens") or 0.0
        layout = _stored_layout(folder / "config-1.toml")
        yield Attempt(1, "no trace", *layout, losses, evaluations, tokens)


def _stored_layout(path: Path) -> tuple[str, int | None]:
    """Return the layout and the number of ranks in the configuration of a run, if known."""
    with suppress(ValueError):
        config = valid_config(read(path).decode())
        is_resolved = config and None not in (config.mesh.x, config.mesh.y, config.mesh.z)
        if is_resolved and not config.torch.factory:  # its stages may have unequal replicas
            sizes = config.sizes()
            return configured_layout(config, sizes).label, prod(sizes.values())
    return "layout unknown", None


def _text_rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each of several validation texts in a record of metrics.jsonl."""
    losses = {key: loss for key, loss in record.items() if key.startswith(VALIDATION_LOSS_OF)}
    step, names = record["step"], (key.removeprefix(VALIDATION_LOSS_OF) for key in losses)
    return [
        {"text": name, "step": step, "loss": loss, **_TEXT}
        for name, loss in zip(names, losses.values())
    ]


def resumes(rows: Sequence[dict[str, Any]]) -> dict[int, str]:
    """Return a dict from the first step after each resume to a label of the resume.

    The label contains the layout if it changed. `rows` is the result of `Attempts.table`.
    """
    found: dict[int, str] = {}
    for before, row in pairwise(rows):
        found = {step: text for step, text in found.items() if step < row["first"]}
        changed = row["layout"] != before["layout"]
        text = f"attempt {row['attempt']}"
        found[row["first"]] = f"{text}: {row['layout']}" if changed else text
    return found


def trace_with(path: Path, step: int) -> Path:
    """Return the trace of the newest attempt that completed `step`, or `path` if none did."""
    if path.name == NEWEST:
        for each in (path, *earlier_traces(path.parent)):
            with suppress(ValueError), Trace(each) as trace:
                if (trace.steps["step"] == step).any():
                    return each
    return path


def _attempt(trace: Trace, number: int, seen: set[tuple[int, int]]) -> Attempt:
    """Return the attempt of a trace, which may also contain steps of earlier attempts.

    These steps are copies with the same start time. `seen` holds the pairs (step, start time) of
    all earlier attempts; the pairs of this attempt are added to it.
    """
    steps, first = np.unique(trace.steps["step"], return_index=True)
    pairs = zip(steps.tolist(), trace.steps["t_start"][first].tolist())
    own = {pair[0] for pair in pairs if pair not in seen}
    seen |= {*zip(steps.tolist(), trace.steps["t_start"][first].tolist())}
    tokens = trace.steps["tokens"][first]
    return Attempt(
        number,
        trace.path.name,
        layout_of(trace).label,
        trace.attrs["world_size"],
        [row for row in loss_rows(trace) if row["step"] in own] if len(steps) else [],
        [row for row in evaluation_rows(trace) if row["step"] in own],
        float(np.median(tokens)) if len(steps) else 0.0,
    )


def _steps(attempt: Attempt) -> range:
    return range(attempt.first, attempt.losses[-1]["step"] + 1)


def _steady_seconds(rows: Sequence[dict[str, Any]]) -> float | None:
    known = [row["seconds"] for row in rows[1:] or rows if row["seconds"] is not None]
    return float(np.median(known)) if known else None


def _close(one: float | None, other: float | None) -> bool:
    """Return True if two losses are equal up to the rounding of a mean over ranks."""
    if one is None or other is None:
        return one is other
    return abs(one - other) <= 1e-12 * abs(other)
