"""Limits of products and passes, and of the memory of this machine."""

import re
from dataclasses import replace

import pytest

from hpc3d.comm.grid import divisors
from hpc3d.config import limits
from hpc3d.config.input_file import Config
from hpc3d.config.pipeline_rules import wrong_pipeline
from hpc3d.config.size_rules import too_large, wrong_parts
from tests.elided import elided


def test_matrix_products_are_bounded():
    model, train = Config().model, Config().train
    wide = replace(model, hidden=2**20, vocabulary=2**27, layers=limits.MOST_LAYERS)
    config = replace(Config(), model=wide, train=replace(train, batch=1))
    (line,) = too_large(config)
    assert line.startswith("model.layers x weights of a block = 131941395333120000 ")
    long = replace(model, sequence=2**27, heads=1, vocabulary=256)
    for batch, wrong in ((2, 0), (5, 1)):  # 2^27 rows of 2^27 scores are 2^54
        full = replace(Config().parallel, attention="full")
        config = replace(Config(), model=long, parallel=full, train=replace(train, batch=batch))
        assert len([*too_large(config)]) == wrong
        chunked = replace(config, parallel=replace(full, attention="chunked"))
        assert not [*too_large(chunked)]
    mesh = replace(Config().mesh, p=1, d=2**10, x=2**10, y=1, z=1)
    assert not [*wrong_parts(replace(Config(), mesh=mesh))]
    (line,) = wrong_parts(replace(Config(), mesh=replace(mesh, y=2)))
    assert re.fullmatch("mesh: 2097152 .* 1048576", line)


@pytest.mark.parametrize(
    ("sizes", "larger", "line"),
    [
        (  # 2^13 rows of 2^20 experts with 2^23 outputs, 2^10 hidden
            {"hidden": 2**10, "experts": 2**20, "sequence": 2**13},
            {"sequence": 2**14},
            "train.batch x model.sequence x the largest of ",
        ),
        (  # 2 layers of 2^15 experts with 3 matrices of 2^38
            {"hidden": 2**16, "experts": 2**15, "sequence": 1},
            {"experts": 2**16},
            "model.layers x weights of a block",
        ),
    ],
)
def test_expert_products_are_bounded(sizes, larger, line):
    def lines(**sizes):
        model = replace(Config().model, kind="llama", heads=1, ffn=2**22, **sizes)
        parallel = replace(Config().parallel, attention="chunked")
        train = replace(Config().train, batch=1)
        config = replace(Config(), model=model, parallel=parallel, train=train)
        return [*too_large(config)]

    assert not lines(**sizes)
    (found,) = lines(**{**sizes, **larger})
    assert found.startswith(line)


def test_schedule_passes_are_bounded():
    def lines(micros):
        parallel = replace(Config().parallel, microbatches=micros, chunks=1, schedule="1f1b")
        mesh, model = replace(Config().mesh, p=64), replace(Config().model, layers=64)
        return [*wrong_pipeline(replace(Config(), parallel=parallel, mesh=mesh, model=model))]

    assert not lines(4096)
    facts = "parallel.microbatches = 4097: 64 stages x 1 ... 262208 ... 262144; ... 4096 "
    assert re.match(elided(facts), *lines(4097))


@pytest.mark.parametrize("number", [1, 2, 12, 49, 64, 97, 720720, 1048573])
def test_divisors_are_complete_and_sorted(number):
    found = divisors(number)
    assert found == sorted({*found}) and all(number % size == 0 for size in found)
    few = [size for size in range(1, min(number, 10_000) + 1) if number % size == 0]
    assert [size for size in found if size <= 10_000] == few
