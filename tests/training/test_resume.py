"""What of a stored configuration gives way to another number of ranks."""

import pytest

from hpc3d.rules import settle
from hpc3d.training.resume import fitted
from tests.pipeline.mixes import config_of

PIPED = "p=2 d=2 x=2 schedule=interleaved chunks=2 microbatches=4 zero=1 batch=96 stages=[1,1,1,1]"


@pytest.mark.parametrize("ranks", [4, 16])
def test_stages_and_replicas_stay_where_they_divide_the_ranks(ranks):
    """4 of them, on half and on twice the ranks: the cuboid within gives way."""
    config = settle(fitted(config_of(PIPED), ranks), ranks)
    mesh, parallel = config.mesh, config.parallel
    assert (mesh.p, mesh.d, mesh.x * mesh.y * mesh.z) == (2, 2, ranks // 4)
    assert (parallel.schedule, parallel.chunks, parallel.zero) == ("interleaved", 2, 1)
    assert parallel.stages == (1, 1, 1, 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_else_the_ranks_are_one_cuboid(ranks):
    """Fewer ranks than stages and replicas, of which they are a divisor or none; or more."""
    config = settle(fitted(config_of(PIPED), ranks), ranks)
    mesh, parallel = config.mesh, config.parallel
    assert (mesh.p, mesh.d, mesh.x * mesh.y * mesh.z) == (1, 1, ranks)
    assert (parallel.schedule, parallel.zero, parallel.stages) == ("none", 0, None)


def test_on_as_many_ranks_nothing_gives_way():
    config = config_of(PIPED)
    assert fitted(config, 8) is config
    assert fitted(config_of("p=2 x=1 y=1 z=1 schedule=1f1b"), 2).mesh.p == 2
