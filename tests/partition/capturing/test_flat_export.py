"""torch.export in one graph: tensors without gradients in torch have none here."""

import operator

import pytest

pytest.importorskip("torch")

import torch

from hpc3d.partition.capturing.flat_export import flat_export, where
from tests.partition.sample_models import Function, Rounded, Untaught

APPLY = torch.autograd.Function.__dict__["apply"]


def exported(module, *inputs):
    return flat_export(module, inputs, None)


def assert_as_in_torch(module, *inputs):
    """Compare outputs, gradients and buffers of the program on data."""
    program, state = exported(module, *inputs), dict(module.state_dict(keep_vars=True))
    targets = [spec.target for spec in program.graph_signature.input_specs]
    held = {name: value.detach().clone() for name, value in state.items()}
    for name, value in state.items():
        held[name].requires_grad_(value.requires_grad)
    given = [held[target] for target in targets if target]
    ours = torch.fx.Interpreter(program.graph_module).run(*given, *inputs)
    theirs = module(*inputs)
    theirs = [*theirs.values()] if isinstance(theirs, dict) else [theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.requires_grad == other.requires_grad
        torch.testing.assert_close(one, other)
    for outputs in (ours, theirs):
        sum(each.sum() for each in outputs if each.requires_grad).backward()
    for name, value in state.items():
        torch.testing.assert_close(held[name], value)
        torch.testing.assert_close(held[name].grad, value.grad, msg=name)


def test_no_grad_blocks_match_torch():
    assert_as_in_torch(Untaught(), torch.rand(6, 4))


def changed_inside(y, x):
    """The result has a gradient, but its parts do not."""
    with torch.no_grad():
        y.mul_(2.0).add_(x)
        first, second = y.chunk(2, 1)
        third = first * second
    return torch.cat([first * y[:, :2], third, second], 1) * y.sum(1, keepdim=True)


def changed_later(y, x):
    """A value created without a gradient gets one."""
    with torch.no_grad():
        z = y * 2
    z.add_(y)
    with torch.no_grad():
        w = z + 1
    return z * w


def inferred(y, x):
    with torch.inference_mode():
        z = (y * x).clone()
    with torch.inference_mode(mode=False):
        return y.sin() * z.clone()


@pytest.mark.parametrize("function", [changed_inside, changed_later, inferred])
def test_values_without_gradient_match_torch(function):
    assert_as_in_torch(Function(function), torch.rand(6, 4))


def test_operations_of_a_block_keep_their_module_and_line():
    program = exported(Untaught(), torch.rand(6, 4))
    lines = [where(node) for node in program.graph.nodes if node.op == "call_function"]
    assert len({line for line in lines if "sample_models.py:" in line}) > 5
    layers = [node for node in program.graph.nodes if node.name.startswith("linear")]
    modules = {[*node.meta["nn_module_stack"].values()][-1][0] for node in layers}
    assert modules == {"one", "two"}
    calls = {node.target for node in program.graph.nodes if node.op == "call_function"}
    kept = torch._C._set_grad_enabled, operator.getitem, torch.amp.autocast_mode._enter_autocast
    assert not calls & {*kept}


def test_export_restores_the_state_of_torch():
    with pytest.raises(ValueError, match="Rounded defines a custom backward pass"):
        exported(Function(lambda y, x: Rounded.apply(y)), torch.rand(6, 4))
    assert torch.autograd.Function.__dict__["apply"] is APPLY
    y = torch.ones(2, requires_grad=True)
    Rounded.apply(y).sum().backward()
    assert (y.grad == 2).all()
    program = torch.export.export(Untaught(), (torch.rand(6, 4),))
    assert any("wrap" in str(node.target) for node in program.graph.nodes)


@pytest.mark.slow
def test_unsupported_blocks_are_rejected():
    def function(y, x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (y,))

    with pytest.raises(ValueError, match="the operator cond is not supported"):
        exported(Function(function), torch.rand(6, 4))
