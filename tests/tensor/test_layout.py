"""Positions of a rank's blocks, as index slices, compared with mesh coordinates."""

import pickle

import numpy as np
import pytest

from hpc3d.comm.threads import run
from hpc3d.tensor.layout import Layout, part

SIZES = {"x": 2, "y": 3, "z": 2}


def of_ranks(look):
    """Return {coordinates of a rank: `look(mesh)`}."""
    return dict(run(SIZES, lambda mesh: (tuple(map(mesh.coord, "xyz")), look(mesh))))


def test_first_axis_of_a_dimension_is_the_outermost():
    found = of_ranks(lambda mesh: Layout("x y", "z").slices((12, 4), mesh))
    for (x, y, z), (rows, columns) in found.items():
        assert rows == slice(2 * (3 * x + y), 2 * (3 * x + y) + 2)
        assert columns == slice(2 * z, 2 * z + 2)


@pytest.mark.parametrize(
    "layout", [Layout("x y", "z"), Layout("", "y x z"), Layout("z", "")], ids=str
)
def test_blocks_contain_every_element_once_per_replica(layout):
    held = np.zeros((12, 24), int)
    for where in of_ranks(lambda mesh: layout.slices((12, 24), mesh)).values():
        held[where] += 1
    named = {axis for axes in layout for axis in axes}
    replicas = np.prod([size for axis, size in SIZES.items() if axis not in named], dtype=int)
    assert (held == replicas).all()


def test_owned_block_exists_once_along_its_axis():
    layout = Layout("x", "z", owned="y")
    held = np.zeros((12, 4), int)
    for (x, y, _), where in of_ranks(lambda mesh: layout.slices((12, 4), mesh)).items():
        held[where] += 1
        assert (where[0].stop > where[0].start) == (y == x % 3)
    assert (held == 1).all()


def test_padded_shards_have_equal_sizes_and_contain_every_row_once():
    """Of 7 rows per rank of z, 6 ranks store 2, 2, 2, 1, 0 and 0."""
    layout, held = Layout("z x y", "", padded="x y"), np.zeros((14, 2), int)
    for where, shape in of_ranks(
        lambda mesh: (layout.slices(held.shape, mesh), layout.block(held.shape, mesh))
    ).values():
        held[where] += 1
        assert shape == (2, 2)
    assert (held == 1).all()


def test_only_the_owner_stores_a_padded_shard():
    layout = Layout("x", "", owned="y", padded="x")
    for (x, y, _), block in of_ranks(lambda mesh: layout.block((5, 2), mesh)).items():
        assert block == (3 if y == x else 0, 2)


@pytest.mark.parametrize("dim", [0, 1])
def test_ranks_have_a_part_of_each_section(dim):
    """Sections of 6, 12 and 6 elements are sharded over the six ranks of x and y."""
    sections, whole = (6, 12, 6), np.arange(24 * 24).reshape(24, 24)
    axes = ["", ""]
    axes[dim] = "x y"
    layout = Layout(*axes, sections=sections)

    def block(mesh):
        found = np.zeros(layout.block(whole.shape, mesh), int)
        for here, there in layout.pieces(whole.shape, mesh):
            found[here] = whole[there]
        return found

    found = of_ranks(block)
    for (x, y, _), ours in found.items():
        n = 3 * x + y
        expected = np.take(whole, [n, 6 + 2 * n, 7 + 2 * n, 18 + n], dim)
        np.testing.assert_array_equal(ours, expected)


def test_dim_of_returns_the_dimension_of_an_axis():
    layout = Layout("x y", "z")
    assert [layout.dim_of(axis) for axis in "xyzd"] == [0, 0, 1, None]


def test_layout_equality_includes_owners():
    assert Layout("x", "") == Layout("x", "")
    assert not Layout("x", "") == Layout("x", "", owned="y")  # noqa: SIM201  `==` is what is ours
    assert Layout("x", "") != Layout("x", "", owned="y")
    assert len({Layout("x", ""), Layout("x", ""), Layout("x", "", owned="y")}) == 2
    assert Layout("x", "", sections=(2, 2)) != Layout("x", "")
    assert Layout("x", "", padded="x") != Layout("x", "")
    assert pickle.loads(pickle.dumps(Layout("x", "", sections=(2, 2)))).sections == (2, 2)
    assert str(Layout("x y", "", owned="z")) == "[_xy, -] owned along z"


def test_indivisible_dimension_error_names_its_axes():
    with pytest.raises(ValueError, match=r"a dimension of 10 .* x 2 x y 3 = 6"):
        run(SIZES, lambda mesh: part(10, ("x", "y"), mesh))


@pytest.mark.parametrize(
    "layout", [Layout("x y", "z"), Layout("x", "", owned="y z", padded="x")], ids=str
)
def test_layout_can_be_pickled(layout):
    received = pickle.loads(pickle.dumps(layout))
    assert received == layout and received.padded == layout.padded
