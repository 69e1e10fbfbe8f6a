"""Simulated time of an evaluation."""

from dataclasses import replace

import pytest

from hpc3d.predict.machine.machine import Link
from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.simulation import evaluated_batch
from hpc3d.predict.simulation.evaluated_batch import seconds_of_batch
from hpc3d.predict.simulation.simulator import simulate
from tests.pipeline.mixes import config_of
from tests.predict.fixed import MACHINE

LINES = [
    "schedule=none microbatches=4 dtype=float32 backend=cupy",
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


@pytest.mark.parametrize(
    "words", ["", "c=2 context=ring sequence=8", "c=2 context=all-to-all sequence=8"]
)
def test_evaluation_batch_takes_the_forward_time_of_a_step(words):
    """This holds for one stage; with more stages, a batch also takes the time to fill the
    pipeline. Messages along c take most of the time."""
    config = config_of(f"{words} schedule=none microbatches=4 dtype=float32")
    machine = replace(MACHINE, links=(Link(8, 1e-5, 1e6), Link(0, 1e-5, 1e6)))
    (run,) = simulate(config, 29, machine)
    *_, forward, _, _ = run.step
    assert seconds_of_batch(config, 29, machine) == pytest.approx(forward, rel=0.05)
