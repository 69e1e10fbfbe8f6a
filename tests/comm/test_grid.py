"""Grid arithmetic, compared with NumPy's C order and MPI's Cartesian communicators."""

import doctest
from dataclasses import FrozenInstanceError
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc3d.comm import grid as module
from hpc3d.comm.grid import Grid
from hpc3d.comm.threads import run
from tests.mpi import checked

SIZES = st.dictionaries(st.sampled_from("pdcexyz"), st.integers(1, 4), max_size=5)


def test_grid_docstring_examples():
    assert doctest.testmod(module)[:2] == (0, 6)


@given(SIZES)
def test_grid_ranks_follow_c_order(sizes):
    grid, shape = Grid(sizes), tuple(sizes.values())
    assert grid.size == prod(shape)
    for rank, place in enumerate(np.ndindex(shape)):
        coords = dict(zip(sizes, place, strict=True))
        assert [*grid.coords(rank).items()] == [*coords.items()]
        assert (grid.rank(coords), {a: grid.coord(rank, a) for a in sizes}) == (rank, coords)
    assert rank == grid.size - 1


@given(SIZES)
def test_ranks_along_an_axis_vary_one_coordinate(sizes):
    grid = Grid(sizes)
    for axis, size in sizes.items():
        lines = {grid.ranks_along(axis, grid.coords(rank)) for rank in range(grid.size)}
        for line in lines:
            first = grid.coords(line[0])
            assert [*line] == [grid.rank(first | {axis: place}) for place in range(size)]
        assert sorted(rank for line in lines for rank in line) == [*range(grid.size)]


@given(SIZES)
def test_stride_is_the_rank_distance_along_an_axis(sizes):
    grid = Grid(sizes)
    for axis, size in sizes.items():
        assert grid.stride(axis) == grid.rank({axis: 1})
        assert grid.ranks_along(axis, {}) == range(0, size * grid.stride(axis), grid.stride(axis))


def test_omitted_coordinates_default_to_0():
    grid = Grid({"p": 2, "x": 3})
    assert grid.rank({"p": 1}) == grid.rank({"p": 1, "x": 0}) == 3
    assert [*grid.ranks_along("p", {"x": 2})] == [2, 5]


def test_grid_is_immutable():
    sizes = {"p": 2, "x": 3}
    grid = Grid(sizes)
    sizes["x"] = 5
    assert (grid.size, dict(grid.sizes)) == (6, {"p": 2, "x": 3})
    with pytest.raises(TypeError):
        grid.sizes["x"] = 5
    with pytest.raises(FrozenInstanceError):
        grid.sizes = sizes


def test_thread_mesh_and_its_planes_match_the_grid():
    sizes = {"p": 2, "x": 1, "y": 3}
    grid = Grid(sizes)

    def rank(mesh):
        assert mesh.coords == grid.coords(mesh.rank)
        for axis in ("p", "y"):
            assert mesh.comm(axis).members == (*grid.ranks_along(axis, mesh.coords),)
        assert (mesh.count(("y", "z")), mesh.index(("y", "z"))) == (3, mesh.coord("y"))
        return mesh.index(("y", "p"))

    assert run(sizes, rank) == [0, 2, 4, 1, 3, 5]


@pytest.mark.slow
def test_mpi_cartesian_ranks_have_the_same_order():
    assert checked(6, "-m", "tests.comm.on_grid").split() == ["3", "grids"]
