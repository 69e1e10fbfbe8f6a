"""Communicators, products and training on one MPI job, compared with NumPy and one rank."""

import pytest

from tests.with_mpi.conftest import FEW

pytestmark = pytest.mark.mpi(min_size=2)
BY = pytest.mark.parametrize("transport", ["auto", "mpi"], ids="by {}".format)  # mpi is a mark


def on_ranks(ranks, sizes, transport):
    from hpc3d.comm.cartesian import build

    return build(sizes, ranks, transport=transport)


# Pairs of neighbors, pairs half a job apart, and groups that go over all nodes: the last axis
# varies fastest from rank to rank.
@BY
@pytest.mark.parametrize(("size", "order"), [(2, "dx"), (2, "xd"), (FEW, "xd")])
def test_communicator_calls_match_numpy(size, order, transport, world):
    from tests.comm.cases import every

    size = min(size, world.size)
    sizes = {"d": world.size // size, "x": size}
    mesh = on_ranks(world, {axis: sizes[axis] for axis in order}, transport)
    every(mesh.comm("x"))


CUBOIDS = {2: (1, 1, 2), 4: (2, 1, 2), 8: (2, 2, 2)}


@BY
@pytest.mark.parametrize("scheme", ["3d", "3d-broadcast"])
def test_sharded_product_matches_numpy(scheme, transport, few):
    from tests.tensor.cases import sizes, splits
    from tests.tensor.test_matmul import compare

    mesh = on_ranks(few, sizes(scheme, CUBOIDS[few.size]), transport)
    mesh.splits = splits(scheme)
    compare(mesh, keeps=("xw", ""))


MESHES = {  # of a mix on 2, 4 and 8 ranks
    "schedule=none microbatches=1 scheme=3d": ("z=2", "x=2 z=2", "x=2 y=2 z=2"),
    "schedule=none microbatches=2 scheme=1d-sequence zero=1": ("d=2", "d=2 x=2", "d=2 x=4"),
    "schedule=zb-v chunks=2 microbatches=3 zero=3": ("p=2", "p=2 d=2", "p=2 d=2 x=2"),
}


@BY
@pytest.mark.parametrize("mix", MESHES)
def test_training_matches_a_single_rank(mix, transport, few):
    from tests.pipeline.mixes import alone, config_of, same, serial, train

    line = f"{dict(zip((2, 4, 8), MESHES[mix]))[few.size]} {mix} steps=2"
    config = config_of(line)
    wanted = serial(alone(line)) if few.rank == 0 else None
    wanted = few.bcast(wanted)
    same(train(on_ranks(few, config.sizes(), transport), config), wanted)
