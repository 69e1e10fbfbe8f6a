"""Products on threads as ranks, and received bytes compared with docs/theory.md."""

import numpy as np
import pytest

from hpc3d import SCHEMES, Cube, Split

M, K, N, ITEM = 24, 48, 96, 8
CUBES = {
    "1d": Cube(x=4),
    "1d-sequence": Cube(x=4),
    "2d": Cube(x=2, y=3),
    "2d-summa": Cube(x=2, y=2),
    "2.5d": Cube(x=2, y=2, z=3),
    "3d": Cube(x=2, y=3, z=2),
    "3d-broadcast": Cube(x=2, y=2, z=2),
}


@pytest.fixture(scope="module")
def matrices():
    rng = np.random.default_rng(0)
    return [rng.normal(size=size) for size in ((M, K), (K, N), (M, N))]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_computes_the_product_and_its_gradients(scheme, matrices):
    x, w, dy = matrices
    cube = CUBES[scheme]
    np.testing.assert_allclose(cube.matmul(x, w, scheme), x @ w, rtol=0, atol=1e-12)
    dx, dw = cube.gradients(x, w, dy, scheme)
    np.testing.assert_allclose(dx, dy @ w.T, rtol=0, atol=1e-12)
    np.testing.assert_allclose(dw, x.T @ dy, rtol=0, atol=1e-12)


def test_received_bytes_of_a_rank_match_the_formula(matrices):
    """Of a block shared by q ranks, each rank gathers the q - 1 shards of the others."""
    x, w, _ = matrices
    cube = CUBES["3d"]
    cube.matmul(x, w)
    found = {(call.axis, call.operation): (call.calls, call.received) for call in cube.calls}
    assert found == {
        ("y", "all_gather"): (1, M * K / (2 * 2) * (2 / 3) * ITEM),
        ("x", "all_gather"): (1, K * N / (2 * 3) * (1 / 2) * ITEM),
        ("z", "reduce_scatter"): (1, M * N / (2 * 3) * (1 / 2) * ITEM),
    }


def test_custom_split_computes_the_product(matrices):
    x, w, _ = matrices
    split = Split(m="z", n="x", k="y")
    cube = Cube(x=2, y=2, z=2)
    np.testing.assert_allclose(cube.matmul(x, w, split), x @ w, atol=1e-12)
    assert cube.layouts(split)["x"] == split.x
    assert cube.ranks == 8


def test_each_rank_stores_an_equal_shard(matrices):
    x, _, _ = matrices
    cube = Cube(x=2, y=3, z=2)
    layout = cube.layouts()["x"]
    blocks = cube.shard(x, layout)
    assert [block.shape for block in blocks] == 12 * [(M // 6, K // 2)]
    np.testing.assert_array_equal(np.vstack([blocks[0], blocks[2], blocks[4]]), x[:12, :24])
    assert repr(cube) == "Cube(x=2, y=3, z=2): 12 ranks on threads"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, w: Cube(x=0), "Cube: x = 0"),
        (lambda x, w: Cube(x=2.0), r"Cube: x = 2\.0"),
        (lambda x, w: Cube(x=32, y=32), "Cube: 1024 ranks exceed .* 512 "),
        (lambda x, w: Cube(x=2, y=2).matmul(x, w, "1d"), "y = 2: .* along y; set the size"),
        (lambda x, w: Cube(x=2).matmul(x, w, "4d"), "4d: no such scheme"),
        (lambda x, w: Cube(x=5).matmul(x, w), "x .*: dimension 0 must be divisible by 5"),
        (lambda x, w: Cube().matmul(x, x), "x .* and w .*: must be matrices"),
        (lambda x, w: Cube().matmul(x, w.astype("f4")), "x is float64 and w float32"),
        (lambda x, w: Cube().matmul(x.astype(int), w.astype(int)), "x is int64"),
        (lambda x, w: Cube().gradients(x, w, x), "dy .*: must be "),
    ],
)
def test_invalid_cube_input_is_rejected(call, said, matrices):
    x, w, _ = matrices
    with pytest.raises(ValueError, match=f"^{said}"):
        call(x, w)
