"""Coordinates and lines of a Grid, compared with those of MPI's Cartesian communicators."""

import sys

from hpc3d.runtime import launch

SIZES = ({"p": 2, "x": 3}, {"x": 3, "d": 1, "p": 2}, {"z": 6})


def body(job):
    from mpi4py import MPI

    from hpc3d.comm.cartesian import build
    from hpc3d.comm.grid import Grid

    for sizes in SIZES:
        grid, mesh = Grid(sizes), build(sizes)
        cart = MPI.COMM_WORLD.Create_cart([*sizes.values()], reorder=False)
        for rank in range(job.size):
            assert [*grid.coords(rank).values()] == cart.Get_coords(rank)
            assert grid.rank(grid.coords(rank)) == cart.Get_cart_rank(cart.Get_coords(rank))
        assert mesh.coords == grid.coords(cart.rank)
        for axis, size in sizes.items():
            line = cart.Sub([axis == other for other in sizes]).group
            members = MPI.Group.Translate_ranks(line, [*range(size)], cart.group)
            assert [*grid.ranks_along(axis, mesh.coords)] == [*members]
            assert size == 1 or mesh.comm(axis).members == (*members,)
    if job.rank == 0:
        print(len(SIZES), "grids")


if __name__ == "__main__":
    sys.exit(launch.run("test", body))
