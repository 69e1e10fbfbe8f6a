"""Recorded calls of a module, and calls that cannot be repeated."""

from functools import partial

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from hpc3d.partition.capturing.recorded_calls import CannotBeOpaque, recorded_calls
from tests.partition.untraceable_models import (
    Borrows,
    Choosy,
    Draws,
    Experts,
    Number,
    Remembers,
    Straight,
    Writes,
)


class Model(nn.Module):
    """Module that is called with some rows, and after a layer."""

    def __init__(self, inner, given=lambda x: (x,)):
        super().__init__()
        self.layer, self.inner, self.given = nn.Linear(4, 4), inner, given

    def forward(self, samples):
        return self.inner(*self.given(self.layer(torch.ones(samples, 4))))


def recorded(module, *given):
    model = Model(module, *given)
    (calls,) = recorded_calls(model, model, 3, ["inner"]).values()
    assert "forward" not in vars(model.inner)
    return calls


def test_recorded_call_scales_with_the_number_of_samples():
    (call,) = recorded(Experts())
    assert [each.shape(7) for each in call.taken.likes] == [[7, 4]]
    assert [(each.shape(7), each.dtype) for each in call.returned.likes] == [
        ([7, 4], torch.float32),
        ([7], torch.int64),
    ]
    y, chosen = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
    assert call.returned.tensors_in({"y": y, "chosen": [chosen, None]}) == [y, chosen]
    assert call.returned.tensors_in({"y": y, "chosen": [chosen, 3]}) is None
    assert call.returned.tensors_in([y, chosen]) is None
    found = call.returned.filled([y, chosen])
    assert found["y"] is y and found["chosen"] == [chosen, None]


def test_flops_of_a_call_are_counted_forward_and_backward():
    """A layer with 4 x 4 weights has 32 FLOPs per sample, and twice as many backward."""
    (call,) = recorded(nn.Linear(4, 4))
    assert call.flop == (32, 64) and call.saved == 0, "its input is not its own"
    (call,) = recorded(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    assert call.flop == (64, 128) and call.saved == 4 * 4, "the result of tanh"


def test_non_tensor_arguments_belong_to_the_recorded_call():
    (call,) = recorded(Choosy(), lambda x: (x,))
    x = torch.ones(2, 4)
    assert call.taken.filled([x]) == ((x,), {})
    assert call.taken.tensors_in(((x,), {})) == [x]
    assert call.taken.tensors_in(((x,), {"scale": 2.0})) is None


def test_written_buffers_are_recorded():
    (call,) = recorded(Straight())
    assert call.written == {
        f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    (call,) = recorded(Straight().eval())
    assert call.written == set()


class Loose(nn.Module):
    """Module that accepts any arguments."""

    def forward(self, x, *others):
        return x


class Replaces(nn.BatchNorm1d):
    def forward(self, x):
        self.running_mean = self.running_mean + 1
        return x


class Trains(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.bias.mul_(2)
        return x


class Collects(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        return x


@pytest.mark.parametrize(
    ("module", "given", "why"),
    [
        (Number(), None, "the module returns a float"),
        (Draws(), None, "the module draws random numbers"),
        (Remembers(), None, "the module changes its attribute last"),
        (Collects(), None, "the module changes its attribute seen"),
        (Writes(), None, "the module writes to one of its inputs"),
        (Borrows().float(), None, "the module reads a parameter of another module"),
        (Replaces(4), None, "the module replaces the buffer .* running_mean"),
        (Trains(4, 4), None, ".* changes the parameter bias"),
        (
            Loose(),
            lambda x: (x, x.shape[0]),
            "an argument or result changes from 3 to 6 if the number of samples is doubled",
        ),
        (Loose(), lambda x: (x, iter([x])), "the module takes a list_iterator"),
        (Loose(), lambda x: (x[: len(x) ** 2 // 4],), "the size of a tensor depends"),
        (
            Loose(),
            lambda x: (x.sum() if len(x) > 3 else x,),
            "the dtype or dimension count of a tensor depends on the number of samples",
        ),
        (Loose(), lambda x: (x, [x] * len(x)), "the nesting of the arguments"),
    ],
)
def test_call_with_side_effects_is_rejected(module, given, why):
    if isinstance(module, Borrows):
        module.others[0].float()
    with pytest.raises(CannotBeOpaque, match=f"^inner cannot be converted .*: {why}") as found:
        recorded(module, *([given] if given else []))
    assert found.value.path == "inner"


def test_call_count_that_depends_on_the_samples_is_rejected():
    class Often(Model):
        def forward(self, samples):
            return [self.inner(torch.ones(2, 4)) for _ in range(samples)]

    model = Often(nn.Linear(4, 4))
    with pytest.raises(CannotBeOpaque, match="the number of calls to the module depends"):
        recorded_calls(model, partial(model), 2, ["inner"])
