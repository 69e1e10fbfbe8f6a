"""Wrappers of a user's module, and its tensors that are not weights."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from hpc3d.partition.capture import capture
from hpc3d.partition.capturing.user_module import (
    attribute_tensors,
    in_evaluation,
    line_of,
    unwrapped,
)
from tests.partition.user_models import Base, Constants, rows


@pytest.mark.slow
def test_wrappers_are_removed():
    module = Base()
    assert unwrapped(torch.compile(nn.DataParallel(torch.compile(module)))) is module
    assert unwrapped(module) is module


def test_tensors_in_containers_and_objects_are_found():
    found = dict(attribute_tensors(nn.Sequential(Constants())))
    assert [*found] == ["0.plain", "0.listed[0]", "0.keyed['k'][0]", "0.held.table"]
    assert len(found["0.plain"]) == 6


class Around(Base):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.loss(self.inner(x))


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (
            lambda: Around(torch.jit.script(nn.Sequential(nn.Linear(6, 6)))),
            r"submodule inner was .*\.py:\d+\)$",
        ),
        pytest.param(
            lambda: Around(torch.jit.trace(nn.Linear(6, 6), torch.ones(2, 6))),
            r"submodule inner was .*\.py:\d+\)$",
            marks=pytest.mark.slow,
        ),
        (lambda: torch.jit.script(nn.Linear(6, 6)), "it was"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_rejected(module, what):
    with pytest.raises(ValueError, match=f"cannot be captured: {what}") as found:
        capture(module(), (rows().float(),))
    assert "use the original module" in str(found.value)


def test_line_of_a_module_of_torch_is_empty():
    assert line_of(nn.Linear(2, 2)) == "" and "user_models.py:" in line_of(Base())


def test_mode_of_each_submodule_is_restored():
    module = nn.Sequential(nn.Dropout(), nn.Dropout().eval(), nn.Sequential(nn.Dropout()))
    before = [each.training for each in module.modules()]
    with pytest.raises(KeyError), in_evaluation(module):
        assert not any(each.training for each in module.modules())
        raise KeyError
    assert [each.training for each in module.modules()] == before


class Merged(nn.Linear):
    """Module that computes other weights for evaluation."""

    def train(self, mode=True):
        self.weight.data.mul_(1.0)
        return super().train(mode)


def test_method_eval_that_computes_weights_is_refused():
    module = Merged(2, 2)
    line = r"eval .* raised ValueError: aten.mul_.* \(.*\.py:\d+"
    with pytest.raises(ValueError, match=line), in_evaluation(module):
        pass
    assert module.training
