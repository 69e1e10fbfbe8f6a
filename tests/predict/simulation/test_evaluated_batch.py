"""Simulated time and memory of an evaluation."""

from dataclasses import replace

import pytest

from hpc3d.comm.threads import run as on_threads
from hpc3d.predict.machine.machine import Link
from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.simulation import evaluated_batch
from hpc3d.predict.simulation.evaluated_batch import evaluated
from hpc3d.predict.simulation.simulator import simulate
from tests.pipeline.mixes import config_of, trainer_of
from tests.predict.fixed import MACHINE
from tests.training.test_evaluator import evaluator_of

LINES = [
    "schedule=none microbatches=4 dtype=float32 backend=cupy",
    "p=2 d=2 x=2 schedule=1f1b microbatches=6 dtype=float32",
    "p=2 schedule=zb-v chunks=2 microbatches=4 dtype=float32",
    "p=2 schedule=pipedream-2bw microbatches=4 dtype=float32",
    "d=2 x=2 y=2 z=2 schedule=none microbatches=2 dtype=float32 scheme=3d-broadcast zero=1",
]


@pytest.mark.parametrize("line", LINES)
def test_replayed_passes_take_the_same_time_and_memory(line, monkeypatch):
    config, machine = config_of(line), load("h100")
    found = evaluated(config, 29, machine)
    monkeypatch.setattr(evaluated_batch, "replay_passes", lambda *all: None)
    expected = evaluated(config, 29, machine)
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-9)
    assert found.peak == expected.peak


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
    assert evaluated(config, 29, machine).seconds == pytest.approx(forward, rel=0.05)


@pytest.mark.parametrize(
    "line", ["", "kind=llama ffn=48 kv_heads=4 dropout=0.25", "experts=4 top_k=2 moe_every=2"]
)
def test_predicted_peak_of_an_evaluation_equals_the_counted_one(line):
    config = config_of(f"{line} schedule=none microbatches=4 dtype=float32")

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        trainer.step(0)
        evaluator = evaluator_of(trainer)
        mesh.pool.reset_peak()
        evaluator.evaluate(0)
        return {kind: size for kind, size in mesh.pool.peak.items() if size}

    found = {kind: size for kind, size in evaluated(config, 29, MACHINE).peak.items() if size}
    assert [found] == on_threads({}, rank)
    (run,) = simulate(config, 29, MACHINE)
    assert found["all"] < run.peak["all"]
