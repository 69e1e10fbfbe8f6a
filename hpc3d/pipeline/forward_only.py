"""Forward-only instruction streams that evaluate a model with any placement of its chunks."""

from __future__ import annotations

from collections import deque

from hpc3d.pipeline.instruction import Instruction, Placement


def forward_only(placement: Placement, micros: int) -> list[list[Instruction]]:
    """Return the forward passes of each stage, in a greedy order.

    In every round, each stage runs the last of its model chunks (in model order) for which an
    input is available.  No stage is idle while it has work, microbatches close to the head finish
    first, and few microbatches are queued between two chunks.
    """
    waiting: list[deque[int]] = [deque() for _ in range(placement.parts)]
    waiting[0].extend(range(micros))
    streams: list[list[Instruction]] = [[] for _ in range(placement.stages)]
    while any(waiting):
        filled = [part for part, queue in enumerate(waiting) if queue]
        deepest = {placement.location(part)[0]: part for part in filled}
        moved = [(part, waiting[part].popleft()) for part in deepest.values()]
        for part, micro in moved:
            stage, chunk = placement.location(part)
            streams[stage].append(Instruction("F", micro, chunk))
            if part + 1 < placement.parts:
                waiting[part + 1].append(micro)
    return streams
