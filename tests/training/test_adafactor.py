"""Adafactor on any layout is Adafactor on one rank, and that is torch's."""

import numpy as np
import pytest
import torch

from hpc3d.comm.threads import run
from hpc3d.predict.simulation.count import every_rank
from hpc3d.training.optimizer import is_matrix
from tests.pipeline.mixes import alone, config_of, cover, same, train, trainer_of

slow = pytest.mark.slow

LINE = "optimizer=adafactor learning_rate=0.05 steps=4 layers=2"
LAYOUTS = [
    "p=2 d=2 x=2 zero=1 scheme=1d schedule=1f1b microbatches=2 bucket_mb=0",
    "d=2 x=2 y=2 zero=3 scheme=2d",
    "p=2 e=2 d=2 zero=1 experts=4 top_k=2 schedule=gpipe microbatches=2",
    *(
        pytest.param(line, marks=slow)
        for line in [
            "d=3 zero=0",
            "d=3 z=2 zero=2",
            "x=2 y=2 z=2 scheme=3d",
            "d=2 y=2 z=2 scheme=3d zero=1",
            "d=2 x=2 y=2 scheme=2d-summa zero=1 bucket_mb=0.01",
            "d=2 x=2 y=2 z=2 scheme=3d-broadcast zero=1",
            "d=2 x=2 z=2 scheme=2.5d zero=1",
            "p=2 d=2 x=2 schedule=zb-h1 microbatches=4 zero=2 tied=false",
            "p=2 d=2 schedule=zb-v chunks=2 microbatches=4 zero=1 layers=4",
            "d=2 c=2 x=2 sequence=4 zero=2 kind=llama kv_heads=4 ffn=48",
            "d=2 e=2 x=2 y=2 zero=0 scheme=2d experts=4 shared_experts=1",
            "d=2 e=2 y=2 zero=3 experts=4 balance_bias=0.01",
            "d=2 x=2 zero=1 kind=bert padding=4",
        ]
    ),
]


def without_noise(trained):
    """The gradient of a key's bias is 0, and steps are made of what rounding leaves of it: they
    stay near 0, and no other bias does."""
    for name, (where, block) in trained.weights.items():
        if name.endswith("qkv.bias"):
            trained.weights[name] = where, np.where(abs(block) < 1e-3, 0, block)
    return trained


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_train_as_one(layout):
    line = f"{LINE} {layout}"
    config = config_of(line)
    (expected,) = run({}, lambda mesh: without_noise(train(mesh, config_of(alone(line)))))
    found = run(config.mesh.sizes(), lambda mesh: without_noise(train(mesh, config)))
    for each in found:
        same(each, expected)
    cover(found, expected)
