"""Lowered schedules: as strings, checked on all sizes, and with planted faults."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc3d.pipeline.instruction import (
    COMPUTE,
    MESSAGES,
    Instruction,
    Placement,
    is_pair,
    parse,
    whole,
)
from hpc3d.pipeline.passes import add_reductions, check, lower
from hpc3d.pipeline.schedule import SCHEDULES, instruction_streams


def text(programs):
    return [" ".join("+".join(map(str, group)) for group in groups) for groups in programs]


def programs(*texts):
    """Return the groups of stages, from texts such as "F0 SendF0+RecvB0"."""
    return [
        [tuple(map(parse, group.split("+"))) for group in stage_text.split()]
        for stage_text in texts
    ]


def lowered(name, p, m, v=1, steps=1, overlap=True):
    return lower(*instruction_streams(name, p, m, v, steps), overlap)


def test_lowered_1f1b_streams():
    assert text(lowered("1f1b", 3, 3)) == [
        "F0 SendF0 F1 SendF1 F2 SendF2+RecvB0 BW0 RecvB1 BW1 RecvB2 BW2+Reduce Step",
        "RecvF0 F0 RecvF1+SendF0 F1 RecvF2+SendF1+RecvB0 BW0 SendB0 F2 SendF2+RecvB1 BW1 "
        "SendB1+RecvB2 BW2 SendB2 Reduce Step",
        "RecvF0 F0 RecvF1 BW0 SendB0 F1 BW1 RecvF2+SendB1 F2 BW2 SendB2 Reduce Step",
    ]


def test_reduction_is_separate_or_overlaps_the_last_weight_gradient():
    early, late = (text(lowered("zb-v", 1, 1, 2, overlap=overlap))[0] for overlap in (True, False))
    assert early == "F0 1F0 1B0 1W0+1Reduce B0 W0+Reduce Step"
    assert late == "F0 1F0 1B0 1W0 B0 W0 Reduce 1Reduce Step"


def test_only_chunks_with_new_gradients_are_reduced():
    (groups,) = programs("BW0 Step 1B0 1W0 F1 Step")
    early, late = (text([add_reductions(groups, overlap)])[0] for overlap in (True, False))
    assert early == "BW0+Reduce Step 1B0 1W0+1Reduce F1 Step"
    assert late == "BW0 Reduce Step 1B0 1W0 F1 1Reduce Step"


def test_asynchronous_schedule_reduces_in_each_step():
    early, late = (
        text(lowered("pipedream-2bw", 2, 2, steps=2, overlap=overlap)) for overlap in (True, False)
    )
    assert early[1] == (
        "RecvF0 F0 RecvF1 BW0 SendB0 F1 BW1 RecvF2+SendB1 Reduce Step F2 BW2 "
        "RecvF3+SendB2 F3 BW3 SendB3 Reduce Step"
    )
    assert late[0] == (
        "F0 SendF0 F1 SendF1+RecvB0 BW0 F2 SendF2+RecvB1 BW1 Reduce Step F3 SendF3+RecvB2 BW2 "
        "RecvB3 BW3 Reduce Step"
    )


def cases(name, stages, micros):
    """Yield all supported (p, m, v, steps) of a schedule, up to some stages and microbatches."""
    schedule = SCHEDULES[name]
    for p, m, v in product(range(1, stages + 1), range(1, micros + 1), (1, 2, 3)):
        if schedule.forbids(p, m, v) is None:
            yield p, m, v, 2 if schedule.asynchronous else 1


@pytest.mark.parametrize("most", [(5, 12), pytest.param((8, 16), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_lowered_schedule_passes_the_check(name, most):
    mine = [*cases(name, *most)]
    assert len(mine) >= 12
    for p, m, v, steps in mine:
        passes, placement = instruction_streams(name, p, m, v, steps)
        check(lower(passes, placement, overlap=m % 2 == 0), placement, m * steps)


@given(st.sampled_from([*SCHEDULES]), *map(st.integers, [1] * 4, [12, 40, 4, 3]), st.booleans())
def test_any_sizes_pass_the_check_or_are_rejected(name, p, m, v, steps, overlap):
    try:
        passes, placement = instruction_streams(name, p, m, v, steps)
    except ValueError as error:
        assert " = " in str(error) and len(str(error).splitlines()) == 1
    else:
        check(lower(passes, placement, overlap), placement, m * steps)


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("interleaved", 2), ("zb-v", 2)])
def test_lowering_keeps_pass_order_and_fuses_adjacent_messages(name, v):
    passes, placement = instruction_streams(name, 4, 8, v)
    for stream, groups in zip(passes, lower(passes, placement)):
        first = [group[0] for group in groups]
        assert [one for one in first if one.op in COMPUTE] == whole(stream)
        moves = [one.op in MESSAGES for one in first]
        assert not any(one and other for one, other in pairwise(moves))
        assert first[-1] == ("Step", -1, 0)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
def test_pairs_of_passes_are_groups_without_messages(p, overlap):
    """Their inputs are received before them, and their results are sent after them."""
    for m in (2 * p, 2 * p + 1, 4 * p + 3):
        passes, placement = instruction_streams("dualpipe-v", p, m, 2)
        lowered = lower(passes, placement, overlap, pairs=True)
        check(lowered, placement, m)
        for stage, groups in enumerate(lowered):
            pairs = [group for group in groups if is_pair(group)]
            assert len(pairs) == 2 * m - 3 * p + 1 + stage
            # The group of a reduction also contains the pass with which it overlaps.
            assert all(
                len(group) == 1
                or group in pairs
                or group[1].op == "Reduce"
                or group[0].op in MESSAGES
                for group in groups
            )
            assert [each for group in groups for each in group if each.op in COMPUTE] == whole(
                passes[stage]
            )


TWO = Placement(2, 1)
GOOD = (
    "F0 SendF0 F1 SendF1+RecvB0 BW0 RecvB1 BW1 Step",
    "RecvF0 F0 RecvF1 BW0 SendB0 F1 BW1 SendB1 Step",
)


def test_valid_program_passes_the_check():
    check(programs(*GOOD), TWO, 2)


@pytest.mark.parametrize(
    ("stage", "change", "fault"),
    [
        # A send that waits for its receive, which waits for the send behind it.
        (
            0,
            ("SendF1+RecvB0 BW0", "RecvB0 BW0 SendF1"),
            "deadlock: stage 0 at RecvB0, stage 1 at RecvF1 cannot proceed; reorder",
        ),
        (0, ("SendF0 ", ""), "stage 1: RecvF0 .*SendF0 on stage 0"),
        (1, ("BW1 SendB1", "BW1"), "stage 0: RecvB1 .*SendB1 on stage 1"),
        (0, ("+RecvB0", ""), "stage 0: BW0 before RecvB0"),
        (1, ("BW0", "B0"), "stage 1: W0 .*missing"),
        (1, ("F1 BW1", "BW1 F1"), "stage 1: BW1 before F1"),
        (1, ("F0 RecvF1", "F0 F0 RecvF1"), "stage 1: F0 .*F0 .*second"),
        (0, ("BW0", "BW0 W0"), "stage 0: W0 .*W0 .*second"),
        (0, ("BW0", "W0 B0"), "stage 0: W0 before B0"),
        (0, ("F0 SendF0", "SendF0 F0"), "stage 0: SendF0 before F0"),
        (1, ("BW1 SendB1", ""), "stage 1: B1 .*missing"),
        (0, ("Step", "SendB0 Step"), "stage 0: SendB0 has .*stage"),
        (
            1,
            ("RecvF0 F0 RecvF1 BW0", "RecvF1+RecvF0 F0 BW0"),
            "stage 0 .*SendF0 .*stage 1 .*RecvF1",
        ),
    ],
)
def test_planted_fault_is_named(stage, change, fault):
    texts = list(GOOD)
    assert change[0] in texts[stage]
    texts[stage] = texts[stage].replace(*change, 1)
    with pytest.raises(ValueError, match=fault):
        check(programs(*texts), TWO, 2)


def test_unmatched_send_or_receive_is_detected():
    texts = "F0 SendF0 F1 SendF1 RecvB0 BW0", "RecvF0 F0 BW0 SendB0"
    with pytest.raises(ValueError, match=r"stage 0: F1 .* 1 microbatches"):
        check(programs(*texts), TWO, 1)
    texts = "F0 SendF0+RecvB0 BW0", "F0 BW0 SendB0"
    with pytest.raises(ValueError, match="stage 1: F0 before RecvF0"):
        check(programs(*texts), TWO, 1)
    texts = "F0 SendF0 RecvB0 BW0", "RecvF0 F0 BW0 SendB0 RecvF1"
    with pytest.raises(ValueError, match=r"stage 1: RecvF1 .*SendF1 on stage 0"):
        check(programs(*texts), TWO, 1)


def test_unfused_blocking_sends_deadlock():
    """1F1B deadlocks if its messages are posted one by one, but not if they are fused."""
    passes, placement = instruction_streams("1f1b", 2, 4)
    fused = lower(passes, placement)
    check(fused, placement, 4)
    alone = [[(one,) for group in groups for one in reversed(group)] for groups in fused]
    with pytest.raises(ValueError, match=r"deadlock: stage 0 at RecvB0, stage 1 at RecvF1 cannot"):
        check(alone, placement, 4)


def test_v_shaped_turn_keeps_the_pass_order():
    turn = Placement(1, 2, v_shaped=True)
    check(programs("F0 1F0 1BW0 BW0"), turn, 1)
    with pytest.raises(ValueError, match="stage 0: 1F0 before F0"):
        check(programs("1F0 F0 1BW0 BW0"), turn, 1)
    with pytest.raises(ValueError, match="stage 0: BW0 before 1B0"):
        check(programs("F0 1F0 BW0 1BW0"), turn, 1)


def test_lowered_stream_consists_of_instructions():
    step, reduction = lowered("1f1b", 1, 1)[0][-1:-3:-1]
    assert step == (Instruction("Step"),)
    assert reduction == (Instruction("BW", 0), Instruction("Reduce"))
