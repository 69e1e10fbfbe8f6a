"""Dropout multiplies by factors that are drawn piece by piece and that nobody keeps."""

import tracemalloc

import numpy as np
import pytest

from hpc3d.comm.threads import run
from hpc3d.model.layers import Dropout
from hpc3d.model.microbatch import Microbatch
from hpc3d.ops import rows
from hpc3d.ops.attention import HeadForm, attend, attend_grad
from hpc3d.ops.random import Mask, keep_mask, philox_key
from hpc3d.ops.rows import dropped
from hpc3d.tensor.layout import Layout

RATE, SEED, ROWS, COLUMNS = 0.25, 5, 4, 6  # rows of a sequence
LAYOUT = Layout("x", "y")


def micro(first, sequences, step=2):
    tokens = np.zeros((sequences, 3), np.int32)
    return Microbatch(step, first, tokens, tokens, 1.0)


def whole(sequences, dtype):
    """x, and the factors of all of it: draw e of the key belongs to element e of the batch."""
    shape = sequences * ROWS, COLUMNS
    kept = keep_mask(
        philox_key((SEED, "drop", 2)), RATE, tuple(slice(0, size) for size in shape), COLUMNS
    )
    return np.random.default_rng(1).normal(size=shape).astype(dtype), kept / dtype(1 - RATE)


@pytest.mark.parametrize("cache", [1 << 17, 40], ids=["one piece", "a row a piece"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sizes", [{}, {"x": 2}, {"x": 2, "y": 3}], ids=str)
def test_every_mesh_and_microbatch_drops_the_same(sizes, dtype, cache, monkeypatch):
    monkeypatch.setattr(rows, "CACHE", cache)
    x, factors = whole(6, dtype)

    def rank(mesh):
        dropout = Dropout(mesh, "drop", LAYOUT, RATE, SEED)
        for first, count in ((0, 2), (2, 4)):
            part = slice(first * ROWS, (first + count) * ROWS)
            here = LAYOUT.slices((count * ROWS, COLUMNS), mesh)
            found = dropout.apply(x[part][here], micro(first, count), ROWS, COLUMNS)
            np.testing.assert_array_equal(found, (x * factors)[part][here])
            assert found.dtype == dtype
            assert mesh.pool.live["activation"] == found.nbytes

    run(sizes, rank)


def test_without_dropout_x_stays_where_it_is():
    def rank(mesh):
        x = np.ones((8, 6))
        assert Dropout(mesh, "drop", LAYOUT, 0.0, SEED).apply(x, None, ROWS, COLUMNS) is x

    run({}, rank)


def beside(function, *results):
    """Bytes that a function takes, at most, beside its results."""
    arrays = [np.empty(shape, np.float32) for shape in results]

    def empty(shape, dtype):
        (place,) = [place for place, array in enumerate(arrays) if array.shape == shape]
        return arrays.pop(place)

    tracemalloc.start()
    function(empty)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not arrays
    return peak


def test_only_pieces_of_the_factors_exist_at_a_time():
    """Of 8 MiB of elements, and of as many probabilities: 16 samples of 8 heads."""
    x, columns = np.ones((2048, 1024), np.float32), 8 * 128**2
    mask = Mask(philox_key((1, "x")), RATE, range(2048), range(1024), 1024)
    assert beside(lambda empty: dropped(x, mask, empty(x.shape, x.dtype)), x.shape) < 1 << 20

    qkv = np.ones((16 * 128, 8 * 3 * 4), np.float32)
    drop = Mask(philox_key((1, "p")), RATE, range(16), range(columns), columns)
    scores, out = (32, 128, 4, 128), (16 * 128, 8 * 4)
    assert beside(lambda empty: attend(qkv, 128, HeadForm(4), empty, drop), scores, out) < 2 << 20
    dout, p = np.ones((16 * 128, 8 * 4), np.float32), np.ones(scores, np.float32)
    sizes = p, 128, HeadForm(4)
    assert beside(lambda empty: attend_grad(dout, qkv, *sizes, empty, drop), qkv.shape) < 3 << 20
