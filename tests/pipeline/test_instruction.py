"""Instructions as text, and the placement of model chunks."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc3d.pipeline.instruction import (
    COMPUTE,
    MESSAGES,
    Instruction,
    Placement,
    from_pattern,
    parse,
)

instructions = st.one_of(
    st.builds(
        Instruction,
        st.sampled_from([*COMPUTE, *MESSAGES]),
        st.integers(0, 999_999),
        st.integers(0, 99),
    ),
    st.builds(Instruction, st.just("Reduce"), st.just(-1), st.integers(0, 99)),
    st.just(Instruction("Step")),
)


@given(instructions)
def test_instruction_round_trips_through_text(instruction):
    assert parse(str(instruction)) == instruction


def test_instruction_text_formats():
    assert [str(i) for i in from_pattern("FFBfw")] == ["F0", "F1", "B0", "1F0", "1W0"]
    assert parse("0F3") == parse("F3") == ("F", 3, 0)
    assert parse("12RecvB3") == ("RecvB", 3, 12)
    assert str(Instruction("Reduce", chunk=1)) == "1Reduce"


@pytest.mark.parametrize(
    "nonsense", ["", "F", "f3", "3", "F-1", "Step1", "1Step", "Reduce3", "FB2"]
)
def test_invalid_instruction_text_is_rejected(nonsense):
    with pytest.raises(ValueError, match=re.escape(repr(nonsense))):
        parse(nonsense)


@pytest.mark.parametrize(("v_shaped", "v"), [(False, 1), (False, 3), (True, 2)])
@pytest.mark.parametrize("p", [1, 2, 5])
def test_placement_maps_model_chunks_to_stages(p, v, v_shaped):
    placement = Placement(p, v, v_shaped)
    places = [placement.location(part) for part in range(placement.parts)]
    assert sorted(places) == [(stage, chunk) for stage in range(p) for chunk in range(v)]
    assert [placement.part(*place) for place in places] == list(range(p * v))
    assert [placement.first(*place) for place in places].index(True) == 0
    assert [placement.last(*place) for place in places].index(True) == p * v - 1
    for (stage, chunk), (after, chunk_after) in pairwise(places):
        if stage != after:
            send, receive = Instruction("SendF", 3, chunk), Instruction("RecvF", 3, chunk_after)
            assert placement.other(stage, send) == (after, receive)
            assert placement.other(after, receive) == (stage, send)
            send, receive = Instruction("SendB", 3, chunk_after), Instruction("RecvB", 3, chunk)
            assert placement.other(after, send) == (stage, receive)
            assert placement.other(stage, receive) == (after, send)


def test_v_shaped_placement_turns_without_messages():
    placement = Placement(4, 2, v_shaped=True)
    assert [placement.part(stage, 1) for stage in range(4)] == [7, 6, 5, 4]
    assert placement.first(0, 0)
    assert placement.last(0, 1)
    for stage, message in ((3, "SendF0"), (3, "1RecvF0"), (0, "RecvF0"), (0, "1SendF0")):
        with pytest.raises(ValueError, match=f"stage {stage}: {message} has "):
            placement.other(stage, parse(message))
