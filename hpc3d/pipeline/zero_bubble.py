"""Schedules that split the backward pass in two, so that W fills the bubble.

The gradient of a stage's input (B) is what the stage before waits for; the gradient of its
weights (W) can wait for a gap.  Zero Bubble, arXiv:2401.10241; p stages, m microbatches, a stage
i from 0, T_F, T_B, T_W the times of the passes.
"""

from collections.abc import Iterator

from hpc3d.pipeline.instruction import Instruction, from_pattern


def zb_h1(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """1F1B whose stage i does W of a microbatch i backward passes late, the rest at the end.

    The stage before gets its gradient without waiting for W, and the W that were put off fill the
    drain: the bubble is (p-1)(T_F + T_B - T_W).  Before a B, stage i has min(m, p-i) activations
    in flight, those of 1F1B, and beside them the inputs of W of i microbatches (arXiv:2401.10241,
    table 2).
    """
    return _late_weights(stages - 1 - stage, stage, micros)


def zb_h2(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """2(p-1-i) warm-up forwards on stage i, and W of a microbatch 2i backward passes late.

    Twice the warm-up of ZB-H1 also fills the wait for the first backward pass: the bubble is
    (p-1)(T_F + T_B - 2 T_W).  The price is memory: before a B, min(m, 2p-2i-1) activations in
    flight, and beside them the inputs of W of 2i microbatches (arXiv:2401.10241, table 2).
    """
    return _late_weights(2 * (stages - 1 - stage), 2 * stage, micros)


def zb_v(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """Two chunks a stage, down the stages and back up (small letters): stage 0 has both ends.

    Warm-up of stage i: 2(p-i)-1 F; i times f F; p-i times f b w.  Steady: F B W f b w.  Drain: the
    B and b that others wait for, then the W and w that are left.  Where T_F = T_B = T_W, messages
    are free and m >= 2p-1 there is no bubble, and at most 2p activations of chunks are in flight,
    the memory of 1F1B (arXiv:2401.10241, section 6; arXiv:2405.15362).  Fewer microbatches run the
    schedule of 2p-1 without those that are missing.
    """
    below, filled = stages - stage, max(micros, 2 * stages - 1)
    steady = filled - 2 * stages + 1 + stage
    pattern = "F" * (2 * below - 1) + "fF" * stage + "fbw" * below
    pattern += "FBWfbw" * steady + "BWfbw" * (below - 1)
    pattern += "Bb" * stage + "BW" * below + "w" * stage + "W" * stage
    return (instruction for instruction in from_pattern(pattern) if instruction.mb < micros)


def _late_weights(warmup: int, lag: int, micros: int) -> Iterator[Instruction]:
    """`warmup` F, then F B W by turns; each W is of the microbatch `lag` before that of the B."""
    warmup = min(warmup, micros)
    pattern = "F" * warmup
    for done in range(micros):
        pattern += "F" * (warmup + done < micros) + "B" + "W" * (done >= lag)
    return from_pattern(pattern + "W" * min(lag, micros))
