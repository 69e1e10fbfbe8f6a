"""Closed forms for the time of pipeline schedules, from the first pass of a step to the last.

They are equal to hpc3d.pipeline.timeline if all stages are equal.  If one stage has more work,
such as the stage with the head, the others wait for it.  It is busy except while the first
microbatch travels to it and the last one from it, and during messages that nothing hides.  The
bubbles are those given for each schedule in hpc3d.pipeline.schedule.

A closed form takes (micros, chunks, times) and requires two or more stages.
"""

from collections.abc import Sequence
from typing import NamedTuple


class StageTimes(NamedTuple):
    """Seconds of a microbatch on each stage, for all chunks together, and of a message.

    `weight` is 0 if the backward pass is not split.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]
    message: float = 0.0

    def work(self) -> list[float]:
        """Return the seconds of all passes of a microbatch, by stage."""
        return [sum(passes) for passes in zip(*self[:3])]

    def longest(self) -> int:
        """Return the stage with the most work."""
        work = self.work()
        return max(range(len(work)), key=work.__getitem__)


def _busy_and_fill(micros, times):
    """Return the busy seconds of the longest stage in a step, and the seconds of one microbatch on
    all other stages."""
    work, longest = times.work(), times.longest()
    return micros * work[longest], sum(work) - work[longest]


def all_forward_first(micros: int, chunks: int, times: StageTimes) -> float:
    """GPipe: stages wait for the longest forward pass, then for the longest backward pass."""
    _, fill = _busy_and_fill(micros, times)
    paces = max(times.forward) + max(times.backward)
    return micros * paces + fill + 2 * (len(times.forward) - 1) * times.message


def by_turns(micros: int, chunks: int, times: StageTimes) -> float:
    """1F1B: the period of the slowest stage or message loop, plus fill and exposed messages."""
    _, fill = _busy_and_fill(micros, times)
    shown = 2 * (len(times.forward) - min(micros, 2)) * times.message
    return micros * _period(times.work()[-micros:], times.message) + fill + shown


def _period(work, message):
    """Return the seconds between microbatches under 1F1B.

    The period is set by the busiest stage or by the longest loop, in which k stages have k
    microbatches in flight to the last stage and back.  `work` is the work of the last stages, at
    most one stage per microbatch.
    """
    tail, found = 0.0, 0.0
    for loop, seconds in enumerate(reversed(work), 1):
        tail += seconds
        found = max(found, seconds, (tail + 2 * (loop - 1) * message) / loop)
    return found


def of_chunks(micros: int, chunks: int, times: StageTimes) -> float:
    """Interleaved 1F1B: the fill is divided by the number of chunks."""
    busy, fill = _busy_and_fill(micros, times)
    return busy + fill / chunks + 2 * (chunks * len(times.forward) - 1) * times.message


def late_weights(late: int, micros: int, chunks: int, times: StageTimes) -> float:
    """ZB-H1 and ZB-H2: each stage defers `late` W per stage before it, and these fill the
    drain."""
    busy, _ = _busy_and_fill(micros, times)
    ahead, back, slack = _ways(times)
    count, weight = len(times.forward), times.weight[times.longest()]
    drain = max(0.0, back - min(micros - 1, late * (count - 1)) * weight)
    # The warm-up of ZB-H1 covers one round, not two, so stages wait for messages in every loop.
    loops = min(1, (micros - 1) / (count - 1)) if late == 1 else 0
    shown = times.message + loops * max(0.0, times.message - slack)
    return busy + ahead + drain + 2 * (count - 1) * shown


def down_and_up(micros: int, chunks: int, times: StageTimes) -> float:
    """ZB-V: W of later microbatches fill the bubble of one, fully if possible, for m >= 2p-1."""
    busy, _ = _busy_and_fill(micros, times)
    ahead, back, slack = _ways(times)
    count, weight = len(times.forward), times.weight[times.longest()]
    missing = max(0, 2 * count - 1 - micros) / (2 * count - 2)
    filled, left = max(ahead, back) / 2, ahead + back - (micros - 1) * weight
    bubble = max(filled, left) - missing * (count - 1) * slack
    shown = (5 * count - 7 + missing * (3 - count)) * times.message
    return busy + (max(0.0, bubble) + shown)


def _ways(times):
    """Return the seconds of a microbatch to and from the longest stage, and the slack.

    The slack is the excess of the work of the longest stage over the mean of the others.
    """
    longest = times.longest()
    ahead, back = (sum(each) - each[longest] for each in times[:2])
    work, (_, fill) = times.work(), _busy_and_fill(1, times)
    return ahead, back, work[longest] - fill / (len(work) - 1)
