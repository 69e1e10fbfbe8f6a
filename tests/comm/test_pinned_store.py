"""Offloading to pinned host memory, on fake devices with delayed copies (tests/fakes)."""

import pytest

from hpc3d.comm import threads
from tests.fakes.fake_device import on_device, plain
from tests.pipeline.mixes import alone, config_of, same, serial, train
from tests.strided import strided

LINES = """
microbatches=2 offload=["optimizer"]
microbatches=2 schedule=none offload=["activations"]
microbatches=2 schedule=none offload=["parameters"]
p=2 d=2 schedule=1f1b microbatches=3 zero=1 offload=["optimizer","activations","parameters"]
d=2 x=2 scheme=1d zero=3 microbatches=2 optimizer=muon offload=["optimizer","parameters"]
e=2 x=2 microbatches=2 experts=4 top_k=2 offload=["optimizer","activations","parameters"]
d=2 z=2 schedule=zb-h1 p=2 microbatches=3 zero=2 offload=["activations","parameters"]
""".strip().splitlines()


def words_without(line):
    return " ".join(word for word in line.split() if not word.startswith("offload"))


@pytest.mark.parametrize("line", strided(LINES, 6, 1))
def test_offloading_on_fake_devices_matches_serial_training(line):
    config = config_of(line.replace("offload=", "'offload=") + "'")
    beside, _ = threads.meshes(config.sizes())

    def rank(mesh):
        with on_device(mesh, beside[mesh.rank]) as device:
            trained = train(device, config)
        return trained._replace(weights=plain(trained.weights))

    for trained in threads.run(config.sizes(), rank):
        same(trained, serial(alone(words_without(line))))
