"""The time of a pipeline schedule and what it keeps in flight, in closed forms.

They are those of hpc3d.pipeline.timeline where all stages are equal; where one has more to do, as
that with the head of a model has, the others wait for it.
"""

from functools import cache

from hpc3d.pipeline.instruction import Placement, whole
from hpc3d.pipeline.schedule import find


def makespan(name, micros, chunks, forward, backward, weight, message):
    """Seconds of a schedule from its first pass to its last.

    `forward`, `backward` and `weight` are the seconds of a microbatch on each stage (weight 0
    where backward is whole), `message` those of a message.  The stage with most to do is busy but
    for the way of the first microbatch to it and of the last one from it, and for messages that
    nothing hides; the bubbles are those that hpc3d.pipeline.schedule tells of each schedule.
    """
    work, count = [sum(passes) for passes in zip(forward, backward, weight)], len(forward)
    longest = max(range(count), key=work.__getitem__)
    busy, fill = micros * work[longest], sum(work) - work[longest]
    if count == 1:
        return busy
    if name == "gpipe":
        return micros * (max(forward) + max(backward)) + fill + 2 * (count - 1) * message
    if name == "1f1b":
        return micros * period(work, message) + fill + 2 * (count - 2) * message
    if name == "interleaved":
        return busy + fill / chunks + 2 * (chunks * count - 1) * message
    slack = work[longest] - fill / (count - 1)
    ahead, back = (sum(passes) - passes[longest] for passes in (forward, backward))
    if name == "zb-h1":
        drain = max(0.0, back - (count - 1) * weight[longest])
        return busy + ahead + drain + 2 * (count - 1) * (message + max(0.0, message - slack))
    missing = max(0, 2 * count - 1 - micros) / (count - 1)
    bubble = max(ahead, back) / 2 * (1 + missing) - missing * (count - 1) * slack / 2
    return busy + max(0.0, bubble) + (5 * count - 7) * message


def period(work, message):
    """Seconds between microbatches under 1F1B: the busiest stage's, or those of the longest loop,
    in which k stages have k microbatches on their way to the last stage and back."""
    tail, found = 0.0, 0.0
    for loop, seconds in enumerate(reversed(work), 1):
        tail += seconds
        found = max(found, seconds, (tail + 2 * (loop - 1) * message) / loop)
    return found


@cache
def flights(name, stages, micros, chunks, stage):
    """What a stage keeps at its fullest moments, as pairs (activations, inputs of W), both in
    microbatches of one chunk: from F to the end of B, and from there to the end of W."""
    schedule = find(name)
    # More microbatches than fill the pipeline twice change nothing.
    micros = micros if name == "gpipe" else min(micros, 4 * stages)
    stream = schedule.stream(stage, Placement(stages, chunks, schedule.turn), micros, 1)
    live, kept, found = 0, 0, set()
    for op, _, _ in whole(stream):
        live += (op == "F") - (op in ("B", "BW"))
        kept += (op == "B") - (op == "W")
        found.add((live, kept))
    return [pair for pair in found if not any(beyond(other, pair) for other in found)]


def beyond(other, pair):
    return other != pair and other[0] >= pair[0] and other[1] >= pair[1]
