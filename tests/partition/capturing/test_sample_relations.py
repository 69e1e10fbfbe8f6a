"""Models in which samples depend on each other, and models that look as if they did."""

import re

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional

from hpc3d.partition.capture import captured_of, carries_batch
from tests.partition.functions_of_samples import Layers, refusal, values

HERE = __name__
LINE = r": \w+ \(.*functions_of_samples.py:\d+\); compute each sample from its own inputs"
ALONG, STATISTIC = "an operation along the batch dimension", "a statistic of the batch is"


def of(change):
    """Return a mean over the samples of inputs changed by a function."""
    return lambda model, x: model.squares(change(x)).mean()


RELATED = {
    "roll": (of(lambda x: x.roll(1, 0)), ALONG),
    "roll of all elements": (of(lambda x: x.roll(1)), ALONG),
    "cumsum": (of(lambda x: x.cumsum(0)), ALONG),
    "softmax": (lambda model, x: (model.a(x).softmax(0) * x).mean(), ALONG),
    "flip": (of(lambda x: x.flip(0)), ALONG),
    "sort": (of(lambda x: x.sort(0)[0]), ALONG),
    "permuted": (of(lambda x: x[torch.tensor([*range(7, -1, -1)])]), ALONG),
    "einsum": (lambda model, x: torch.einsum("bi,ci->b", model.a(x), x).mean(), ALONG),
    "centered": (of(lambda x: x - x.mean(0)), STATISTIC),
    "centered by all": (of(lambda x: x - x.mean()), STATISTIC),
    "centered in place": (of(lambda x: x.clone().sub_(x.mean(0))), STATISTIC),
    "normalized": (of(lambda x: functional.normalize(x, dim=0)), STATISTIC),
    "two orders": (
        of(lambda x: torch.cat([x, 2 * x]) - x.repeat_interleave(2, 0)),
        "an operation combines tensors with different sample orders",
    ),
}
SEPARATE = {
    "softmax of each sample": lambda model, x: model.a(x).softmax(1).mean(),
    "time-major": lambda model, x: model.squares(torch.stack([x, x]).flatten(0, 1)).mean(),
    "merged": of(lambda x: x.view(x.shape[0], 2, 3).flatten(0, 1).view(-1, 6)),
    "last token": lambda model, x: model.a(x)[torch.arange(x.shape[0]), x.argmax(1)].mean(),
    "pairs": lambda model, x: _pairs(x.shape[0], model.a(torch.cat([x, 2 * x]))),
    "batch norm": lambda model, x: functional.batch_norm(
        model.a(x), None, None, training=True
    ).mean(),
    "metric": lambda model, x: {
        "loss": model.squares(x).mean(),
        "centered": (x - x.mean(0)).amax(),
    },
}
FEW = ("roll", "centered", "last token", "pairs")


def _pairs(samples, y):
    return ((y[:samples] - y[samples:]) ** 2).mean()


def named(cases):
    return [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in cases]


@pytest.mark.parametrize("name", named(RELATED))
def test_model_that_relates_samples_is_rejected(name):
    function, what = RELATED[name]
    assert re.search("relates different samples: " + what + ".*" + LINE, refusal(function))


@pytest.mark.parametrize("name", named(SEPARATE))
def test_model_with_separate_samples_is_accepted(name):
    assert refusal(SEPARATE[name]) is None


class Averages(Layers):
    """Model with a table of which every sample reads all rows."""

    def forward(self, x, table):
        return ((self.a(x) @ table.sum(0)) ** 2).mean()


def averaged():
    """Return a table with as many rows as the batch."""
    return Averages(None), (values(8, 6), values(8, 6, seed=2))


@pytest.mark.slow
def test_input_that_is_not_split_by_samples_may_have_as_many_rows():
    x, table = captured_of(f"{HERE}:averaged").inputs
    assert carries_batch(x) and not carries_batch(table)
    assert table.meta["val"].shape == (8, 6)
