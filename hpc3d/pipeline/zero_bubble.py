"""Zero-bubble schedules, which split the backward pass into B and W and fill the bubble with W.

The previous stage waits for the gradient of a stage's input (B), but the gradient of the weights
(W) can be deferred: see Zero Bubble, arXiv:2401.10241.  In the docstrings, p is the number of
stages, m the number of microbatches, i the zero-based stage index, and T_F, T_B and T_W are the
times of the passes.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from hpc3d.pipeline.instruction import Instruction, from_pattern

# Operation and chunk of each letter but W in the patterns of `_some`.
_PASSES = {letter: ("F" if letter in "Ff" else "B", int(letter.islower())) for letter in "FfBbIi"}


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


def v_half(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """V-Half: the placement of ZB-V with about half of its activation memory.

    arXiv:2405.15362, section 3.  Microbatch k starts 6k passes after microbatch 0.  Relative to
    this time, stage i starts its passes F, f, b and B at the times 2i, 3p-i-2, 3p+2i-1+s and
    6p-i-2+s, where s is 3 if p is even and 0 otherwise; W and w fill the gaps.  Chunk 0 is
    therefore in flight for a shorter time on later stages, and chunk 1 for a longer time.  At most
    2 floor(p/2) + 2 chunks are in flight or wait for W.  If T_F = T_B = T_W = 1 per chunk, the
    bubble is 7p/2 - 2 for even p and 7(p-1)/2 for odd p, compared with 6(p-1) under 1F1B.
    """
    shift = 3 * (stages % 2 == 0)
    ends = 3 * stages + 2 * stage - 1 + shift, 6 * stages - stage - 2 + shift
    return _repeated((2 * stage, 3 * stages - stage - 2, *ends), micros)


def v_min(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """V-Min: the placement of ZB-V with about a third of its activation memory.

    arXiv:2405.15362, section 3.  The schedule has the structure of V-Half, with F, f, b and B at
    the times i, 2p-i-1, 2p+i+s and 4p-i-1+s, where s is 2 if p is divisible by 3 and 0 otherwise.
    At most 2 ceil((p+2)/3) chunks are in flight or wait for W.  If T_F = T_B = T_W = 1 per chunk,
    the bubble is 4p-5, or 4p-3 if p is divisible by 3.  If the times differ, every period has
    additional bubbles, more than under V-Half.
    """
    shift = 2 * (stages % 3 == 0)
    ends = 2 * stages + stage + shift, 4 * stages - stage - 1 + shift
    return _repeated((stage, 2 * stages - stage - 1, *ends), micros)


def dualpipe_v(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """DualPipeV: the placement of ZB-V; the backward pass is split only in the warm-up and drain.

    The V-shaped form of DualPipe, the schedule of DeepSeek-V3 (arXiv:2412.19437), as published in
    the repository of DualPipe.  In the warm-up, stage i runs 2(p-1-i) F passes, i+1 pairs (F f),
    and p-1-i triples (b w f).  The steady phase repeats F b f B with full backward passes.  The
    drain runs p-1-i triples (b f B) and i+1 pairs (b B), and splits the last p backward passes to
    fill the bubble with their W.  At most 2p+1 chunks are in flight.  The two passes of a pair run
    one after the other, or alternate while experts exchange tokens (docs/experts.md).  If
    T_F = T_B = T_W = 1 per chunk, the bubble is p-1.  With fewer than 2p microbatches, the
    schedule omits the passes of the missing microbatches from the schedule for 2p microbatches.
    """
    below, filled = stages - 1 - stage, max(micros, 2 * stages)
    pattern = "FF" * below + "Ff" * (stage + 1) + "iWf" * below
    pattern += "FbfB" * (filled - 2 * stages + stage + 1) + "bfB" * below
    drain = "bB" * (stage + 1)
    pattern += drain[: stage + 1] + drain[stage + 1 :].replace("b", "i").replace("B", "I")
    return _some(micros, pattern + "WI" * below + "W" * (stage + 1))


def _repeated(offsets: Iterable[int], micros: int) -> Iterator[Instruction]:
    """Return a stream that starts F, f, b and B of microbatch k at `offsets` + 6k.

    At all other times, the oldest remaining W runs.
    """
    starts = [*offsets]
    pattern = ["W"] * (max(starts) + 6 * micros)
    for letter, start in zip("FfiI", starts):
        pattern[start : start + 6 * micros : 6] = letter * micros
    return _some(micros, [*pattern, *"W" * (2 * micros)])


def _some(micros: int, pattern: Iterable[str]) -> Iterator[Instruction]:
    """Convert letters to the passes of the first `micros` microbatches.

    F and B are as in `from_pattern`.  I is a B whose W runs later. W stands for the oldest
    remaining W of both chunks, or for nothing if none remains.
    """
    count: Counter[tuple[str, int]] = Counter()
    left: deque[tuple[int, int]] = deque()
    for letter in pattern:
        if letter != "W":
            op, chunk = kind = _PASSES[letter]
            mb = count[kind]
            count[kind] = mb + 1
        elif left:
            op, (mb, chunk) = "W", left.popleft()
        else:
            continue
        if letter in "Ii":
            left.append((mb, chunk))
        if mb < micros:
            yield Instruction(op, mb, chunk)
