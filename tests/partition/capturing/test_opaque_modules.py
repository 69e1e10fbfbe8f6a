"""Modules that cannot be traced: their detection, and their execution as operations."""

import copy
from threading import Thread

import pytest

pytest.importorskip("torch")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from hpc3d.console.exit_codes import BadData
from hpc3d.partition.capture import capture, captured_of
from hpc3d.partition.capturing.opaque_modules import OpaqueModule
from hpc3d.partition.capturing.recorded_calls import recorded_calls
from hpc3d.partition.factory import made
from hpc3d.partition.plan_file import digest_of
from tests.partition.execution.modules import prepared
from tests.partition.untraceable_models import HERE, Between, Choosy, Experts, samples


class Named(torch.nn.Module):
    """Model with a module called `inner`."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def whole(module):
    model = Named(module.double())
    run = lambda count: model(samples(count)[0])  # noqa: E731
    (call,) = recorded_calls(model, run, 4, ["inner"])["inner"]
    return OpaqueModule("inner", module, "it is a test", call)


def weights_of(found, module):
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [held[name] for name in found.weights]


def test_opaque_module_computes_the_result_and_gradients_of_the_module():
    module = Choosy()
    found, (x, _) = whole(module), samples(6)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for each in other.parameters():
            each.mul_(2)
    theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = other(theirs)
    expected.sum().backward()
    wanted = [each.grad for each in other.parameters()]
    other.zero_grad()
    result = found([ours], weights_of(found, other))
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close([each.grad for each in other.parameters()], wanted)


def test_opaque_module_is_thread_safe():
    module = Choosy()
    found, (x, _) = whole(module), samples(6)
    weights = [[torch.full_like(each, n) for each in module.parameters()] for n in range(4)]
    results = {}

    def run(number):
        for _ in range(20):
            results.setdefault(number, []).append(found([x], weights[number]))

    threads = [Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, several in results.items():
        expected = torch.func.functional_call(
            module, dict(zip(found.weights, weights[number])), (x,)
        )
        assert len(several) == 20 and all(torch.equal(each, expected) for each in several)


def test_opaque_module_on_fake_tensors_has_shapes_and_gradients():
    module = Experts()
    found = whole(module)
    with FakeTensorMode():
        x = torch.empty(5, 4, dtype=torch.float64)
        weights = [torch.empty(each.shape).double() for each in module.parameters()]
        y, chosen = found([x], weights)
        assert (y.shape, chosen.shape) == ((5, 4), (5,)) and not y.requires_grad
        y, chosen = found([x], [each.requires_grad_() for each in weights])
        assert y.requires_grad and not chosen.requires_grad


class Again(torch.nn.Linear):
    """Operation whose backward pass repeats its forward pass."""

    def forward(self, x):
        return checkpoint(
            lambda x: torch.tanh(super(Again, self).forward(x)), x, use_reentrant=False
        )


def test_checkpointed_module_recomputes_with_the_same_weights():
    module = Again(4, 4)
    found, (x, _) = whole(module), samples(6)
    weights = [each.detach().clone().mul_(3).requires_grad_() for each in module.parameters()]
    found([x], weights).sum().backward()
    same = [each.detach().clone().requires_grad_() for each in weights]
    torch.tanh(x @ same[0].T + same[1]).sum().backward()
    for ours, theirs in zip(weights, same, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


class Fickle(torch.nn.Module):
    """Operation that is only deterministic in the run with data."""

    def forward(self, x):
        if x.shape[0] == 7:
            return x[1:]
        if x.shape[0] == 9:
            return torch.nn.functional.dropout(x, 0.5)
        if x.shape[0] == 10:
            return x.mul_(2)
        if x.shape[0] == 11:
            return x.detach()
        return x.view(-1, 4)


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (7, r"inner .* must return \[\(\[7, 4\], torch.float64\)\]"),
        (9, "inner .* must not draw random numbers"),
        (10, "inner .* must not write to its inputs"),
    ],
)
def test_changed_behavior_of_an_opaque_module_is_rejected(rows, line):
    with pytest.raises(BadData, match=line):
        whole(Fickle())([samples(rows)[0]], [])


def test_results_have_separate_memory_and_gradients():
    found = whole(Fickle())
    x = samples(6)[0].requires_grad_()
    assert found([x], []).untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    x = samples(11)[0].requires_grad_()
    result = found([x], [])
    result.sum().backward()
    assert result.requires_grad and x.grad is None


def test_all_modules_of_an_untraceable_class_are_opaque():
    _, _, captured = prepared(f"{HERE}:three")
    assert [each.path for each in captured.opaque] == ["parts.0", "parts.1", "parts.2"]
    assert all("untraceable_models.py:" in each.reason for each in captured.opaque)
    owned = [piece for piece in captured.pieces if piece.module.startswith("parts")]
    assert [len(piece.nodes) for piece in owned] == [1, 1, 1]
    assert owned[0].weights == tuple(
        f"parts.0.{w}" for w in ("left.bias", "left.weight", "right.bias", "right.weight")
    )


@pytest.mark.slow
def test_parent_of_a_module_that_returns_a_number_is_opaque():
    captured = captured_of(f"{HERE}:around")
    assert [each.path for each in captured.opaque] == ["parts.0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("Number", "depends on tensor values .*parts.0 cannot be .*: the module returns a float"),
        ("Holds", "parts.0 cannot .*: the tensor attribute table is not registered"),
        ("Draws", "parts.0 cannot .*: the module draws random numbers"),
        ("Raises", r"on real data raised RuntimeError: .* is no number .*models.py:\d+\)"),
    ],
)
def test_module_that_cannot_be_opaque_is_rejected_in_one_line(kind, line):
    with pytest.raises(ValueError, match=f"^this model cannot be captured: .*{line}") as found:
        captured_of(f"{HERE}:alone('{kind}')")
    assert len(str(found.value).splitlines()) == 1


def test_untraceable_module_without_data_is_rejected():
    module, inputs = made(f"{HERE}:of('Choosy')")
    with pytest.raises(ValueError, match="pass `with_data`"):
        capture(module, inputs)


def test_model_too_large_for_a_run_with_data_is_rejected(monkeypatch):
    monkeypatch.setattr("hpc3d.runtime.host_memory.total", lambda: 100)
    with pytest.raises(
        ValueError, match=r"the parameters need 3.2e-07 GB, more than 50% of the host"
    ):
        captured_of(f"{HERE}:of('Choosy')")


def test_capture_does_not_modify_the_module():
    module = Between(Choosy()).double()
    before = copy.deepcopy(module.state_dict())
    found = capture(module, samples())
    assert found.opaque and "forward" not in vars(module.parts[0])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(each.is_meta for each in found.opaque[0]._module.parameters())


class Sharper(Choosy):
    pass


@pytest.mark.slow
def test_digest_depends_on_class_settings_and_weight_shapes():
    def digest(*parts):
        return digest_of(capture(Between(*parts).double(), samples()))

    plain, other = Choosy(), Choosy()
    other.threshold = 0.3
    wide = Choosy()
    wide.right = torch.nn.Linear(4, 4, bias=False)
    assert digest(plain) == digest(Choosy())
    assert len({digest(each) for each in (plain, other, wide, Sharper())}) == 4
