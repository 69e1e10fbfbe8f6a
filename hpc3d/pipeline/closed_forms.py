"""The time of pipeline schedules in closed forms, from the first pass of a step to its last.

They are those of hpc3d.pipeline.timeline where all stages are equal; where one has more to do, as
that with the head of a model has, the others wait for it: it is busy but for the way of the first
microbatch to it and of the last one from it, and for messages that nothing hides.  The bubbles
are those that hpc3d.pipeline.schedule tells of each schedule.

A form takes (micros, chunks, times), of two stages or more.
"""

from collections.abc import Sequence
from typing import NamedTuple


class StageTimes(NamedTuple):
    """Seconds of a microbatch on each stage, all chunks together (`weight` is 0 where backward is
    whole), and of a message."""

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]
    message: float = 0.0

    def work(self) -> list[float]:
        """Seconds of all passes of a microbatch, by stage."""
        return [sum(passes) for passes in zip(*self[:3])]

    def longest(self) -> int:
        """The stage with most to do."""
        work = self.work()
        return max(range(len(work)), key=work.__getitem__)


def _busy_and_fill(micros, times):
    """Seconds of the longest stage in a step, and of a microbatch on all others."""
    work, longest = times.work(), times.longest()
    return micros * work[longest], sum(work) - work[longest]


def all_forward_first(micros: int, chunks: int, times: StageTimes) -> float:
    """GPipe: the stages wait for the longest forward pass, then for the longest backward pass."""
    _, fill = _busy_and_fill(micros, times)
    paces = max(times.forward) + max(times.backward)
    return micros * paces + fill + 2 * (len(times.forward) - 1) * times.message


def by_turns(micros: int, chunks: int, times: StageTimes) -> float:
    """1F1B."""
    _, fill = _busy_and_fill(micros, times)
    shown = 2 * (len(times.forward) - min(micros, 2)) * times.message
    return micros * _period(times.work()[-micros:], times.message) + fill + shown


def _period(work, message):
    """Seconds between microbatches under 1F1B: the busiest stage's, or those of the longest loop,
    in which k stages have k microbatches in flight to the last stage and back; `work` is that
    of the last stages, no more than there are microbatches."""
    tail, found = 0.0, 0.0
    for loop, seconds in enumerate(reversed(work), 1):
        tail += seconds
        found = max(found, seconds, (tail + 2 * (loop - 1) * message) / loop)
    return found


def of_chunks(micros: int, chunks: int, times: StageTimes) -> float:
    """Interleaved 1F1B."""
    busy, fill = _busy_and_fill(micros, times)
    return busy + fill / chunks + 2 * (chunks * len(times.forward) - 1) * times.message


def late_weights(late: int, micros: int, chunks: int, times: StageTimes) -> float:
    """ZB-H1 and H2: `late` W that a stage puts off for each stage before it fill the drain."""
    busy, _ = _busy_and_fill(micros, times)
    ahead, back, slack = _ways(times)
    count, weight = len(times.forward), times.weight[times.longest()]
    drain = max(0.0, back - min(micros - 1, late * (count - 1)) * weight)
    # The warm-up of one round, not of two, lets stages wait for messages in every loop.
    loops = min(1, (micros - 1) / (count - 1)) if late == 1 else 0
    shown = times.message + loops * max(0.0, times.message - slack)
    return busy + ahead + drain + 2 * (count - 1) * shown


def down_and_up(micros: int, chunks: int, times: StageTimes) -> float:
    """ZB-V: W of further microbatches fill the bubble that one leaves, from 2p-1 on as far as
    they can."""
    busy, _ = _busy_and_fill(micros, times)
    ahead, back, slack = _ways(times)
    count, weight = len(times.forward), times.weight[times.longest()]
    missing = max(0, 2 * count - 1 - micros) / (2 * count - 2)
    filled, left = max(ahead, back) / 2, ahead + back - (micros - 1) * weight
    bubble = max(filled, left) - missing * (count - 1) * slack
    shown = (5 * count - 7 + missing * (3 - count)) * times.message
    return busy + (max(0.0, bubble) + shown)


def _ways(times):
    """Seconds of a microbatch to the longest stage and back from it, and by how much a microbatch
    takes this stage longer than the others in the mean."""
    longest = times.longest()
    ahead, back = (sum(each) - each[longest] for each in times[:2])
    work, (_, fill) = times.work(), _busy_and_fill(1, times)
    return ahead, back, work[longest] - fill / (len(work) - 1)
