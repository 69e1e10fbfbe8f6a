"""Losses that are a mean over the samples, and losses that are known not to be."""

import re

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional

from tests.partition.functions_of_samples import refusal

SUM = r"a sum over the samples, not a mean: \w+ \(.*\.py:\d+\); use the mean"
NONLINEAR = r"nonlinear function of a mean over the batch: \w+ \(.*\.py:\d+\); compute"
STATISTIC = r"a statistic of the batch that is not a mean: \w+ \(.*\.py:\d+\); compute"


def of(reduce):
    return lambda model, x: reduce(model.squares(x))


OTHERS = {
    "sum": (of(torch.sum), SUM),
    "sum over a number": (of(lambda y: y.sum() / 8), SUM),
    "sum of an operation": (
        lambda model, x: functional.mse_loss(model.a(x), x, reduction="sum"),
        SUM,
    ),
    "mean over the batch size": (
        of(lambda y: y.mean() / y.shape[0]),
        r"the loss is divided by the batch size twice: ",
    ),
    "sum and mean": (of(lambda y: y.sum() + y.mean()), SUM),
    "contraction": (lambda model, x: torch.einsum("bi,bi->", model.a(x), x), SUM),
    "root": (of(lambda y: y.mean().sqrt()), NONLINEAR),
    "exponential": (of(lambda y: y.mean().exp()), NONLINEAR),
    "power": (of(lambda y: y.mean() ** 2), NONLINEAR),
    "product": (of(lambda y: y.mean() * y.sin().mean()), NONLINEAR),
    "quotient": (of(lambda y: y.sum() / y.sin().sum()), NONLINEAR),
    "maximum": (of(torch.max), STATISTIC),
    "maxima": (of(lambda y: y.max(0)[0].mean()), STATISTIC),
    "deviation": (of(torch.std), STATISTIC),
    "norm": (of(torch.norm), STATISTIC),
    "first sample": (of(lambda y: y[0].mean()), STATISTIC),
}
MEANS = {
    "mean": of(torch.mean),
    "sum over the batch size": lambda model, x: model.squares(x).sum() / x.shape[0],
    "sum over all elements": lambda model, x: model.squares(x).sum() / x.numel(),
    "sum of rows over the batch size": lambda model, x: (model.squares(x) / x.shape[0]).sum(),
    "sum of an operation": lambda model, x: (
        functional.mse_loss(model.a(x), x, reduction="sum") / x.shape[0]
    ),
    "batch mean": lambda model, x: functional.kl_div(
        model.a(x).log_softmax(1), x.softmax(1), reduction="batchmean"
    ),
    "penalty": lambda model, x: 3 * model.squares(x).mean() + (model.a.weight**2).sum(),
    "several": of(lambda y: torch.stack([y.mean(), y.sin().mean()]).sum()),
    "root of each sample": of(lambda y: y.mean(1).sqrt().mean()),
    "maximum of each sample": of(lambda y: y.amax(1).mean()),
    "valid rows": lambda model, x: (
        (model.squares(x).mean(1) * (x[:, 0] > 0)).sum() / (x[:, 0] > 0).sum()
    ),
}
FEW = ("sum", "root", "sum over the batch size", "valid rows")


def named(cases):
    return [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in cases]


@pytest.mark.parametrize("name", named(OTHERS))
def test_loss_that_is_not_a_mean_is_rejected(name):
    function, line = OTHERS[name]
    assert re.search(line, refusal(function))


@pytest.mark.parametrize("name", named(MEANS))
def test_mean_is_accepted(name):
    assert refusal(MEANS[name]) is None
