"""The passes of an evaluation, on every placement of the model chunks."""

from itertools import chain

import pytest

from hpc3d.pipeline.forward_only import forward_only
from hpc3d.pipeline.instruction import Placement
from hpc3d.pipeline.passes import check, lower
from hpc3d.pipeline.program import forward_program_of, program_of
from hpc3d.pipeline.timeline import Cost, bubble, timeline
from tests.pipeline.mixes import MIXES, config_of

PLACEMENTS = [
    *(Placement(stages, chunks) for stages in (1, 2, 3, 4) for chunks in (1, 2, 3)),
    *(Placement(stages, 2, v_shaped=True) for stages in (1, 2, 3, 4)),
]


def text(streams):
    return [" ".join(map(str, stream)) for stream in streams]


def test_forward_only_streams():
    assert text(forward_only(Placement(2, 1), 3)) == ["F0 F1 F2"] * 2
    assert text(forward_only(Placement(2, 2), 4)) == ["F0 F1 1F0 1F1 F2 F3 1F2 1F3"] * 2
    assert text(forward_only(Placement(2, 2, v_shaped=True), 4)) == [
        "F0 F1 F2 1F0 F3 1F1 1F2 1F3",
        "F0 1F0 F1 1F1 F2 1F2 F3 1F3",
    ]


@pytest.mark.parametrize("micros", [1, 2, 5, 8])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_forward_only_streams_pass_the_check_without_an_update(placement, micros):
    lowered = lower(forward_only(placement, micros), placement)
    check(lowered, placement, micros, passes="F")
    ops = {one.op for groups in lowered for one in chain.from_iterable(groups)}
    assert ops <= {"F", "SendF", "RecvF"}


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_forward_only_stages_wait_only_while_the_pipeline_fills(placement):
    """Stages of equal time wait only while the pipeline fills and drains."""
    micros = 4 * placement.stages
    rows = timeline(forward_only(placement, micros), placement, Cost(placement.chunks, 0, 0))
    for stage, row in enumerate(rows):
        waited = row[-1][1] - row[0][0] - placement.chunks * micros
        trip = placement.parts - 1 if placement.v_shaped else 0
        assert waited <= trip, stage
    assert bubble(rows) < 0.5


def test_missing_forward_pass_is_detected():
    placement = Placement(3, 1)
    lowered = lower(forward_only(placement, 2), placement)
    lowered[1] = [group for group in lowered[1] if str(group[0]) != "F1"]
    with pytest.raises(ValueError, match=r"stage 1: SendF1 before F1"):
        check(lowered, placement, 2, passes="F")
    with pytest.raises(ValueError, match=r"stage 0: B0 is missing"):
        check(lower(forward_only(placement, 2), placement), placement, 2)


@pytest.mark.parametrize("line", MIXES)
def test_evaluation_uses_the_placement_of_training(line):
    config = config_of(line)
    program = forward_program_of(config)
    assert program.placement == program_of(config).placement and not program.training
