"""Bytes that operations on abstract arrays read and write, compared with known values."""

import numpy as np
import pytest

from hpc3d.arrays.abstract import AbstractPool, CostMeter


class Tape(CostMeter):
    """Cost meter that stores the reported kernels and products."""

    def __init__(self):
        self.told = []

    def kernel(self, name, nbytes):
        self.told.append((name, nbytes))

    def product(self, m, n, k, dtype, batch=1):
        self.told.append((m, n, k, dtype.name, batch))


# Of x and y, [4, 6] in float32, so 96 bytes each.
TOLD = {
    "an operation reads two and writes one": (lambda x, y: x + y, [("add", 288)]),
    "with a number one is read": (lambda x, y: x * 2.0, [("multiply", 192)]),
    "in place one is read again": (lambda x, y: np.add(x, y, out=x), [("add", 288)]),
    "a row is broadcast": (lambda x, y: x - y[0], [("subtract", 216)]),
    "truths have a byte": (lambda x, y: x > y, [("greater", 216)]),
    "a sum of columns": (lambda x, y: x.sum(0), [("reduction", 96 + 24)]),
    "a maximum of rows": (lambda x, y: x.max(1), [("reduction", 96 + 16)]),
    "a sum of all": (lambda x, y: x.sum(), [("reduction", 96 + 4)]),
    "a copy": (lambda x, y: x.copy(), [("copy", 192)]),
    "another type": (lambda x, y: x.astype("f8"), [("copy", 288)]),
    "zeros": (lambda x, y: np.zeros_like(x), [("fill", 96)]),
    "two as one": (lambda x, y: np.concatenate([x, y]), [("copy", 384)]),
    "two behind each other": (lambda x, y: np.stack([x, y]), [("copy", 384)]),
    "a dot product": (lambda x, y: np.dot(x.ravel(), y.ravel()), [("reduction", 192)]),
    "a view": (lambda x, y: x.T.reshape(2, 12)[1:, None], []),
    "a product": (lambda x, y: x @ y.T, [(4, 4, 6, "float32", 1)]),
    "a batch of them": (
        lambda x, y: x.reshape(2, 2, 6) @ y.reshape(2, 6, 2),
        [(2, 2, 6, "float32", 2)],
    ),
}


@pytest.mark.parametrize("what", TOLD)
def test_abstract_operation_reports_the_bytes_it_reads_and_writes(what):
    operation, expected = TOLD[what]
    pool = AbstractPool(Tape())
    x, y = (pool.empty((4, 6), np.float32) for _ in "xy")
    real = operation(np.ones((4, 6), np.float32), np.ones((4, 6), np.float32))
    pool.meter.told.clear()
    found = operation(x, y)
    assert pool.meter.told == expected
    assert np.shape(found) == np.shape(real)
