"""Muon on matrices that stay cut, against the published form in torch and against one rank."""


import numpy as np
import pytest
import torch

from hpc3d.comm.threads import run
from hpc3d.predict.simulation.count import every_rank
from hpc3d.tensor.layout import Layout
from hpc3d.training.sharded_muon import NewtonSchulz
from tests.pipeline.mixes import alone, config_of, cover, same, serial, train, trainer_of
from tests.predict.simulation.test_count import counted
from tests.strided import strided
from tests.training.test_muon import LAYOUTS, LINE, newton_schulz, without_keys_bias

SHARDED = f"{LINE} orthogonalize=sharded"


@pytest.mark.parametrize(
    ("rows", "columns", "shorter", "longer"),
    [
        (8, 24, "x", "y z"),
        (12, 12, "z y", ""),
        (12, 20, "", "x y"),
        (6, 20, "x", "y"),  # 3 rows of a rank, which y does not divide
        (5, 8, "", "z x"),
        (7, 9, "", ""),
    ],
)
def test_stacks_are_orthogonalised_as_by_torch(rows, columns, shorter, longer):
    draw = np.random.default_rng(1)
    whole = draw.standard_normal((rows, 3, columns))
    whole[:, 1] = 0
    expected = [newton_schulz(torch.tensor(np.array(each))) for each in whole.swapaxes(0, 1)]

    def rank(mesh):
        part = Layout(shorter, "", longer).slices(whole.shape, mesh)
        x = whole[part].copy()
        NewtonSchulz(mesh, shorter.split(), longer.split()).orthogonalize(x)
        found = np.stack([each.numpy() for each in expected], 1)[part]
        np.testing.assert_allclose(x, found, rtol=0, atol=1e-12)

    run({"x": 2, "y": 2, "z": 2}, rank)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_train_as_one_that_has_matrices_whole(layout):
    config = config_of(f"{SHARDED} {layout}")
    expected = without_keys_bias(serial(alone(f"{LINE} {layout}")))
    found = run(config.mesh.sizes(), lambda mesh: without_keys_bias(train(mesh, config)))
    for each in found:
        same(each, expected)
    cover(found, expected)


@pytest.mark.parametrize("layout", strided(LAYOUTS[:6], 3, 2))
def test_what_is_held_moved_and_computed_is_predicted(layout):
    config = config_of(f"{SHARDED} {layout}")
    predicted = every_rank(config, config.model.vocabulary)

    def rank(mesh):
        trainer_of(mesh, config).step(0)
        return mesh.pool.peak

    for ours, held in zip(predicted, run(config.mesh.sizes(), rank), strict=True):
        assert {kind: ours.peak[kind] for kind in ours.peak} == dict(held)
    for ours, theirs in zip(predicted, counted(config), strict=True):
        assert ours.moved() == theirs.moved()
        assert ours.flops() == theirs.flops()
