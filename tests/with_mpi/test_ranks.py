"""Communicators, products and training on the ranks of one MPI job, against NumPy and one rank."""

import pytest

from tests.with_mpi.conftest import RANKS

pytestmark = pytest.mark.mpi(min_size=RANKS)
BY = pytest.mark.parametrize("transport", ["auto", "mpi"], ids="by {}".format)  # mpi is a mark


def on_ranks(ranks, sizes, transport):
    from hpc3d.comm.cartesian import build

    return build(sizes, ranks, transport=transport)


@BY
@pytest.mark.parametrize("size", [2, 8])
def test_calls_are_those_of_numpy(size, transport, ranks):
    from tests.comm.cases import every

    mesh = on_ranks(ranks, {"d": RANKS // size, "x": size}, transport)
    every(mesh.comm("x"))


@BY
@pytest.mark.parametrize("scheme", ["3d", "3d-broadcast"])
def test_a_product_is_that_of_numpy(scheme, transport, ranks):
    from tests.tensor.cases import sizes, splits
    from tests.tensor.test_matmul import compare

    mesh = on_ranks(ranks, sizes(scheme, (2, 2, 2)), transport)
    mesh.splits = splits(scheme)
    compare(mesh, keeps=("xw", ""))


LINES = """
x=2 y=2 z=2 schedule=none microbatches=1 scheme=3d
d=2 x=4 schedule=none microbatches=2 scheme=1d-sequence zero=1
p=2 d=2 x=2 schedule=zb-v chunks=2 microbatches=3 zero=3
""".strip().splitlines()


@BY
@pytest.mark.parametrize("line", LINES)
def test_training_is_that_of_one_rank(line, transport, ranks):
    from tests.pipeline.mixes import alone, config_of, same, serial, train

    config = config_of(f"{line} steps=2")
    wanted = serial(f"{alone(line)} steps=2".strip()) if ranks.rank == 0 else None
    wanted = ranks.bcast(wanted)
    same(train(on_ranks(ranks, config.mesh.sizes(), transport), config), wanted)
