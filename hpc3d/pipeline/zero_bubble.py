"""Zero-bubble schedules, which split the backward pass into B and W and fill the bubble with W.

The previous stage waits for the gradient of a stage's input (B), but the gradient of the weights
(W) can be deferred: see Zero Bubble, arXiv:2401.10241.  In the docstrings, p is the number of
stages, m the number of microbatches, i the zero-based stage index, and T_F, T_B and T_W are the
times of the passes.
"""

from collections.abc import Iterator

from hpc3d.pipeline.instruction import Instruction, from_pattern


def zb_h1(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """ZB-H1: 1F1B in which stage i delays each W by i backward passes.

    A stage sends the input gradient to the previous stage before it runs W, and the delayed W
    passes fill the drain of the pipeline.  The bubble is (p-1)(T_F + T_B - T_W).  Before a B,
    stage i has the activations of min(m, p-i) microbatches in flight, as under 1F1B, and saves
    the inputs of W for i microbatches (arXiv:2401.10241, table 2).
    """
    return _late_weights(stages - 1 - stage, stage, micros)


def zb_h2(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """ZB-H2: 2(p-1-i) warm-up forward passes on stage i, and each W delayed by 2i backward passes.

    The warm-up is twice as long as in ZB-H1, so that stages also compute while they would
    otherwise wait for their first backward pass.  The bubble is (p-1)(T_F + T_B - 2 T_W).  In
    exchange, ZB-H2 needs more memory: before a B, the activations of min(m, 2p-2i-1) microbatches
    are in flight, and the inputs of W for 2i microbatches are saved (arXiv:2401.10241, table 2).
    """
    return _late_weights(2 * (stages - 1 - stage), 2 * stage, micros)


def zb_v(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """ZB-V: two chunks per stage; chunk 0 runs from the first stage to the last, and chunk 1 back.

    Stage 0 has the embedding and the head.  Lowercase letters are passes of chunk 1.  In the
    warm-up, stage i runs 2(p-i)-1 F passes, then i pairs of passes (f F), then p-i triples
    (f b w).  The steady phase repeats F B W f b w.  The drain first runs the B and b that other
    stages wait for, then the remaining W and w.  If T_F = T_B = T_W, communication takes no time
    and m >= 2p-1, the bubble is zero.  The activations of at most 2p chunks are in flight, which
    is the peak activation memory of 1F1B (arXiv:2401.10241, section 6; arXiv:2405.15362).  With
    fewer than 2p-1 microbatches, the schedule is that for 2p-1 microbatches without the passes of
    the missing microbatches.
    """
    below, filled = stages - stage, max(micros, 2 * stages - 1)
    steady = filled - 2 * stages + 1 + stage
    pattern = "F" * (2 * below - 1) + "fF" * stage + "fbw" * below
    pattern += "FBWfbw" * steady + "BWfbw" * (below - 1)
    pattern += "Bb" * stage + "BW" * below + "w" * stage + "W" * stage
    return (instruction for instruction in from_pattern(pattern) if instruction.mb < micros)


def _late_weights(warmup: int, lag: int, micros: int) -> Iterator[Instruction]:
    """Return a stream of `warmup` F passes followed by F B W cycles.

    In a cycle, W processes the microbatch that B processed `lag` cycles earlier.
    """
    warmup = min(warmup, micros)
    pattern = "F" * warmup
    for done in range(micros):
        pattern += "F" * (warmup + done < micros) + "B" + "W" * (done >= lag)
    return from_pattern(pattern + "W" * min(lag, micros))
