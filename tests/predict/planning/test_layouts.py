"""The layouts of a number of ranks."""

from dataclasses import replace

from hpc3d.predict.planning import layouts
from tests.predict.planning.test_search import SMALL, settled


def test_every_cuboid_appears_once():
    found = [*layouts.meshes(8, layers=4, batch=32)]
    assert len(found) == len(set(found))
    assert all(p * d * x * y * z == 8 and p <= 4 for p, d, _, x, y, z in found)
    cuboids = {mesh for mesh in found if mesh[2] in ("2d", "3d")}
    # Of 8 = x y z there are 10; y alone is 1-D with sequence parallelism.
    assert len([mesh for mesh in cuboids if mesh[:2] == (1, 1)]) == 10 - 1
    assert (1, 1, "1d-sequence", 8, 1, 1) in found
    assert (1, 1, "2d", 4, 2, 1) in found
    assert (1, 8, "3d", 1, 1, 1) in found


def test_microbatch_counts_are_those_the_rules_allow():
    config = settled(f"{SMALL} d=2 x=2 y=2 scheme=2d")
    allowed = [
        count
        for count in range(1, 33)
        if not layouts.problems(
            replace(config, parallel=replace(config.parallel, microbatches=count)), 8
        )
    ]
    assert 1 < len(allowed) < 16
    assert [*layouts.microbatches(config, 8)] == allowed
