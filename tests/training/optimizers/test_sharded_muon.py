"""Muon on sharded matrices, compared with its published form in torch and with one rank."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch

from hpc3d.comm.threads import run
from hpc3d.predict.simulation.count import every_rank
from hpc3d.tensor.layout import Layout
from hpc3d.training.optimizers.muon import is_hidden
from hpc3d.training.optimizers.sharded_muon import NewtonSchulz
from tests.pipeline.mixes import alone, config_of, cover, same, serial, train, trainer_of
from tests.predict.simulation.test_count import counted
from tests.strided import strided
from tests.training.optimizers.test_muon import LAYOUTS, LINE, newton_schulz, without_keys_bias

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
def test_sharded_newton_schulz_matches_torch(rows, columns, shorter, longer):
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


@pytest.mark.parametrize("layout", strided(LAYOUTS, 12))
def test_sharded_muon_matches_one_rank_with_full_matrices(layout):
    config = config_of(f"{SHARDED} {layout}")
    expected = without_keys_bias(serial(alone(f"{LINE} {layout}")))
    found = run(config.sizes(), lambda mesh: without_keys_bias(train(mesh, config)))
    for each in found:
        same(each, expected)
    cover(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", strided(LAYOUTS[:6], 3, 2))
def test_predicted_sharded_muon_memory_traffic_and_flops_match_a_run(layout):
    config = config_of(f"{SHARDED} {layout}")
    predicted = every_rank(config, config.model.vocabulary)

    def rank(mesh):
        trainer_of(mesh, config).step(0)
        return [mesh.pool.peak[kind] for kind in ("optimizer", "workspace")]

    for ours, held in zip(predicted, run(config.sizes(), rank), strict=True):
        assert [ours.peak[kind] for kind in ("optimizer", "workspace")] == held
    for ours, theirs in zip(predicted, counted(config), strict=True):
        assert ours.moved() == theirs.moved()
        assert ours.flops() == theirs.flops()


def matrices_of(trainer):
    """Return (shorter side, longer side, ranks that shard each) of all matrices of which a rank
    has blocks."""
    found = []
    for item in trainer.parameters:
        if is_hidden(item.name, item.shape):
            rows, *experts, columns = item.shape
            kinds = item.interleaved[0]
            sides = [(rows, item.updated_layout[0]), (columns // kinds, item.updated_layout[-1])]
            (short, over), (long, across) = sorted(sides, key=lambda side: side[0])
            cuts = trainer.mesh.count(over), trainer.mesh.count(across)
            count = kinds * prod(experts) // (trainer.mesh.size("e") if experts else 1)
            found += [(short, long, *cuts)] * count
    return found


@pytest.mark.parametrize(
    "layout",
    strided(
        [
            "x=4 scheme=1d",
            "x=2 y=2 scheme=2d",
            "x=2 y=2 z=2 scheme=3d",
            "e=2 z=2 experts=4 zero=3",
        ],
        4,
        1,
    ),
)
def test_received_bytes_and_flops_of_a_rank_match_the_formula(layout):
    config = config_of(f"{SHARDED} {layout} layers=3 hidden=48")
    train = replace(config.train, optimizer="adamw", orthogonalize="in-turn")
    ranks = every_rank(config, 29), every_rank(replace(config, train=train), 29)
    held = run(config.sizes(), lambda mesh: matrices_of(trainer_of(mesh, config)))
    for ours, theirs, matrices in zip(*ranks, held, strict=True):
        received = flops = 0
        for short, long, s, l in matrices:
            step = (1 - 1 / s) * short * long / l + (1 - 1 / (s * l)) * short**2
            step += 2 * (1 - 1 / l) * short**2 / s
            received += 8 * 5 * step
            flops += 5 * (4 * short * short * long + 2 * short**3) / (s * l)
        moved = [sum(size for _, size in rank.moved().values()) for rank in (ours, theirs)]
        norms = moved[0] - moved[1] - received  # one element along up to three axes
        assert 0 <= norms <= 8 * 2 * 3 * len(matrices)
        assert ours.flops()["gemm"] - theirs.flops()["gemm"] == flops
