"""Intervals around predicted step times, from the errors of predictions of published steps.

A machine file lists, for each kind of layout, the range of the ratio of published to predicted
step time. `python -m hpc3d.bench published` computes these ranges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc3d.console.command_line import readable_time
from hpc3d.model.families import family_of
from hpc3d.predict.machine.machine import LEAST_FOR_PERCENTILES

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.predict.machine.machine import Machine

_KINDS = {
    "context": "with context parallelism",
    "experts": "of mixtures of experts",
    "sharded": "with ZeRO 2 or 3",
    "replicated": "with ZeRO 0 or 1",
}


def kind_of_layout(config: Config) -> str:
    """Return the kind of a layout: context, experts, sharded (ZeRO 2 or 3) or replicated."""
    model = config.model
    if config.mesh.c > 1:
        return "context"
    if family_of(model).sizes(model, model.vocabulary).experts:
        return "experts"
    return "sharded" if config.parallel.zero > 1 else "replicated"


def interval(config: Config, machine: Machine, seconds: float) -> dict[str, Any] | None:
    """Return the interval of a predicted step time in seconds.

    Returns
    -------
    dict or None
        The kind of `layout`, the number of published `steps` with such a layout, and `low_s` and
        `high_s`, which contain 80 % of these steps if they are scaled to the prediction, or all of
        them if they are few. `None` if the machine file has no errors for this kind of layout.
    """
    kind = kind_of_layout(config)
    for errors in machine.errors:
        if errors.layout == kind:
            low, high = errors.low * seconds, errors.high * seconds
            return {"layout": kind, "steps": errors.steps, "low_s": low, "high_s": high}
    return None


def described(found: dict[str, Any], seconds: float) -> str:
    """Return the result of `interval` around a predicted step time in seconds as text."""
    low, high = readable_time(found["low_s"]), readable_time(found["high_s"])
    steps = f"{found['steps']} published step times {_KINDS[found['layout']]}"
    few = found["steps"] < LEAST_FOR_PERCENTILES
    if found["low_s"] > seconds:
        steps += f", {'all' if few else 'most'} of which are longer than predicted"
    return (
        f"{low} to {high} if the prediction error is in the {'range' if few else 'central 80 %'} "
        f"of the errors for {steps} (python -m hpc3d.bench published)"
    )
