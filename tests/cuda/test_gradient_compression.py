"""Gradient compression with device rules: same losses, norms and weights as with NumPy."""

import numpy as np
import pytest

from hpc3d.comm import threads
from tests.cuda.rules import on_devices, some
from tests.fakes.fake_device import plain
from tests.pipeline.mixes import config_of, train

pytestmark = pytest.mark.timeout(300)

SMALL = "schedule=none microbatches=2 batch=8 layers=1 steps=3 dtype=float32 learning_rate=0.001"
LINES = [
    f"{SMALL} d=2 x=2 zero=1 compression=powersgd compression_rank=2",
    f"{SMALL} d=2 compression=top-k compression_share=0.1",
    f"{SMALL} e=2 experts=4 compression=powersgd compression_rank=2",
]


@pytest.mark.slow
@pytest.mark.parametrize("line", some(LINES, 0))
def test_gradient_compression_on_devices_matches_numpy(line, launcher):
    """Rounding decides which elements near the top-k threshold are sent."""
    config, least = config_of(line), 0.99 if "top-k" in line else 1
    expected = threads.run(config.sizes(), lambda mesh: train(mesh, config))
    for found, wanted in zip(on_devices(line, train), expected, strict=True):
        np.testing.assert_allclose(found.totals, wanted.totals, rtol=1e-4)
        for name, (_, block) in found.weights.items():
            if "qkv.bias" not in name:
                theirs = wanted.weights[name][1]
                close = np.isclose(plain(block), theirs, rtol=1e-7, atol=2e-4)
                assert close.mean() >= least, name
