"""float16 runs with a scaled loss: results, skipped steps, and resuming."""

from dataclasses import replace

import numpy as np
import pytest

from hpc3d.checkpoints.resume import resume
from hpc3d.checkpoints.saver import Saver
from hpc3d.comm.threads import run
from hpc3d.config.input_file import CheckpointConfig
from hpc3d.config.load import to_toml
from hpc3d.training.guard import NotFinite
from hpc3d.training.loss_scale import LossScale
from hpc3d.training.trainer import Trainer
from tests.checkpoints.killed_runs import ThreadJob
from tests.pipeline.mixes import Tokens, config_of

MODEL = "layers=2 batch=24"
LAYOUTS = ["schedule=none microbatches=2", "p=2 d=2 schedule=1f1b microbatches=2 zero=1"]


def trainer_of(mesh, config):
    batches = Tokens(config) if mesh.rank == 0 else None
    return Trainer(mesh, config, config.model.vocabulary, batches)


def trained(line, act=lambda trainer, number: None, dtype="float16", start=None, steps=4):
    """Return (trainer, step, result of `act` before it) of rank 0's steps; all ranks agree."""
    config = config_of(f"{MODEL} steps={steps} dtype={dtype} {line}")

    def rank(mesh):
        trainer, seen = trainer_of(mesh, config), []
        if start:
            trainer.scaling = LossScale(start)
        for number in range(steps):
            said = act(trainer, number)
            seen.append((trainer.step(number), trainer.skipped, trainer.scaling.factor, said))
        return seen

    ranks = run(config.sizes(), rank)
    assert [[each[1:3] for each in seen] for seen in ranks] == [
        [each[1:3] for each in ranks[0]]
    ] * len(ranks)
    return ranks[0]


@pytest.mark.parametrize("line", [*LAYOUTS, f"{LAYOUTS[0]} optimizer=sgd learning_rate=0.1"])
def test_float16_losses_and_norms_match_float32(line):
    ours, theirs = trained(line), trained(line, dtype="float32")
    assert [factor for *_, factor, _ in ours] == [2.0**16] * 4
    assert [factor for *_, factor, _ in theirs] == [1.0] * 4
    for (step, *_), (other, *_) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(step.loss, other.loss, rtol=2e-3)
        np.testing.assert_allclose(step.grad_norm, other.grad_norm, rtol=1e-2)


def kept(trainer, number):
    """Return a copy of everything that an update changes."""
    optimizer = trainer.optimizer
    arrays = trainer.parameters.value, *optimizer.states.values()
    return [array.copy() for array in arrays], optimizer.steps


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("line", LAYOUTS)
def test_overflowing_update_is_skipped_and_the_scale_is_halved(line):
    """Skipped steps repeat the loss of the first step, until the scale is small enough."""
    done = trained(line, kept, start=2.0**24, steps=12)
    left = [skipped for _, skipped, *_ in done]
    count = left.index(False)
    assert 1 < count < 11
    assert left[count:] == [False] * (12 - count)
    assert [factor for *_, factor, _ in done] == [
        2.0 ** (24 - min(number, count)) for number in range(1, 13)
    ]
    before = [said for *_, said in done]
    for number in range(1, 12):
        same = all(
            np.array_equal(a, b)
            for a, b in zip(before[number][0], before[number - 1][0], strict=True)
        )
        assert same == (number <= count)
    assert [steps for _, steps in before] == [max(0, number - count) for number in range(12)]
    assert all(np.isfinite(step.loss) for step, *_ in done)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_overflow_at_the_smallest_scale_stops_the_run():
    def spoil(trainer, number):
        trainer.parameters.sum_of_squares = lambda: np.inf

    with pytest.raises(NotFinite):
        trained(LAYOUTS[0], spoil, start=2.0**3, steps=4)
    assert [skipped for _, skipped, *_ in trained(LAYOUTS[0], spoil, start=2.0**4)] == [True] * 4

    def spoil_value(trainer, number):
        trainer.parameters.items[0].value[0] = np.nan

    with pytest.raises(NotFinite):
        trained(LAYOUTS[0], spoil_value, steps=1)


def test_loss_scale_is_restored_from_a_checkpoint(tmp_path):
    config = config_of(f"{MODEL} dtype=float16 {LAYOUTS[1]}")
    header = {"run_id": "run", "config": to_toml(config), "position": None}

    def save(mesh):
        trainer = trainer_of(mesh, config)
        trainer.scaling = LossScale(2.0**11)
        saver = Saver(tmp_path, trainer, CheckpointConfig(every=2), lambda _: header, str)
        for number in range(2):
            trainer.step(number)
            saver.after(number)
        saver.wait()

    def go_on(mesh):
        where = replace(config, train=replace(config.train, dtype=dtype))
        trainer = trainer_of(mesh, where)
        assert resume(ThreadJob(mesh), tmp_path, trainer, str) == 2
        return trainer.scaling.factor, trainer.scaling.row

    run(config.sizes(), save)
    dtype = "float16"
    assert run(config.sizes(), go_on) == [(2.0**11, 2)] * 4
    dtype = "float32"
    assert [factor for factor, _ in run(config.sizes(), go_on)] == [1.0] * 4
