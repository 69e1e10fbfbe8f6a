"""The submodule that ends the largest prefix of a program that fits in memory."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from hpc3d.partition.capture import capture
from hpc3d.partition.execution.largest_prefix import largest_prefix
from tests.partition.execution.modules import prepared

CHAIN = "tests.partition.execution.test_largest_prefix:chain"


class Changed(nn.Module):
    """Two results, one of which is changed in place later, and a submodule without rows."""

    def __init__(self):
        super().__init__()
        self.both, self.changed, self.kept = Both(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        one, other = self.both(x)
        return self.kept(self.changed(one).relu_() + other).square().mean()


class Both(nn.Module):
    def forward(self, x):
        return x.sin(), x.cos()


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def chain():
    return Chain(), (torch.zeros(4, 8),)


def changed():
    return Changed(), (torch.zeros(4, 4),)


def ends(module, captured, samples=4):
    """Return the ends of the largest prefix, for memory from 0 in steps of 64 bytes."""
    found = []
    for memory in range(0, 10**5, 64):
        prefix = largest_prefix(captured, module, samples, memory)
        found.append(prefix and prefix.path)
        if prefix is None:
            return [*dict.fromkeys(found)]
    raise AssertionError("the program does not fit")


def test_larger_memory_gives_a_longer_prefix():
    module, _, captured = prepared(CHAIN)
    assert ends(module, captured) == ["", *(f"layers.{n}" for n in range(4)), None]


def test_prefix_ends_with_a_single_result_that_is_not_changed_later():
    module, inputs = changed()
    assert ends(module, capture(module, inputs)) == ["", "kept", None]


def test_memory_is_that_of_values_gradients_and_parameters():
    """Twice the result of a linear layer, three gradients, and all parameters."""
    module, _, captured = prepared(CHAIN)
    state = sum(each.nbytes for each in module.parameters())
    layer = sum(each.nbytes for each in module.layers[0].parameters())
    first = state + 3 * layer + 2 * 4 * 8 * 8
    assert largest_prefix(captured, module, 4, first).path == "layers.0"
    assert largest_prefix(captured, module, 4, first - 1).path == ""
