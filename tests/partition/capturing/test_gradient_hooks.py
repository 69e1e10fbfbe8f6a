"""Gradient hooks, which a traced program does not call."""

import copy
import re

import pytest

pytest.importorskip("torch")

import torch

from hpc3d.partition.capture import capture
from tests.partition.execution.modules import state
from tests.partition.functions_of_samples import Layers, values
from tests.partition.untraceable_models import Between, samples


def hooked(register, *path):
    """Return a model whose parameter or module at `path` has a hook."""
    model = Layers(lambda model, x: model.squares(x).mean())
    owner = model
    for name in path:
        owner = getattr(owner, name)
    getattr(owner, register)(lambda *given: None)
    return model


@pytest.mark.parametrize(
    ("register", "path", "owner"),
    [
        ("register_hook", ("a", "weight"), "the parameter a.weight"),
        ("register_post_accumulate_grad_hook", ("b", "bias"), "the parameter b.bias"),
        ("register_full_backward_hook", ("b",), "the module b"),
        ("register_full_backward_pre_hook", (), "the module Layers"),
    ],
)
def test_gradient_hook_is_rejected_by_name(register, path, owner):
    line = re.escape(owner) + r" has a gradient hook \(.*test_gradient_hooks.py:\d+\)"
    with pytest.raises(ValueError, match=line):
        capture(hooked(register, *path), (values(8, 6),))


def reversed_gradient(model, x):
    y = model.a(x)
    y.register_hook(torch.neg)
    return model.b(y).mean()


def test_gradient_hook_in_the_forward_of_the_model_is_rejected():
    line = r"registers a gradient hook .* \(.*test_gradient_hooks.py:\d+\); move this code"
    with pytest.raises(ValueError, match=line):
        capture(Layers(reversed_gradient), (values(8, 6),))
    assert torch.ones(1, requires_grad=True).register_hook(torch.neg) is not None


class Reverses(torch.nn.Module):
    def forward(self, x):
        y = 2 * x
        y.register_hook(torch.neg)
        return y


@pytest.mark.slow
def test_submodule_that_registers_a_gradient_hook_becomes_one_operation():
    """The gradients of the stage program equal those of the module."""
    from hpc3d.partition.execution.random_numbers import Draw
    from hpc3d.partition.execution.stage_program import stage_programs
    from hpc3d.partition.execution.torch_weights import values_in

    module, inputs = Between(Reverses()).double(), samples()
    captured = capture(module, inputs)
    assert [each.path for each in captured.opaque] == ["parts.0"]
    (program,) = stage_programs(captured, [range(len(captured.pieces))])
    weights = {name: value.clone().requires_grad_() for name, value in values_in(module, captured)}
    given = dict(zip(captured.inputs, inputs, strict=True))
    _, (loss,) = program.run(Draw(0, 0, 0, len(inputs[0])), [], given, weights)
    loss.backward()
    expected = copy.deepcopy(module)
    expected(*inputs).backward()
    for name, value in expected.named_parameters():
        torch.testing.assert_close(weights[name].grad, value.grad, rtol=1e-12, atol=0)
    assert state(module).keys() == weights.keys()
