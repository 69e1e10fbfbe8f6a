"""The whole program on devices that are threads (tests/fakes/fake_device.py): host and device
arrays are never mixed, calls wait for their operands, and results equal those of NumPy."""

import pytest

from hpc3d.comm import threads
from hpc3d.training.evaluator import Evaluator
from tests.fakes.fake_device import on_device, plain
from tests.pipeline.mixes import MIXES, alone, config_of, same, serial, train, trainer_of
from tests.strided import strided
from tests.training.test_evaluator import Held

EXPERTS = "c=2 e=2 schedule=none microbatches=2 sequence=8 experts=4 top_k=2 capacity=2"
# Most schedules, schemes and stages of ZeRO.
QUICK = [("nccl", line) for line in MIXES[7:48:40]]
HYBRID = [line for line in MIXES if "shard=2" in line][:3]  # ZeRO 1, 2 and 3
OTHERS = [("nccl", line) for line in (EXPERTS, *MIXES[3::17], *HYBRID)] + [
    ("host-staged", line) for line in MIXES[::31]
]


@pytest.mark.parametrize(
    ("transport", "line"),
    [*QUICK, *strided(OTHERS, len(OTHERS), len(OTHERS))],
)
def test_hybrid_parallel_training_on_fake_devices_matches_serial(transport, line):
    config = config_of(line)
    beside, _ = threads.meshes(config.sizes())

    def rank(mesh):
        with on_device(mesh, beside[mesh.rank], transport) as device:
            trained = train(device, config)
        return trained._replace(weights=plain(trained.weights))

    for trained in threads.run(config.sizes(), rank):
        same(trained, serial(alone(line)))


@pytest.mark.parametrize("line", ["x=2 scheme=1d", "p=2 schedule=1f1b microbatches=4"])
def test_evaluation_on_fake_devices_matches_serial_evaluation(line):
    config = config_of(line)
    beside, _ = threads.meshes(config.sizes())

    def rank(mesh):
        with on_device(mesh, beside[mesh.rank], "nccl") as device:
            return evaluated(device, config)

    (expected,) = threads.run({}, lambda mesh: evaluated(mesh, config_of(alone(line))))
    for found in threads.run(config.sizes(), rank):
        assert found[:4] == pytest.approx(expected[:4], rel=1e-10)


def evaluated(mesh, config):
    """Return the Evaluation after a step."""
    trainer = trainer_of(mesh, config)
    evaluator = Evaluator(trainer, [Held(config)] if mesh.rank == 0 else None)
    trainer.step(0)
    return evaluator.evaluate(0)
