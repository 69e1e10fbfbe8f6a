"""Division of a simulated step by sub-block of the model and phase (arXiv:2407.02081).

The time of a section is the sum of its computation, exposed communication and idle time. Exposed
communication is the time that a rank spends in calls within its pipeline stage. Idle time is the
time that a rank waits for other stages or for offloaded data.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc3d.predict.simulation.simulator import StageRun

_PHASES = {
    "forward": "forward",
    "recompute": "backward",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": "backward",
    "optimizer": "update",
}
_TIMES = ("computation_s", "communication_s", "idle_s")


def sections(run: StageRun, length: int) -> list[dict[str, Any]]:
    """Divide the step of a stage by part of the model and phase.

    `length` is the time in ns from the first start to the last end of the step on any stage.
    Returns one dict per part and phase, with the times in seconds, the FLOPs and the received
    bytes of a rank, and the bytes that the forward pass of a microbatch leaves allocated. The
    values of all dicts add up to those of the step. If blocks have owner ranks, the received bytes
    are those of the simulated rank that receives the most, as in `summary.moved`.
    """
    found: dict[tuple[str, str], Counter[str]] = {}
    account = [item for item in run.account.items() if item[0][-1] != "bytes"]
    account += [item for item in run.top_receiver.account.items() if item[0][-1] == "bytes"]
    for (part, phase, quantity), value in account:
        found.setdefault((part, _PHASES.get(phase, "other")), Counter())[quantity] += value
    for part, saved in run.saved.items():
        found.setdefault((part, "forward"), Counter())["saved"] += saved
    rest = length - (run.step[3] - run.step[2])  # before or after the step of this stage
    found.setdefault(("other", "other"), Counter()).update(time=rest, idle=rest)
    used = (
        item
        for item in sorted(found.items(), key=lambda item: [name.lower() for name in item[0]])
        if any(item[1].values())
    )
    return [_section(*key, counts) for key, counts in used]


def _section(part: str, phase: str, counts: Counter[str]) -> dict[str, Any]:
    calls, idle = counts["calls"], counts["idle"]
    times = counts["time"] - calls - idle, calls, idle
    found: dict[str, Any] = {"part": part, "phase": phase}
    found |= {name: each / 1e9 for name, each in zip(_TIMES, times, strict=True)}
    counted = {"flop": counts["flop"], "bytes": counts["bytes"], "saved_bytes": counts["saved"]}
    return found | counted


def time_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the computation, exposed communication and idle time of all sections in seconds."""
    return {name: sum(row[name] for row in rows) for name in _TIMES}
