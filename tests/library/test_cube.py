"""A cube of threads: its product against NumPy, its bytes against the formula."""

import numpy as np
import pytest

import hpc3d
from hpc3d.library.cube import Cube
from tests.elided import elided

M, K, N = 24, 12, 36
MESHES = {
    "1d": {"x": 3},
    "1d-sequence": {"x": 3},
    "2d": {"x": 2, "y": 3},
    "2d-summa": {"x": 2, "y": 3},
    "2.5d": {"x": 2, "y": 2, "z": 2},
    "3d": {"x": 2, "y": 3, "z": 2},
    "3d-broadcast": {"x": 2, "y": 2, "z": 2},
}


def operands():
    """X, W and dY of whole numbers, so that no order of sums matters."""
    generator = np.random.default_rng(0)
    return [generator.integers(-9, 9, shape).astype("f4") for shape in ((M, K), (K, N), (M, N))]


@pytest.mark.parametrize("scheme", hpc3d.SCHEMES)
def test_the_product_and_its_gradients_are_those_of_numpy(scheme):
    x, w, dy = operands()
    cube = Cube(**MESHES[scheme])
    np.testing.assert_array_equal(cube.matmul(x, w, scheme), x @ w)
    dx, dw = cube.matmul_backward(x, w, dy, scheme)
    np.testing.assert_array_equal(dx, dy @ w.T)
    np.testing.assert_array_equal(dw, x.T @ dy)


def test_bytes_are_those_of_the_formula():
    x, w, dy = operands()
    cube = Cube(x=2, y=3, z=2)
    cube.matmul(x, w)
    whole = {"x": ("all_gather", 1 * K * N), "y": ("all_gather", 2 * M * K)}
    whole["z"] = "reduce_scatter", 1 * M * N
    expected = [
        {"axis": axis, "op": op, "calls": 1, "bytes": 4 * n // 12, "total_bytes": 4 * n}
        for axis, (op, n) in whole.items()
    ]
    assert cube.received == expected
    cube.matmul_backward(x, w, dy)
    assert [row["op"] for row in cube.received] == 2 * ["all_gather", "reduce_scatter"] + [
        "all_gather"
    ]


def test_owners_receive_less_than_others():
    x, w, _ = operands()
    cube = Cube(**MESHES["3d-broadcast"])
    cube.matmul(x, w, "3d-broadcast")
    assert all(row["total_bytes"] < cube.ranks * row["bytes"] for row in cube.received)


def test_one_rank_receives_nothing():
    x, w, _ = operands()
    cube = Cube()
    np.testing.assert_array_equal(cube.matmul(x.tolist(), w), x @ w)
    assert cube.received == [] and cube.ranks == 1


@pytest.mark.parametrize("letter", "xwy")
def test_unshard_undoes_shard(letter):
    layout, cube = getattr(hpc3d.SCHEMES["3d"], letter), Cube(x=2, y=3, z=2)
    whole = np.arange(24 * 36).reshape(24, 36)
    blocks = cube.shard(whole, layout)
    assert {block.size for block in blocks} == {whole.size // 12}
    np.testing.assert_array_equal(cube.unshard(blocks, layout), whole)


def test_a_split_may_have_axes_of_its_own():
    x, w, _ = operands()
    split = hpc3d.Split(m="d", replicate="d")
    np.testing.assert_array_equal(Cube(d=4).matmul(x, w, split), x @ w)


@pytest.mark.parametrize(
    ("act", "line"),
    [
        (lambda x, w: Cube(p=2), "axis p: ... d, c, e, x, y, z"),
        (lambda x, w: Cube(x=0), "x = 0: ... 1 ..."),
        (lambda x, w: Cube(x=2.0), "x = 2.0: ... 1 ..."),
        (lambda x, w: Cube(x=1024), "1024 ranks: ... 512 ..."),
        (lambda x, w: Cube(x=2, y=2).matmul(x, w, "1d"), "y = 2: ... 1d ... y; use 1"),
        (lambda x, w: Cube(x=2).matmul(x, w, "2.5"), "scheme = '2.5': ... 2.5d? ..."),
        (lambda x, w: Cube(x=5).matmul(x, w), "Y [24, 36]: ... 24 ... x 5 ... = 5"),
        (lambda x, w: Cube(z=8).matmul(x, w), "X [24, 12]: ... 12 ... z 8 = 8"),
        (lambda x, w: Cube(x=2, y=2, z=4).matmul(x[:12], w), "Y [12, 36]: ... 12 ... = 8"),
        (lambda x, w: Cube(x=2).matmul(w, w), "x [12, 36] and w [12, 36]: ..."),
        (lambda x, w: Cube(x=2).matmul(x[0], w), "x [12] of float32: ..."),
        (lambda x, w: Cube(x=2).matmul(x * 1j, w), "x [24, 12] of complex64: ..."),
        (lambda x, w: Cube(x=2).matmul_backward(x, w, x), "dy [24, 12]: ... [24, 36]; ..."),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(act, line):
    x, w, _ = operands()
    with pytest.raises(ValueError, match=elided(line)):
        act(x, w)
