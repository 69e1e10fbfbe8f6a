"""Dropout factors are drawn in pieces and never stored."""

import tracemalloc

import numpy as np
import pytest

from hpc3d.arrays.worker_threads import thread_count
from hpc3d.comm.threads import run
from hpc3d.model.context import Context
from hpc3d.model.families import GPT2
from hpc3d.model.layers import Dropout
from hpc3d.model.microbatch import Microbatch
from hpc3d.model.spec import ModelSizes, ModelSpec
from hpc3d.ops import rows
from hpc3d.ops.attention import HeadForm, attend, attend_grad
from hpc3d.ops.random import Mask, keep_mask, philox_key
from hpc3d.ops.rows import dropped
from hpc3d.tensor.layout import Layout

RATE, SEED, ROWS, COLUMNS = 0.25, 5, 4, 6  # rows of a sequence
LAYOUT = Layout("c x", "y")


def spec_of(context, rate=RATE):
    sizes = ModelSizes(1, COLUMNS, 1, ROWS, 256, dropout=rate)
    return ModelSpec(GPT2, sizes, {}, seed=SEED, context=context)


def micro(first, sequences, context, step=2):
    tokens = context.cut(np.zeros((sequences, ROWS), np.int32))
    return Microbatch(step, first, tokens, tokens, 1.0)


def whole(sequences, dtype):
    """Return x, and the factors of all elements: element e of the batch uses random number e."""
    shape = sequences * ROWS, COLUMNS
    kept = keep_mask(
        philox_key((SEED, "drop", 2)), RATE, *(slice(0, size) for size in shape), COLUMNS
    )
    return np.random.default_rng(1).normal(size=shape).astype(dtype), kept / dtype(1 - RATE)


def in_parts(x, context):
    """Return the rows of full sequences in the order of virtual sequences."""
    sequences = x.reshape(-1, ROWS, COLUMNS)
    parts = [sequences[:, context.positions(part)] for part in range(context.parts)]
    return np.stack(parts).reshape(x.shape)


@pytest.mark.parametrize("cache", [1 << 17, 40], ids=["one piece", "a row a piece"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("sizes", "context"),
    [
        ({}, Context(ROWS)),
        ({"x": 2}, Context(ROWS)),
        ({"x": 2, "y": 3}, Context(ROWS)),
        ({"c": 2}, Context(ROWS, rings=2)),
        ({"c": 4}, Context(ROWS, rings=2, heads=2)),
        ({"c": 2, "x": 4, "y": 2}, Context(ROWS, heads=2)),
    ],
    ids=str,
)
def test_dropout_is_the_same_on_every_mesh_and_microbatch(
    sizes, context, dtype, cache, monkeypatch
):
    monkeypatch.setattr(rows, "CACHE", cache)
    x, factors = whole(6, dtype)

    def rank(mesh):
        dropout = Dropout(mesh, "drop", LAYOUT, spec_of(context))
        for first, count in ((0, 2), (2, 4)):
            part = slice(first * ROWS, (first + count) * ROWS)
            here = LAYOUT.slices((count * ROWS, COLUMNS), mesh)
            mine, expected = (in_parts(each[part], context)[here] for each in (x, x * factors))
            found = dropout.apply(mine, micro(first, count, context), COLUMNS)
            np.testing.assert_array_equal(found, expected)
            assert found.dtype == dtype
            assert mesh.pool.live["activation"] == found.nbytes

    run(sizes, rank)


def test_zero_dropout_returns_its_input():
    def rank(mesh):
        x = np.ones((8, 6))
        dropout = Dropout(mesh, "drop", LAYOUT, spec_of(Context(ROWS), rate=0.0))
        assert dropout.apply(x, None, COLUMNS) is x

    run({}, rank)


def beside(function, *results):
    """Return the peak bytes that a function allocates in addition to its results."""
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


def test_dropout_factors_are_generated_piecewise():
    """Tests 8 MiB of elements, and as many probabilities: 16 samples with 8 heads."""
    x, columns = np.ones((2048, 1024), np.float32), 8 * 128**2
    mask = Mask(philox_key((1, "x")), RATE, range(2048), range(1024), 1024)
    assert beside(lambda empty: dropped(x, mask, empty(x.shape, x.dtype)), x.shape) < 1 << 20

    qkv = np.ones((16 * 128, 8 * 3 * 4), np.float32)
    drop = Mask(philox_key((1, "p")), RATE, range(16), range(columns), columns)
    scores, out = (16, 128, 8, 128), (16 * 128, 8 * 4)
    assert beside(lambda empty: attend(qkv, 128, HeadForm(4), empty, drop), scores, out) < 2 << 20
    dout, p = np.ones((16 * 128, 8 * 4), np.float32), np.ones(scores, np.float32)
    sizes = p, 128, HeadForm(4)
    most = (2 << 20) * thread_count()
    assert beside(lambda empty: attend_grad(dout, qkv, *sizes, empty, drop), qkv.shape) < most
