"""Selection of the rule of a primitive by the type of its array."""

import numpy as np
import pytest

from hpc3d.arrays import primitive as primitives
from hpc3d.arrays.abstract import AbstractPool, CostMeter
from hpc3d.arrays.primitive import add_backend, composite, primitive


class Marked(np.ndarray):
    """Array of a separate type."""


class Kernels(CostMeter):
    """Cost meter that stores the reported kernels."""

    def __init__(self):
        self.noted = []

    def kernel(self, name, nbytes):
        self.noted.append((name, nbytes))


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Remove the primitives of a test after it."""
    monkeypatch.setattr(primitives, "PRIMITIVES", [*primitives.PRIMITIVES])
    monkeypatch.setattr(primitives, "BACKENDS", dict(primitives.BACKENDS))


def doubled():
    @primitive
    def double(x, out):
        return np.multiply(x, 2, out=out)

    return double


def test_numpy_array_calls_the_function_itself():
    x = np.arange(3.0)
    assert doubled()(x, np.empty(3)).tolist() == [0, 2, 4]
    assert doubled()(x, out=np.empty(3)).tolist() == [0, 2, 4]


def test_abstract_array_calls_the_abstract_rule_and_notifies_the_meter():
    double, meter = doubled(), Kernels()
    double.abstract(lambda x, out: out)
    pool = AbstractPool(meter)
    x, out = pool.empty((3,), np.float64), pool.empty((3,), np.float64)
    assert double(x, out) is out
    assert meter.noted == [("double", 48)]


def test_primitive_without_an_abstract_rule_raises():
    x = AbstractPool().empty((3,), np.float64)
    with pytest.raises(NotImplementedError, match="double"):
        doubled()(x, x)


def test_operations_inside_a_composite_notify_the_meter():
    meter = Kernels()
    x = AbstractPool(meter).empty((3,), np.float64)

    @composite
    def double(x):
        return x + x

    assert double(x).shape == (3,)
    assert [name for name, _ in meter.noted] == ["add"]


def test_backend_selects_the_rule_and_later_registrations_replace_it():
    double, x = doubled(), np.arange(3.0).view(Marked)
    double.cuda(lambda gpu, x, out: gpu)
    for gpu in ("first", "second"):
        add_backend(Marked, lambda each, gpu=gpu: lambda *given: each.cuda_rule(gpu, *given))
        assert double(x, x) == gpu
    double.register(Marked, lambda x, out: "its own")
    assert double(x, x) == "its own"
    add_backend(Marked, lambda each: None)
    assert double(x, x) == "its own"
    assert doubled()(x, x).tolist() == [0, 2, 4]
