"""Meshes and model sizes of a scaling study."""

import pytest

from hpc3d.benchmarks.scaling.points import SCHEMES, mesh_of, points
from hpc3d.config.load import load
from hpc3d.config.package_data import shipped

CONFIG = load(shipped("gpt-3d-64.toml"), [])


@pytest.mark.parametrize(
    ("scheme", "ranks", "mesh"),
    [
        ("1d", 27, (27, 1, 1)),
        ("2d-summa", 36, (6, 6, 1)),
        ("2.5d", 64, (4, 4, 4)),
        ("2.5d", 32, (4, 4, 2)),
        ("3d", 27, (3, 3, 3)),
        ("3d", 1, (1, 1, 1)),
        ("2d-summa", 8, "2d-summa: 8 ranks do not form a square"),
        ("2.5d", 16, "2.5d: 16 ranks do not form a q x q x d grid with 1 < d <= q"),
        ("3d", 4, "3d: 4 ranks do not form a cube"),
    ],
)
def test_mesh_of_scheme(scheme, ranks, mesh):
    assert mesh_of(scheme, ranks) == mesh


def test_work_per_rank_is_constant_in_weak_scaling():
    found, _ = points(CONFIG, [1, 8, 27, 64], SCHEMES, weak=True)
    work = [point.hidden**2 * point.batch / point.ranks for point in found]
    assert max(work) / min(work) < 1.1
    assert {(point.hidden, point.batch) for point in found if point.ranks == 64} == {(384, 192)}
    # every token of the tokenizer has a row in the embedding
    assert all(CONFIG.model.vocabulary <= point.vocabulary < 2 * 256 for point in found)


def test_work_is_constant_in_strong_scaling():
    found, _ = points(CONFIG, [1, 8, 64], ["1d", "3d"], weak=False)
    assert {(point.hidden, point.batch) for point in found} == {(384, 192)}
