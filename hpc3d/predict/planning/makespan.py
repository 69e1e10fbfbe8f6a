"""The time of a pipeline schedule in closed forms.

They are those of hpc3d.pipeline.timeline where all stages are equal; where one has more to do, as
that with the head of a model has, the others wait for it.
"""

LATE = {"zb-h1": 1, "zb-h2": 2}  # the W that a stage puts off, for each stage before it


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
        shown = 2 * (count - min(micros, 2)) * message
        return micros * period(work[-micros:], message) + fill + shown
    if name == "interleaved":
        return busy + fill / chunks + 2 * (chunks * count - 1) * message
    ahead, back = (sum(passes) - passes[longest] for passes in (forward, backward))
    slack = work[longest] - fill / (count - 1)
    if name == "zb-v":
        return busy + bend(micros, count, ahead, back, weight[longest], slack, message)
    # The W that are put off fill the drain.
    late = min(micros - 1, LATE[name] * (count - 1))
    drain = max(0.0, back - late * weight[longest])
    loops = min(1, (micros - 1) / (count - 1)) if name == "zb-h1" else 0
    shown = message + loops * max(0.0, message - slack)
    return busy + ahead + drain + 2 * (count - 1) * shown


def bend(micros, count, ahead, back, weight, slack, message):
    """What ZB-V adds to the busiest stage: W of further microbatches fill the bubble that one
    leaves, from 2p-1 on as far as they can."""
    missing = max(0, 2 * count - 1 - micros) / (2 * count - 2)
    filled, left = max(ahead, back) / 2, ahead + back - (micros - 1) * weight
    bubble = max(filled, left) - missing * (count - 1) * slack
    return max(0.0, bubble) + (5 * count - 7 + missing * (3 - count)) * message


def period(work, message):
    """Seconds between microbatches under 1F1B: the busiest stage's, or those of the longest loop,
    in which k stages have k microbatches in flight to the last stage and back; `work` is that
    of the last stages, no more than there are microbatches."""
    tail, found = 0.0, 0.0
    for loop, seconds in enumerate(reversed(work), 1):
        tail += seconds
        found = max(found, seconds, (tail + 2 * (loop - 1) * message) / loop)
    return found
