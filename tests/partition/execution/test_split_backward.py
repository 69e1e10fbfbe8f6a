"""Products with a split backward pass, compared with torch."""

from copy import copy
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

from hpc3d.comm.mesh import NullRecorder
from hpc3d.model.layers import immediately
from hpc3d.partition.capture import capture
from hpc3d.partition.execution.random_numbers import Draw
from hpc3d.partition.execution.stage_program import stage_programs
from hpc3d.partition.operation_costs import Operations
from hpc3d.predict.machine.machine import Rates
from tests.partition.execution.modules import HERE, STEPS, trained
from tests.partition.execution.test_torch_stage import stages
from tests.partition.test_operation_costs import FLOP

MACHINE = replace(FLOP, gemm={"float64": Rates(1.0, (1.0,), (1.0,))})
LATE = "gradients of weights"  # the span of W
EVERYTHING, CHAIN = f"{HERE}:everything", f"{HERE}:chain"


class Computes(nn.Module):
    """Function of an input and a parameter."""

    def __init__(self, function, shape):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(shape)), function

    def forward(self, x):
        return self.function(x, self.weight)


def captured_with(function, shape, rows):
    module = Computes(function, shape).double()
    return module, capture(module, (torch.randn(rows, dtype=torch.float64),))


def passed(function, shape, rows):
    """Return (torch's gradients of input and parameter, those before W, those after it, number of
    W calls, deferred operations according to the planner) for the sum of squares of a function's
    result."""
    module, captured = captured_with(function, shape, rows)
    (program,) = stage_programs(captured, [range(len(captured.pieces))], split=True)
    inputs = torch.randn(rows, dtype=torch.float64, requires_grad=True)
    module(inputs).square().sum().backward()
    expected, inputs.grad = (inputs.grad, module.weight.grad), None
    module.weight.grad, calls = torch.zeros_like(module.weight), []
    (made,) = program.run(
        *(Draw(0, 0, 0, len(inputs)), [], {captured.inputs[0]: inputs}, {"weight": module.weight}),
        later=lambda *call: calls.append(call),
    )[1]
    made.square().sum().backward()
    before = inputs.grad.clone(), module.weight.grad.clone()
    for call, *arguments in calls:
        call(*arguments)
    costs = Operations(captured).costs(MACHINE, len(inputs)).values()
    planned = sum(each.weight > 0 for each in costs)
    return expected, before, (inputs.grad, module.weight.grad), len(calls), planned


def transposed_view(x, weight):
    return x @ weight[1:].T


def both_ends(x, weight):
    """A weight that is used twice."""
    return functional.linear(torch.tanh(x @ weight), weight)


CONVOLUTIONS = [
    (functional.conv1d, (6, 2, 3), (3, 4, 9), {"groups": 2, "padding": "same"}),
    (functional.conv1d, (6, 4, 2), (3, 4, 9), {"padding": "valid", "dilation": 3}),
    (functional.conv2d, (6, 4, 3, 2), (3, 4, 7, 8), {"stride": (2, 1), "padding": (1, 0)}),
    (functional.conv3d, (2, 4, 2, 2, 2), (3, 4, 3, 4, 3), {"padding": 1}),
    (functional.conv_transpose1d, (4, 2, 3), (3, 4, 5), {"stride": 2, "output_padding": 1}),
    (functional.conv_transpose2d, (4, 3, 3, 3), (3, 4, 5, 5), {"groups": 2, "dilation": 2}),
    (functional.conv_transpose3d, (4, 2, 2, 2, 2), (2, 4, 2, 3, 2), {"stride": 2}),
]


def convolved(call, how):
    """A convolution whose bias is a view of its kernels."""

    def function(x, weight):
        transposed = "transpose" in call.__name__
        channels = weight.shape[1] * how.get("groups", 1) if transposed else len(weight)
        return call(x, weight, weight.flatten()[:channels], **how)

    return function


@pytest.mark.parametrize(
    ("function", "shape", "rows"),
    [
        (functional.linear, (5, 4), (3, 4, 4)),
        (lambda x, w: functional.linear(x, w, w.flatten()[:5]).relu_(), (5, 4), (3, 4, 4)),
        (torch.matmul, (4, 5), (3, 2, 4)),
        (transposed_view, (6, 4), (3, 4)),
        (both_ends, (4, 5), (3, 4)),
        (torch.mm, (4, 5), (3, 4)),
        (lambda x, w: torch.addmm(w[0], x, w.T), (4, 4), (3, 4)),
        (lambda x, w: functional.linear(x, w, w[:, 1]), (5, 4), (3, 4, 4)),
        *((convolved(call, how), *sizes) for call, *sizes, how in CONVOLUTIONS),
    ],
)
def test_split_backward_matches_torch_and_delays_the_weight_gradient(function, shape, rows):
    expected, before, after, calls, planned = passed(function, shape, rows)
    torch.testing.assert_close(before[0], expected[0], rtol=1e-12, atol=1e-12)
    assert not before[1].any() and calls == planned > 0
    for ours, theirs in zip(after, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: functional.linear(x, w / w.norm()),
        lambda x, w: functional.linear(x, w[:1].expand(4, 4)),
        lambda x, w: functional.linear(x, w, w.sum(0)),
        lambda x, w: torch.addmm(x, x, w, alpha=2),
        lambda x, w: functional.conv1d(x[:, None], w[:2, None], padding="same"),
        lambda x, w: torch.einsum("bi,io->bo", x, w) * w[0],
        lambda x, w: x @ (w * 2) @ x.T[:, :1],
    ],
)
def test_derived_weights_get_their_gradient_immediately(function):
    expected, before, after, calls, _ = passed(function, (4, 4), (3, 4))
    assert calls == 0
    for ours, now, theirs in zip(after, before, expected, strict=True):
        assert (ours == now).all()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: functional.linear(x, w / w.norm()),
        lambda x, w: x[:, None] @ w[None],
        lambda x, w: torch.einsum("bi,io->bo", x, w),
    ],
)
def test_planner_does_not_delay_gradients_of_derived_weights(function):
    *_, calls, planned = passed(function, (4, 4), (3, 4))
    assert calls == planned == 0


def test_weight_gradient_is_complete_after_its_last_product():
    """A table used twice is complete after its transpose, as an embedding is added at once."""
    (stage,), weights, micro = stages(EVERYTHING, 1, split=True)
    _, kept = stage.forward(None, micro)
    calls, units = [], []
    stage.backward(None, kept, micro, lambda *call: calls.append(call), units.append)
    gradients = {name: weights.tensors[name].grad for name in stage.units}
    now = {name for name, gradient in gradients.items() if gradient.any()}
    assert now == {"table.weight", "norm.weight", "norm.bias"}
    for function, *arguments in calls:
        before = {name: gradient.clone() for name, gradient in gradients.items()}
        function(*arguments)
        changed = {name for name in gradients if (gradients[name] != before[name]).any()}
        assert not changed & {*units}
    assert {*units} == {*stage.units}
    (whole,), again, micro = stages(EVERYTHING, 1)
    _, kept = whole.forward(None, micro)
    whole.backward(None, kept, micro, immediately, lambda unit: None)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, again.tensors[name].grad, rtol=1e-12, atol=1e-12)


class Noting(NullRecorder):
    """Records the spans of a rank's passes by phase, and its sends to other stages."""

    def __init__(self, noted):
        self.noted = noted

    def wrap(self, comm, axis):
        send = comm.send

        def noted_send(block, peer):
            self.noted.append((self.phase, "send"))
            return send(block, peer)

        comm = copy(comm)
        comm.send = noted_send
        return comm

    def span(self, name, op="elementwise", flops=0):
        self.noted.append((self.phase, name))
        return self


@pytest.mark.parametrize("recompute", [False, True])
def test_input_gradient_is_sent_before_the_weight_gradient(recompute):
    """Tests the second of two stages with four microbatches."""
    noted = {}

    def watched(mesh):
        noted[mesh.rank] = []
        return mesh.traced(Noting(noted[mesh.rank]))

    trained(CHAIN, (1, 1), 4, "zb-h1", recompute, watched)
    late = [phase for found in noted.values() for phase, name in found if name == LATE]
    assert {*late} == {"backward_weight"} and len(late) == STEPS * 4 * 4
    last = [name for phase, name in noted[1] if phase.startswith("backward")]
    assert last.index("gradients") < last.index("send") < last.index(LATE)
