"""Attributes that forward changes: caches are accepted, state is rejected."""

import types

import pytest

pytest.importorskip("torch")

import torch

from hpc3d.partition.capture import capture
from tests.partition.functions_of_samples import Layers, values


def captured_with(function, **attributes):
    model = Layers(function)
    vars(model.a).update(attributes)
    return capture(model, (values(8, 6),))


def counts(model, x):
    model.a.calls += 1
    return model.squares(x).mean() * model.a.calls


def carries(model, x):
    y = model.a(x) + model.a.hidden
    model.a.hidden = y.mean(0).detach()
    return model.b(y).mean()


def collects(model, x):
    model.a.seen.append(x.shape[1])
    return model.squares(x).mean()


def counts_in_an_object(model, x):
    model.a.settings.calls += 1
    return model.squares(x).mean()


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (counts, "calls", 0),
        pytest.param(carries, "hidden", torch.zeros(6).double(), marks=pytest.mark.slow),
        pytest.param(collects, "seen", [], marks=pytest.mark.slow),
        pytest.param(
            *(counts_in_an_object, "settings", types.SimpleNamespace(calls=0)),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_attribute_that_every_call_changes_is_rejected(function, name, value):
    with pytest.raises(ValueError, match=rf"forward changes the attribute `{name}` of .* a \("):
        captured_with(function, **{name: value})


class Ticking(Layers):
    """Module with a class attribute that every call changes."""

    ticks = 0

    def forward(self, x):
        type(self).ticks += 1
        return super().forward(x) * self.ticks


def test_class_attribute_that_every_call_changes_is_rejected():
    model = Ticking(lambda model, x: model.squares(x).mean())
    with pytest.raises(ValueError, match=r"forward changes the attribute `ticks` of the model \("):
        capture(model, (values(8, 6),))


def caches(model, x):
    """Cache sizes, a table by size, a setting, and outputs for inspection."""
    kept = model.a
    if kept.width != x.shape[1]:
        kept.width, kept.samples = x.shape[1], x.shape[0]
        kept.tables[x.shape[1]] = torch.arange(6).double()
    kept.kind = kept.kind or "mean"
    y = model.a(x + kept.tables[x.shape[1]])
    kept.seen, kept.last = [y], y
    return model.b(y).mean()


def test_cache_is_not_rejected():
    given = {"width": None, "tables": {}, "kind": None, "seen": [], "last": None}
    assert len(captured_with(caches, **given).pieces) > 3
