"""The loss scale rises slowly, drops at once, and is stored in checkpoints."""

import json
from math import inf, nan

import pytest

from hpc3d.training.loss_scale import LossScale, scale_of


def good(scale, times):
    for _ in range(times):
        scale.good()
    return scale.factor


def test_loss_scale_doubles_after_enough_consecutive_updates():
    scale = LossScale()
    assert good(scale, 1999) == 2.0**16
    assert good(scale, 1) == 2.0**17
    assert good(scale, 1999) == 2.0**17
    assert scale.skipped()
    assert scale.factor == 2.0**16
    assert good(scale, 1999) == 2.0**16  # the row begins anew
    assert good(scale, 1) == 2.0**17


def test_loss_scale_stays_below_its_limit():
    scale = LossScale(2.0**23)
    assert [good(scale, 2000) for _ in range(3)] == [2.0**24] * 3


def test_loss_scale_of_1_cannot_be_reduced():
    scale = LossScale()
    for power in reversed(range(16)):
        assert scale.skipped()
        assert scale.factor == 2.0**power
    assert not scale.skipped()
    assert scale.factor == 1.0


def test_static_loss_scale_never_changes():
    scale = LossScale(2.0**10, 2.0**10, 2.0**10)
    assert good(scale, 5000) == 2.0**10
    assert not scale.skipped()
    assert scale.factor == 2.0**10
    assert scale.state() == {}


def test_only_float16_uses_a_loss_scale():
    assert scale_of("float16").factor == 2.0**16
    for dtype in ("bfloat16", "float32", "float64"):
        scale = scale_of(dtype)
        assert good(scale, 4000) == 1.0
        assert not scale.skipped()


def test_restored_loss_scale_continues_exactly():
    scale, other = LossScale(), LossScale()
    good(scale, 700)
    scale.skipped()
    good(scale, 1500)
    other.restore(json.loads(json.dumps(scale.state())))
    for each in (scale, other):
        assert good(each, 499) == 2.0**15
        assert good(each, 1) == 2.0**16


@pytest.mark.parametrize(
    "strange",
    [
        None,
        {},
        [],
        7,
        {"factor": 8.0},
        {"factor": "8", "row": 0},
        {"factor": nan, "row": 0},
        {"factor": inf, "row": 0},
        {"factor": -8.0, "row": 0},
        {"factor": 0.0, "row": 0},
        {"factor": 3.0, "row": 0},
        {"factor": 8.0, "row": -1},
    ],
)
def test_invalid_stored_scale_is_ignored(strange):
    scale = LossScale()
    scale.restore(strange)
    assert scale.state() == LossScale().state()


def test_scale_restarts_after_a_run_in_another_type():
    scale, other = LossScale(), scale_of("float32")
    good(other, 100)
    scale.restore(other.state())
    assert scale.state() == {"factor": 2.0**16, "row": 0}


def test_stored_scale_is_clamped_to_the_current_limits():
    scale = LossScale()
    scale.restore({"factor": 2.0**40, "row": 10**9})
    assert scale.factor == 2.0**24
    assert good(scale, 1) == 2.0**24
    other = scale_of("bfloat16")
    other.restore({"factor": 2.0**13, "row": 5})
    assert other.factor == 1.0
    assert good(other, 4000) == 1.0
