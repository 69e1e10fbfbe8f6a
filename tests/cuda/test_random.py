"""Dropout and initial weights on the host: same random numbers as in NumPy."""

import numpy as np
import pytest

from hpc3d.ops.random import Mask, normal, philox_draws, philox_key
from hpc3d.ops.rows import dropped
from tests.cuda.conftest import FLOAT


def drawn_by(mask):
    """Return the arguments that tell a kernel which random numbers its block has."""
    stretch = isinstance(mask.rows, range)
    return {
        "key": mask.key,
        "rows": None if stretch else mask.rows,
        "first_row": mask.rows.start if stretch else 0,
        "first_column": mask.columns.start,
        "width": mask.width,
        "limit": round(mask.rate * 2**16),
        "factor": 1 / (1 - mask.rate),
    }


BLOCKS = [  # rows, columns and width: whole rows, and parts that begin within a draw of 64 bits
    (range(3), range(1), 1),
    (range(5, 8), range(37), 37),
    (range(2), range(3, 50), 61),
    (range(4, 5), range(2, 602), 603),
    (range(2**33, 2**33 + 2), range(16), 2**20),
]


CUT = (np.array([7, 8, 2**33, 3]), range(2, 35), 64)  # rows that do not follow each other


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("block", [*BLOCKS, CUT], ids=str)
def test_dropout_kernel_drops_the_same_elements_as_numpy(rate, block, real, draw, emulate):
    mask = Mask(philox_key((1234, "drop", 7)), rate, *block)
    shape = len(mask.rows), len(mask.columns)
    x, wide = draw(real, *shape)
    out = real.empty(*shape)
    emulate("dropped", *shape, x=x, out=out, columns=shape[1], **drawn_by(mask))
    if real.name == "float32":
        expected = dropped(x, mask, np.empty_like(x))
    else:
        factors = mask.factors(slice(None), slice(None), np.float32)
        expected = real.cast(wide * real.back(real.cast(factors)))
    np.testing.assert_array_equal(out, expected)


def test_draw_equal_to_the_dropout_limit_is_kept(emulate):
    key = philox_key((1, "drop"))
    limit = philox_draws(key, 0, 4).view(np.uint16)[5]
    mask = Mask(key, limit / 2**16, range(1), range(16), 16)
    x, out = np.ones((1, 16), np.float32), np.empty((1, 16), np.float32)
    emulate("dropped", 1, 16, x=x, out=out, columns=16, **drawn_by(mask))
    np.testing.assert_array_equal(out, dropped(x, mask, np.empty_like(x)))
    assert out[0, 5]


def initial(real, emulate, rows, columns, width):
    """Return a block of initial weights, and NumPy's values."""
    shape, key = (len(rows), len(columns)), philox_key((7, "layers.0.up.weight"))
    value = real.empty(*shape)
    place = {"first_row": rows.start, "first_column": columns.start, "width": width}
    given = {"columns": shape[1], "std": 0.02, "key": key}
    emulate("initialise", *shape, value=value, **given, **place)
    slices = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
    return value, normal(key, *slices, width) * 0.02


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_initial_weights_kernel(block, real, emulate):
    real.same(*initial(real, emulate, *block), atol=0)


def test_largest_initial_weight_is_accurate(emulate):
    """Where log u is steep, an error in the last bit of u is visible."""
    many = 1 << 22
    key = philox_key((7, "layers.0.up.weight"))
    at = int(np.argmin(philox_draws(key, 0, many) >> np.uint64(32)))
    got, expected = initial(FLOAT, emulate, range(1), range(at, at + 1), many)
    np.testing.assert_allclose(got, expected, rtol=2e-7)
