"""The seconds of an evaluation on a simulated machine."""

import pytest

from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.simulation import evaluated_batch
from hpc3d.predict.simulation.evaluated_batch import seconds_of_batch
from hpc3d.predict.simulation.simulator import simulate
from tests.pipeline.mixes import config_of

LINES = [
    "schedule=none microbatches=4 dtype=float32",
    "p=2 d=2 x=2 schedule=1f1b microbatches=6 dtype=float32",
    "p=2 schedule=zb-v chunks=2 microbatches=4 dtype=float32",
    "p=2 schedule=pipedream-2bw microbatches=4 dtype=float32",
]


@pytest.mark.parametrize("line", LINES)
def test_replayed_passes_take_the_same_time(line, monkeypatch):
    config, machine = config_of(line), load("h100")
    found = seconds_of_batch(config, 29, machine)
    monkeypatch.setattr(evaluated_batch, "replay_passes", lambda *all: None)
    assert found == pytest.approx(seconds_of_batch(config, 29, machine), rel=1e-9)


def test_evaluation_batch_takes_the_forward_time_of_a_step():
    """On one rank; of more stages a batch takes the time to fill the pipeline besides."""
    config, machine = config_of("schedule=none microbatches=4 dtype=float32"), load("h100")
    (run,) = simulate(config, 29, machine)
    *_, forward, _, _ = run.step
    assert 0.8 < seconds_of_batch(config, 29, machine) / forward < 1.3
