"""Chunked products, compared with unchunked ones; tests.tensor.on_mpi uses real ranks."""

import numpy as np
import pytest

from hpc3d.comm.threads import run
from hpc3d.tensor.chunked import Chunked, chunked_matmul
from hpc3d.tensor.matmul import Matmul
from hpc3d.tensor.split import SCHEMES
from tests.strided import strided
from tests.tensor.cases import distinct, sizes, splits
from tests.tensor.test_counts import SHAPE, counted, still_mesh
from tests.tensor.test_matmul import compare


@pytest.mark.parametrize(("name", "cuboid"), strided(distinct(), 6, days=1))
def test_chunked_product_matches_numpy(name, cuboid):
    """With integers, the results are bitwise identical, even if chunks have unequal sizes."""

    def rank(mesh):
        mesh.splits = splits(name)
        for chunks in (2, 5, 64):
            compare(mesh, integers=True, keeps=("xw", ""), chunks=chunks)
        compare(mesh, keeps=("xw",), chunks=3)

    run(sizes(name, cuboid), rank)


@pytest.mark.parametrize("scheme", ["1d", "1d-sequence"])
def test_stacked_experts_can_be_chunked(scheme):
    draw = np.random.default_rng(0)
    x, w = draw.normal(size=(24, 3, 8)), draw.normal(size=(8, 3, 16))

    def rank(mesh):
        split = SCHEMES[scheme].next()
        x_rows, x_columns = split.x.slices((24, 8), mesh)
        w_rows, w_columns = split.w.slices((8, 16), mesh)
        blocks = x[x_rows, :, x_columns].copy(), w[w_rows, :, w_columns].copy()
        once, chunked = (
            chunked_matmul(mesh, split, chunks, stacked=True).forward(*blocks) for chunks in (1, 3)
        )
        np.testing.assert_allclose(chunked, once, rtol=0, atol=1e-12)

    run({"x": 4}, rank)


GRIDS = {
    "1d": {"x": 4},
    "1d-sequence": {"x": 4},
    "2d": {"x": 2, "y": 4},
    "3d": {"x": 2, "y": 4, "z": 2},
}


PAIRS = {scheme: (SCHEMES[scheme], SCHEMES[scheme].next()) for scheme in GRIDS}


def passes_of_pair(scheme, chunks):
    """Count the elements and calls in both passes of two consecutive layers."""
    mesh, recorder = still_mesh(GRIDS[scheme])
    m, k, n = SHAPE
    for split in PAIRS[scheme]:
        x, w, dy = (
            np.zeros(layout.block(shape, mesh), np.float32)
            for layout, shape in ((split.x, (m, k)), (split.w, (k, n)), (split.y, (m, n)))
        )
        matmul = chunked_matmul(mesh, split, chunks)
        matmul.backward_saved(matmul.forward_saving(x, w)[1], dy)
    return counted(recorder)


@pytest.mark.parametrize("scheme", GRIDS)
def test_chunks_multiply_the_calls_for_activations_but_not_the_bytes(scheme):
    """X, Y and dY need c calls; dX, W and dW need one."""
    (words, calls), chunked = (passes_of_pair(scheme, chunks) for chunks in (1, 4))
    x, y = (sum(bool(getattr(split, letter)) for split in PAIRS[scheme]) for letter in "nk")
    if scheme == "1d":
        assert chunked == (words, {"all_reduce": x + 4 * y})
        return
    weights = 2 * ("x" in SCHEMES[scheme].m)
    assert calls == {"all_gather": x + y + weights, "reduce_scatter": y + x + weights}
    more = {"all_gather": 4 * (x + y) + weights, "reduce_scatter": 4 * y + x + weights}
    assert chunked == (words, more)


def test_wide_blocks_are_split_at_multiples_of_64_columns():
    x, mesh = np.zeros((4, 500)), still_mesh({"y": 2})[0]
    xs = chunked_matmul(mesh, SCHEMES["2d"], 3).forward_saving(x, np.zeros((500, 8)))[1].x
    assert [each.shape for each in xs] == [(8, 128), (8, 192), (8, 180)]


def test_product_without_communication_of_activations_is_not_chunked():
    mesh, _ = still_mesh({"x": 2})
    assert [type(chunked_matmul(mesh, split, 4)) for split in splits("1d")] == [Matmul, Chunked]
    assert type(chunked_matmul(mesh, SCHEMES["1d"].next(), 1)) is Matmul


def test_next_chunk_is_gathered_before_the_current_one_is_multiplied(monkeypatch):
    mesh, _ = still_mesh({"x": 2, "y": 2, "z": 2})
    matmul, order = chunked_matmul(mesh, SCHEMES["3d"], 3), []

    def noted(name):
        method = getattr(matmul, name)
        return lambda *args: (order.append(name), method(*args))[1]

    for name in ("gather", "multiply", "reduce"):
        monkeypatch.setattr(matmul, name, noted(name))
    matmul.forward(np.zeros((12, 6)), np.zeros((3, 3)))
    products = 3 * "multiply "
    expected = f"gather gather gather {products} gather {products}" + 3 * "multiply reduce "
    assert order == expected.split()
