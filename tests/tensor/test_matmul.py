"""The sharded product, compared with NumPy, on all schemes and meshes, threads and real ranks."""

from functools import cache
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

import hpc3d
from hpc3d.arrays.narrow import of_type
from hpc3d.comm.threads import run
from hpc3d.tensor.chunked import chunked_matmul
from hpc3d.tensor.matmul import Split, sharded_matmul
from tests.mpi import checked
from tests.strided import daily, strided
from tests.tensor.cases import CUBOIDS, SPLITS, sizes, splits

M, K, N = 48, 48, 96


@cache
def operands(integers=False, k=K):
    """Return X, W and dY, and the expected Y, dX and dW."""
    generator = np.random.default_rng(0)
    shapes = (M, k), (k, N), (M, N)
    if integers:
        x, w, dy = (generator.integers(-8, 9, shape).astype(np.float64) for shape in shapes)
    else:
        x, w, dy = (generator.normal(size=shape) for shape in shapes)
    found = x, w, dy, x @ w, dy @ w.T, x.T @ dy
    for matrix in found:
        matrix.flags.writeable = False  # a rank that holds all of it has this one
    return found


def stored(matrix, layout, mesh):
    """Return the block of a rank, padded with zeros."""
    part, block = matrix[layout.slices(matrix.shape, mesh)], layout.block(matrix.shape, mesh)
    padding = [(0, size - count) for size, count in zip(block, part.shape)]
    return np.pad(part, padding) if block != part.shape else np.ascontiguousarray(part)


def products(mesh, split, keep, transposed, integers=False, chunks=1, k=K):
    """Return [(name, result, expected)] of one rank, for its blocks of Y, dX and dW."""
    x, w, dy, y, dx, dw = operands(integers, k)
    if transposed:
        w, dw = w.T, dw.T
    matmul = chunked_matmul(mesh, split, chunks, keep, transposed=transposed)
    ours, saved = matmul.forward_saving(stored(x, split.x, mesh), stored(w, matmul.w_layout, mesh))
    our_dx, our_dw = matmul.backward_saved(saved, stored(dy, split.y, mesh))
    return [
        ("Y", ours, stored(y, split.y, mesh)),
        ("dX", our_dx, stored(dx, split.x, mesh)),
        ("dW", our_dw, stored(dw, matmul.dw_layout, mesh)),
    ]


def compare(mesh, integers=False, keeps=("xw", "x", "w", ""), chunks=1):
    """Run both layers of a pair in every way; raise an error if a block differs."""
    for split in mesh.splits:
        count = 1 if split.panels or split.own else chunks
        for keep in keeps:
            for transposed in (False, True) if not split.panels and count == 1 else (False,):
                found = products(mesh, split, keep, transposed, integers, count)
                for what, ours, expected in found:
                    bound = 0 if integers else 1e-12 * max(1, np.abs(expected).max(initial=0))
                    np.testing.assert_allclose(ours, expected, rtol=0, atol=bound, err_msg=what)


HOW = [*product(CUBOIDS, (1, 2), (True, False))]  # with integers it is bitwise


@pytest.mark.parametrize(("cuboid", "data", "integers"), strided(HOW, 30, days=1))
@pytest.mark.parametrize("name", SPLITS)
def test_sharded_product_matches_numpy(name, cuboid, data, integers):
    def rank(mesh):
        mesh.splits = splits(name, data)
        compare(mesh, integers)

    run({"d": data, **sizes(name, cuboid)}, rank)


PADDED = [*product(SPLITS, (3, 2))]
PADDED.remove(("3d-broadcast", 2))  # dW would have another owner than W


@pytest.mark.parametrize(("name", "zero"), strided(PADDED, 11))
def test_product_with_padded_shards_of_w_matches_numpy(name, zero):
    """Six replicas share the 20 rows of W, or fewer rows if axes of k shard them as well."""
    split = SPLITS[name].over("d", zero).over("c", zero, outermost=name != "2d-summa")
    chunks = 1 if split.panels or split.own else 3

    def rank(mesh):
        for each, count in product((split, split.next()), {1, chunks}):
            for what, ours, expected in products(mesh, each, "x", False, True, count, k=20):
                np.testing.assert_array_equal(ours, expected, what)

    run({"c": 2, "d": 3, **sizes(name, (2, 2, 1))}, rank)


# Schemes and bounds of the relative errors of dW. Partial sums are rounded to bfloat16 only if an
# axis of the scheme reduces them before d does.
REDUCED = {"1d": 1e-6, "1d-sequence": 1e-6, "2d": 2.0**-7, "2d-summa": 2.0**-7, "3d": 2.0**-7}


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("name", REDUCED)
def test_16_bit_products_are_reduced_over_replicas_in_float32(name, zero):
    """Three replicas share the 20 rows of W, which are padded."""
    x, w, dy, *_ = (each.astype("bfloat16") for each in operands(k=20))
    expected = x.astype(np.float64).T @ dy.astype(np.float64)
    split = SPLITS[name].over("d", zero)

    def rank(mesh):
        for chunks in {1, 1 if split.panels else 3}:
            matmul = chunked_matmul(mesh, split, chunks, "x", reduced="float32")
            layouts = split.x, matmul.w_layout, split.y
            given = zip((x, w, dy), layouts, strict=True)
            ours_x, ours_w, ours_dy = (of_type(stored(*each, mesh)) for each in given)
            _, saved = matmul.forward_saving(ours_x, ours_w)
            _, dw = matmul.backward_saved(saved, ours_dy)
            assert dw.dtype == np.float32
            theirs = stored(expected, matmul.dw_layout, mesh)
            bound = REDUCED[name] * np.abs(expected).max()
            np.testing.assert_allclose(dw, theirs, rtol=0, atol=bound)

    run({"d": 3, **sizes(name, (2, 2, 1))}, rank)


@pytest.mark.parametrize("name", SPLITS)
def test_next_split_consumes_the_output_layout(name):
    split, turned = splits(name)
    assert turned.x == split.y
    assert turned.next() == split


def test_shards_are_equal_parts_of_every_matrix():
    def rank(mesh):
        split = SPLITS["3d"]
        shapes = {split.x: (M, K), split.w: (K, N), split.y: (M, N)}
        return [np.prod(layout.block(shape, mesh)) for layout, shape in shapes.items()]

    blocks = run({"x": 2, "y": 3, "z": 2}, rank)
    assert blocks == [[M * K // 12, K * N // 12, M * N // 12]] * 12


def test_owners_are_on_the_diagonal():
    def rank(mesh):
        shape = SPLITS["3d-broadcast"].x.block((M, K), mesh)
        return mesh.coord("x"), mesh.coord("y"), shape[0]

    for x, y, rows in run({"x": 2, "y": 2, "z": 2}, rank):
        assert rows == (M // 2 if x == y else 0)


def test_indivisible_size_error_names_the_axes():
    with pytest.raises(ValueError, match=r"dimension of 10 must be divisible .* x 2 x y 2 = 4"):
        run({"x": 2, "y": 2, "z": 1}, lambda mesh: SPLITS["3d"].x.slices((10, 8), mesh))


@pytest.mark.parametrize(
    ("ranks", "transport"),
    [
        pytest.param(8, "auto", marks=[daily, pytest.mark.slow]),
        pytest.param(12, "mpi", marks=[daily, pytest.mark.slow]),
    ],
)
def test_all_schemes_match_on_mpi_ranks(ranks, transport):
    out = checked(ranks, "-m", "tests.tensor.on_mpi", transport, timeout=200)
    assert out.split() == [*SPLITS, "done"]


@pytest.mark.parametrize("scheme", hpc3d.SCHEMES)
def test_public_matmul_supports_every_scheme(scheme):
    x, w, dy, *expected = operands(integers=True)

    def rank(mesh):
        split = hpc3d.SCHEMES[scheme]
        layouts = split.x, split.w, split.y
        blocks = [stored(*each, mesh) for each in zip((x, w, dy), layouts, strict=True)]
        matmul = hpc3d.Matmul(mesh, split)
        found = matmul.forward(*blocks[:2]), *matmul.backward(*blocks)
        for ours, matrix, layout in zip(found, expected, (split.y, split.x, split.w), strict=True):
            np.testing.assert_array_equal(ours, stored(matrix, layout, mesh))

    run({"x": 2, "y": 2, "z": 2}, rank)


FUSED = {
    "one rank": (Split(), {}, (True, True, True)),
    "tokens": (Split(m="x"), {"x": 2}, (True, False, False)),
    "columns": (Split(n="x"), {"x": 2}, (True, True, False)),
    "a sum": (Split(k="x"), {"x": 2}, (False, True, False)),
    "axes of one rank": (Split(m="x", n="y", k="z"), {"x": 1, "y": 1, "z": 1}, (True, True, True)),
    "replicas": (Split().over("d"), {"d": 2}, (True, True, True)),
    "replicas that share gradients": (Split().over("d", 2), {"d": 2}, (True, False, False)),
    "panels": (Split(m="x", n="y", panels="y"), {"x": 1, "y": 1}, (False, False, False)),
}


@pytest.mark.parametrize("what", FUSED)
@pytest.mark.parametrize("on_device", [True, False])
def test_fusable_products_on_devices_are_detected(what, on_device):
    """`whole`: Y is not a partial sum; `sums`: dW is not a partial sum; `alone`: neither is."""
    split, sizes, expected = FUSED[what]
    mesh = SimpleNamespace(
        pool=SimpleNamespace(on_device=on_device), size=lambda axis: sizes.get(axis, 1)
    )
    matmul = sharded_matmul(mesh, split)
    found = matmul.y_is_complete, matmul.dw_is_complete, matmul.is_local
    assert found == (expected if on_device else (False, False, False))
