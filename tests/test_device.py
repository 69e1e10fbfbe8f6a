"""The whole program on devices that are threads (tests/fakes/fake_device.py): nothing mixes
arrays of host and device, every call waits for what it must, and the result is that of NumPy."""

import pytest

from hpc3d.comm import threads
from tests.fakes.fake_device import on_device, plain
from tests.pipeline.mixes import MIXES, alone, config_of, same, serial, train

# Every stage of ZeRO, most schedules and schemes; all of them would take a quarter of an hour.
QUICK = [("nccl", line) for line in MIXES[7:48:40]]
SLOW = [("nccl", line) for line in MIXES[3::6]] + [("host-staged", line) for line in MIXES[::10]]


@pytest.mark.parametrize(
    ("transport", "line"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_mix_on_devices_is_serial(transport, line):
    config = config_of(line)
    beside, _ = threads.meshes(config.mesh.sizes())

    def rank(mesh):
        with on_device(mesh, beside[mesh.rank], transport) as device:
            trained = train(device, config)
        return trained._replace(weights=plain(trained.weights))

    for trained in threads.run(config.mesh.sizes(), rank):
        same(trained, serial(alone(line)))
