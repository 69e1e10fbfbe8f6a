"""The whole program on devices that are threads (tests/cluster/fake_device.py): nothing mixes
arrays of host and device, every call waits for what it must, and the result is that of NumPy."""

import pytest

from hpc3d.cluster import threads
from hpc3d.model import attention, layers, loss, ops, parameters
from hpc3d.training import optimizer
from tests.cluster.fake_device import on_device, plain, twin
from tests.pipeline.mixes import MIXES, alone, config_of, same, serial, train
from tests.strided import strided

for module in (attention, layers, loss, ops, parameters, optimizer):
    for function in vars(module).values():
        if hasattr(function, "dispatch"):
            twin(function)


@pytest.mark.parametrize("transport", ["nccl", pytest.param("staged", marks=pytest.mark.slow)])
@pytest.mark.parametrize("line", strided(MIXES, 20, 7))
def test_a_mix_on_devices_is_serial(line, transport):
    config = config_of(line)
    beside, _ = threads.meshes(config.mesh.sizes())

    def rank(mesh):
        with on_device(mesh, beside[mesh.rank], transport) as device:
            trained = train(device, config)
        return trained._replace(weights=plain(trained.weights))

    for trained in threads.run(config.mesh.sizes(), rank):
        same(trained, serial(alone(line)))
