"""The layouts of a number of ranks."""

from dataclasses import replace

import pytest

from hpc3d.predict.planning import layouts
from hpc3d.tensor.split import SCHEMES, Split
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


def meshes_of(schemes, ranks=4):
    return {mesh[2:] for mesh in layouts.meshes(ranks, 1, 1, schemes) if mesh[:2] == (1, 1)}


def test_added_scheme_is_searched_on_its_own_meshes(monkeypatch):
    """Its meshes are new if no published scheme is equivalent, that is, if both axes are used."""
    before = meshes_of(SCHEMES)
    monkeypatch.setitem(SCHEMES, "own", Split(m="x", n="y", replicate="y"))
    assert meshes_of(SCHEMES) - before == {("own", 2, 2, 1)}
    mesh = (1, 1, "own", 2, 2, 1)
    config = layouts.with_mesh(layouts.bare(settled(SMALL, 1)), mesh)
    assert config.parallel.split == {"m": "x", "n": "y", "replicate": "y"}
    assert config.tensor_split == SCHEMES["own"]


def test_equivalent_schemes_are_searched_once():
    """Swapping m and n with k gives another scheme; renaming axes does not."""
    assert len(meshes_of({"2d": SCHEMES["2d"], "same": Split(m="y", n="x")})) == len(
        meshes_of({"2d": SCHEMES["2d"]})
    )
    assert meshes_of({"copies": Split(m="x", replicate="x")}) == set()
    names = {scheme for scheme, *_ in meshes_of(SCHEMES, 8)}
    assert names == set(SCHEMES)
    broadcast = {mesh[1:] for mesh in meshes_of(SCHEMES, 8) if mesh[0] == "3d-broadcast"}
    assert len(broadcast) == 10  # every cuboid of 8


def test_layouts_with_owners_follow_the_rules():
    """Experts need tokens on every rank, and ZeRO 2 a gradient."""

    def schemes_of(line):
        base = layouts.bare(settled(f"{SMALL} {line}", 1))
        found = [config for configs in layouts.every_mesh(base, 4, 1e9) for config in configs]
        return {config.parallel.scheme for config in found if config.mesh.tensor_ranks() > 1}

    assert "3d-broadcast" in schemes_of("")
    assert "3d-broadcast" not in schemes_of("model.experts=4")
    config = settled(f"{SMALL} d=2 x=2 y=2 scheme=3d-broadcast")
    assert layouts.zeros(config, 8) == ((0, 1), (3,))


def test_every_zero_stage_is_considered_if_the_shards_have_padding():
    config = settled(f"{SMALL} model.hidden=250 model.heads=2 d=8")
    assert layouts.zeros(config, 8) == ((0, 1), (2,), (3,))


@pytest.mark.parametrize("line", ["", "model.experts=4", "model.kind=bert"])
def test_meshes_that_are_valid_with_zero_3_only_are_included(line):
    """20 features do not divide over 8 tensor-parallel ranks, but over padded shards."""
    size = "model.hidden=20 model.heads=4 train.batch=16"
    base = layouts.bare(settled(f"{SMALL} {size} {line}", 1))
    found = [config for configs in layouts.every_mesh(base, 16, 1e9) for config in configs]
    found = [config for config in found if config.mesh.c == 1]
    valid, only = set(), set()
    for e in (1, 2, 4) if base.model.experts else (1,):
        for mesh in layouts.meshes(16 // e, base.model.layers, base.train.batch):
            plain = layouts.with_mesh(replace(base, mesh=replace(base.mesh, e=e)), mesh)
            sharded = replace(plain, parallel=replace(plain.parallel, zero=3))
            if not layouts.problems(plain, 16):
                valid.add(plain)
            elif plain.mesh.replicas() > 1 and not layouts.problems(sharded, 16):
                only.add(sharded)
    assert only and {*found} == valid | only
    assert all(layouts.zeros(config, 16) == ((3,),) for config in only)
    assert all((0, 1) in layouts.zeros(config, 16) for config in valid if config.mesh.d > 1)
    kept = next(config for config in valid if config.mesh.d > 1 and config.mesh.p == 1)
    kept = replace(kept, parallel=replace(kept.parallel, zero=3))
    assert (0, 1) in layouts.zeros(kept, 16)


@pytest.mark.parametrize("line", ["", "model.experts=4", "model.kind=llama model.kv_heads=2"])
def test_only_meshes_that_break_a_rule_are_omitted(line):
    base = layouts.bare(settled(f"{SMALL} model.heads=4 {line}", 1))
    found = [config for configs in layouts.every_mesh(base, 16, 1e9) for config in configs]
    every = [
        layouts.with_mesh(replace(base, mesh=replace(base.mesh, e=e)), mesh)
        for e in ((1, 2, 4) if base.model.experts else (1,))
        for mesh in layouts.meshes(16 // e, base.model.layers, base.train.batch)
    ]
    valid = {config for config in every if not layouts.problems(config, 16)}
    assert {config for config in found if config.mesh.c == 1} == valid
    assert len(valid) < len(every)
