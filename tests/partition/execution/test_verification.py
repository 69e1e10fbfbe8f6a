"""The comparison before the first step: errors that it finds, and models that it accepts."""

import re
from bisect import bisect_left

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from hpc3d.console.exit_codes import BadData
from hpc3d.partition.capture import capture
from hpc3d.partition.capturing.user_module import in_evaluation
from hpc3d.partition.execution.largest_prefix import largest_prefix
from hpc3d.partition.execution.sample_batches import flat_inputs
from hpc3d.partition.execution.verification import verified, verified_prefix
from tests.partition.execution.modules import HERE as MODULES
from tests.partition.execution.modules import prepared

HERE = "tests.partition.execution.test_verification"


class Layers(nn.Module):
    """Two layers around `between(model, hidden values)`, and a `loss` of the result."""

    def __init__(self, between, loss=lambda y: y.square().mean()):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between, self.loss = between, loss

    def forward(self, x):
        return self.loss(self.last(self.between(self, torch.tanh(self.first(x)))))


def of(between, loss=lambda y: y.square().mean()):
    return Layers(between, loss), (torch.zeros(8, 4),)


def counting():
    """State outside the module that every call changes."""
    calls = []

    def between(model, x):
        calls.append(1)
        return x * len(calls)

    return of(between)


def detaching():
    """A gradient that plain torch does not have."""
    return of(lambda model, x: x if torch.compiler.is_compiling() else x.detach())


def invalid():
    """A gradient that is NaN in plain torch only."""

    def between(model, x):
        return x if torch.compiler.is_compiling() else x + (x - x).square().sum().sqrt()

    return of(between)


class Deciding(nn.Module):
    """A module that returns another result during tracing."""

    def forward(self, x):
        return x if torch.compiler.is_compiling() else x.sin()


class Applied(nn.Module):
    """A submodule that applies a function to a layer and the hidden values."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.layer, x)


def applying(function):
    model, inputs = of(lambda model, x: model.inner(x))
    model.inner = Applied(function)
    return model, inputs


def mapping():
    return applying(lambda layer, x: torch.func.vmap(lambda row: layer(row).tanh())(x))


def differentiating():
    """A gradient of second order."""

    def gradient(layer, x):
        return torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)[0]

    return applying(gradient)


def calling_numpy():
    return applying(lambda layer, x: layer(x) + torch.from_numpy(np.tanh(x.detach().numpy())))


def branching():
    model, inputs = of(lambda model, x: model.inner(x))
    model.inner = Deciding()
    return model, inputs


def related(x):
    return x + 0.3 * x.roll(1, 0)


def rolling_inside():
    return applying(lambda layer, x: related(layer(x)))


def counting_inside():
    calls = []

    def count(layer, x):
        calls.append(1)
        return layer(x) * len(calls)

    return applying(count)


def deciding_inside():
    def decide(layer, x):
        return layer(x) if torch.compiler.is_compiling() else layer(x).sin()

    return applying(decide)


def detaching_inside():
    return applying(lambda layer, x: layer(x if torch.compiler.is_compiling() else x.detach()))


def applied():
    return applying(lambda layer, x: layer(x).tanh())


def rolling():
    return of(lambda model, x: related(x))


def summing():
    return of(lambda model, x: x, lambda y: y.square().sum())


def summing_as_mean():
    return *summing(), "mean"


def summing_as_sum():
    return *summing(), "sum"


def averaging_as_sum():
    return *of(lambda model, x: x), "sum"


def rounding():
    """A loss in float32 of a module in float64."""
    return of(lambda model, x: x, lambda y: y.float().square().mean())


def rooted():
    return of(lambda model, x: x, lambda y: y.square().mean().sqrt())


def dropping():
    return of(lambda model, x: functional.dropout(x, 0.4, model.training))


def normalized():
    model, inputs = of(lambda model, x: model.norm(x))
    model.norm = nn.BatchNorm1d(4)
    return model, inputs


def added_to_normalized():
    """A normalized value that is modified in place."""
    model, inputs = of(lambda model, x: model.norm(x).add_(x).relu())
    model.norm = nn.BatchNorm1d(4)
    return model, inputs


def normalized_and_rolling():
    model, inputs = of(lambda model, x: related(model.norm(x)))
    model.norm = nn.BatchNorm1d(4)
    return model, inputs


def lines_of(name, shares=(range(3), range(3, 8)), training=True, gradients=True):
    module, inputs, captured = prepared(name)
    if not training:
        with in_evaluation(module):
            captured = capture(module, inputs)
    before = [buffer.clone() for buffer in module.buffers()]
    draws = torch.get_rng_state()
    try:
        flat = flat_inputs(captured, inputs)
        return verified(module, captured, flat, [*shares], training, gradients)
    finally:
        after = [*module.buffers()]
        assert all(map(torch.equal, before, after)), "buffers are restored"
        assert all(each.grad is None for each in module.parameters())
        assert torch.equal(draws, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("counting", ["a second call of the module returns a different result"]),
        ("invalid", ["differs from the module", "different gradients of first.bias"]),
        ("detaching", ["differs from the module", "gradients of first.bias", "gradient hooks"]),
        ("branching", ["differs from the module", "the first difference is in inner;"]),
        ("rolling", ["is not the mean", "roll relates samples (", "test_verification.py:"]),
        ("summing", ["is not the mean", "as a mean over the samples (", 'module, inputs, "sum"']),
        ("summing_as_mean", ["is not the mean", "return the loss as a mean over the samples"]),
        ("averaging_as_sum", ["is not the mean", "return the sum over the samples (", ".py:"]),
        ("rooted", ["is not the mean", "return the loss as a mean over the samples"]),
        ("normalized_and_rolling", ["is not the mean", "roll relates samples ("]),
    ],
)
def test_difference_from_torch_is_refused(name, lines):
    with pytest.raises(BadData) as caught:
        lines_of(f"{HERE}:{name}")
    found = str(caught.value)
    assert all(line in found for line in lines) and "\n" not in found, found
    assert found.endswith(", or start the run anyway with --verify off")


@pytest.mark.parametrize(
    "name",
    [
        *(f"{HERE}:dropping", f"{HERE}:summing_as_sum", f"{HERE}:rounding"),
        *(f"{MODULES}:chain", "inputs.partition.bert:small"),
    ],
)
def test_sound_model_is_accepted(name):
    (line,) = lines_of(name, (range(1), range(1, 3)))
    assert line.startswith("verified on 3 samples: loss ")


@pytest.mark.parametrize(
    "name",
    [
        "differentiating",
        pytest.param("mapping", marks=pytest.mark.slow),
        pytest.param("calling_numpy", marks=pytest.mark.slow),
    ],
)
def test_untraceable_code_in_a_submodule_is_accepted(name):
    assert prepared(f"{HERE}:{name}")[-1].opaque
    assert lines_of(f"{HERE}:{name}")[0].startswith("verified on 8 samples: loss ")


@pytest.mark.parametrize("name", ["normalized", "added_to_normalized"])
def test_batch_norm_is_accepted_with_a_warning(name):
    first, second = lines_of(f"{HERE}:{name}")
    assert first.startswith("verified on 8 samples")
    assert second.startswith("batch_norm: computes its statistics over each microbatch")


def test_single_microbatch_is_compared_with_the_module_only():
    (line,) = lines_of(f"{HERE}:summing", (range(8),))
    assert line.startswith("verified on 8 samples")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("counting", "a second call of the module returns a different result"),
        ("branching", "the captured program differs from the module"),
        pytest.param("rolling", "the loss of two microbatches is not", marks=pytest.mark.slow),
    ],
)
def test_difference_in_evaluation_mode_is_refused(name, line):
    with pytest.raises(BadData, match=f"^train.eval_every: in evaluation mode, {line}"):
        lines_of(f"{HERE}:{name}", training=False)


@pytest.mark.parametrize("name", ["dropping", "normalized"])
def test_module_in_evaluation_mode_is_accepted(name):
    (line,) = lines_of(f"{HERE}:{name}", training=False)
    assert line.startswith("evaluation verified on 8 samples: loss ")
    assert prepared(f"{HERE}:{name}")[0].training


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("counting", "a second call of the module returns a different result"),
        ("branching", "differs from the module (loss .*); use --verify on to find the first diff"),
        ("rolling", "is not the mean of their losses (loss .*); return the loss as a mean over"),
    ],
)
def test_losses_are_compared_without_gradients(name, line):
    pattern = line.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(BadData, match=pattern):
        lines_of(f"{HERE}:{name}", gradients=False)


@pytest.mark.parametrize(
    ("gradients", "remedy"),
    [(True, "forward, or compare only a part"), (False, "module; compare only a part")],
)
def test_module_that_does_not_fit_in_memory_is_refused(gradients, remedy, monkeypatch):
    module, inputs, captured = prepared(f"{HERE}:dropping")
    monkeypatch.setattr(module, "forward", lambda *inputs: torch.empty(10**15))
    with pytest.raises(BadData, match=r"out of memory \(unable to allocate 4.* bytes\)") as error:
        verified(module, captured, flat_inputs(captured, inputs), [range(8)], True, gradients)
    assert remedy in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["detaching", "dropping", "normalized"])
def test_comparison_without_gradients_saves_no_activations(name):
    def refuse(tensor):
        raise AssertionError("an activation is saved for the backward pass")

    prepared(f"{HERE}:{name}")  # capturing saves activations of fake tensors
    with torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        found, *_ = lines_of(f"{HERE}:{name}", gradients=False)
    assert found.endswith(", without gradients")


def prefix_lines(name, memory=None, training=True):
    """Return lines for the largest prefix that fits; by default, only `last` does not fit."""
    module, inputs, captured = prepared(f"{HERE}:{name}")
    if not training:
        with in_evaluation(module):
            captured = capture(module, inputs)
    flat, shares = flat_inputs(captured, inputs), [range(3), range(3, 8)]
    memory = memory or memory_before("last", module, captured)
    return verified_prefix(memory, module, captured, flat, shares, training)


def memory_before(path, module, captured):
    """Return the largest memory size in bytes in which the submodule `path` does not fit."""

    def ends(memory):
        found = largest_prefix(captured, module, 8, memory)
        return found is None or found.path == path

    return bisect_left(range(10**6), True, key=ends) - 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["dropping", "normalized", "applied"])
def test_largest_prefix_is_verified(name, training):
    line, *more = prefix_lines(name, training=training)
    assert len(more) == (name == "normalized" and training)
    path = {"dropping": "first", "normalized": "norm", "applied": "inner"}[name]
    assert f"verified up to the result of {path}, the largest prefix that fits in memory" in line
    assert " on 8 samples: loss " in line and line.startswith("evaluation ") != training


def test_whole_module_is_verified_if_it_fits():
    (line,) = prefix_lines("dropping", 1e9)
    assert line.startswith("verified on 8 samples: loss ")


def test_nothing_is_verified_without_memory():
    (line,) = prefix_lines("dropping", 100)
    assert line.startswith("not verified: torch.verify is off, and no submodule")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "deciding_inside",
            "the captured program differs from the module (.* difference is in inner; simplify",
        ),
        ("rolling_inside", "the loss of two microbatches is not .* roll relates samples ("),
        ("counting_inside", "a second call of the module returns a different result (loss"),
        ("detaching_inside", "differs from the module (.* different gradients of first.bias)"),
    ],
)
def test_difference_in_the_prefix_is_reported(name, line):
    (found,) = prefix_lines(name)
    pattern = line.replace("(", r"\(").replace(")", r"\)")
    assert re.fullmatch(f"warning: .*{pattern}.*; torch.verify is off", found), found
