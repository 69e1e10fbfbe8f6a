"""Outputs of any type: names of their tensors, and the output that is minimized."""

from collections import namedtuple
from functools import partial
from inspect import signature

import pytest

pytest.importorskip("torch")

import torch

from hpc3d.partition.capture import capture, loss_of
from hpc3d.partition.capturing.named_outputs import NamedOutputs
from hpc3d.partition.execution.staged_model import staged_model
from tests.partition.user_models import OUTPUTS, Base, Cache, Named, Returns, ready

Pair = namedtuple("Pair", "loss rest")


def outputs_of(function):
    module, (x,) = ready(Returns(function))
    outputs = NamedOutputs(module)
    return outputs, module(x)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_loss_is_the_output_of_that_name_or_the_first_scalar_with_a_gradient(kind):
    function, expected = OUTPUTS[kind]
    outputs, _ = outputs_of(function)
    assert outputs.loss() == expected


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda loss: loss, [""]),
        (lambda loss: Pair(loss, [loss, None, 3]), ["loss", "rest.0"]),
        (lambda loss: {"a": {1: loss}, "b": Cache(loss)}, ["a.1"]),
        (Cache, ["keys"]),
        (lambda loss: None, []),
    ],
)
def test_tensors_are_named_by_their_path(function, names):
    _, found = outputs_of(function)
    assert [*found] == names


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda loss: {"loss": loss.expand(2), "x": loss}, r"'loss' has the shape \[2\]"),
        (lambda loss: loss.detach(), "the returned tensor requires no gradient"),
        (lambda loss: [loss > 0], "output '0' has the data type bool"),
        (lambda loss: None, "it returns no tensor"),
    ],
)
def test_model_without_a_loss_is_planned_but_not_trained(function, text):
    outputs, _ = outputs_of(function)
    assert outputs.loss() is None
    captured = capture(*ready(Returns(function)))
    assert loss_of(captured) is None
    with pytest.raises(ValueError, match=f"must return its loss as a scalar .*{text}"):
        staged_model(captured, [range(len(captured.pieces))], (1,), (False,))


def test_loss_must_depend_on_the_inputs():
    def weights_only(module, x):
        return {"loss": module.a.weight.sum(), "x": x}

    module, inputs = ready(Base())
    module.forward = partial(weights_only, module)
    captured = capture(module, inputs)
    assert loss_of(captured) is None
    assert captured.loss.text == "output 'loss' does not depend on the inputs of the model"


def test_parameters_without_a_gradient_are_listed_by_no_output():
    outputs, _ = outputs_of(lambda loss: {"loss": loss, "log": loss.detach()})
    assert outputs.outputs["loss"].trained == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert outputs.outputs["log"].trained == frozenset()


def test_variable_keywords_become_named_parameters():
    module, (x,) = ready(Named())
    NamedOutputs(module, ["x", "y"])
    assert [*signature(module.forward).parameters] == ["x", "y"]
    assert torch.equal(module(x, y=x)[""], module.loss(2 * x))


def test_hook_of_the_model_changes_the_result_before_it_is_named():
    module, inputs = ready(Base())
    module.register_forward_hook(lambda module, args, loss: {"x": args[0], "loss": 2 * loss})
    captured = capture(module, inputs)
    assert captured.loss.name == "loss" and loss_of(captured).name == "mul"
