"""AdamW with 8-bit moments: equal on all layouts with the same blocks, and close to AdamW."""

from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import pytest

from hpc3d.checkpoints.inspect import problems, tensors
from hpc3d.checkpoints.new_run import initial_state
from hpc3d.checkpoints.resume import mismatch
from hpc3d.checkpoints.sharded import restore
from hpc3d.comm.threads import run
from hpc3d.ops.quantize import BLOCK, in_blocks
from hpc3d.predict.simulation.count import every_rank
from hpc3d.training import footprint
from hpc3d.training.optimizers.adamw_8bit import AdamW8bit
from hpc3d.training.trainer import Trainer
from tests.pipeline.mixes import alone, config_of, cover, same, train, trained_of, trainer_of
from tests.strided import strided
from tests.training.optimizers.test_optimizer import checkpoint

slow, STATES = pytest.mark.slow, AdamW8bit.STATES
TEXT = Path(__file__).parents[3] / "inputs" / "corpus" / "python.txt"
LEARNING = (
    "layers=1 hidden=256 heads=4 kind=llama ffn=256 vocabulary=256 dtype=float32 clip=1 "
    "steps=100 batch=16 sequence=16 learning_rate=1e-3"
)

LINE = "optimizer=adamw-8bit steps=2 layers=2 hidden=256 heads=4 batch=8"
LAYOUTS = [
    "p=2 d=2 zero=1 schedule=1f1b microbatches=2 bucket_mb=0",
    "d=3 x=2 zero=3 layers=1 batch=12",
    "d=2 x=2 zero=2 scheme=1d-sequence hidden=512 layers=1 sequence=4",
    "d=3 zero=0 batch=12",
    "d=2 x=2 zero=1 scheme=1d hidden=512",
    "x=2 y=2 z=2 scheme=3d hidden=512",
    "e=2 d=2 zero=1 experts=4 top_k=2",
    "e=2 x=2 zero=3 experts=4 kind=llama ffn=512",
    "d=2 zero=2 hidden=300",
    "p=2 e=2 zero=1 experts=4 kind=llama ffn=330 microbatches=2",
]
SHORT = "x=2 scheme=1d"  # with hidden = 256, a rank has 384 = 256 + 128 columns of qkv


@pytest.mark.slow
@pytest.mark.parametrize("layout", strided(LAYOUTS, 2))
def test_8_bit_adamw_on_several_ranks_matches_one_rank(layout):
    line = f"{LINE} {layout}"
    config = config_of(line)
    (expected,) = run({}, lambda mesh: train(mesh, config_of(alone(line))))
    found = run(config.sizes(), lambda mesh: train(mesh, config))
    for each in found:
        same(each, expected)
    cover(found, expected)


@slow
@pytest.mark.parametrize("layout", strided(["d=2 x=2 zero=2", "d=2 x=2 zero=3"], 1))
def test_replicas_leave_results_with_short_blocks_unchanged(layout):
    """The blocks of 2 column shards differ from those of one rank, but losses are close."""
    line = f"{LINE} hidden=256 layers=1 scheme=1d"
    config, short = config_of(f"{line} {layout}"), config_of(f"{line} x=2")
    found, expected = (run(each.sizes(), partial(train, config=each)) for each in (config, short))
    (serial,) = run({}, lambda mesh: train(mesh, config_of(alone(line))))
    whole = {name: np.full_like(each, np.nan) for name, (_, each) in serial.weights.items()}
    for each in expected:
        for name, (where, block) in each.weights.items():
            whole[name][where] = block[: len(whole[name][where])]
    cover(found, serial)
    for each in found:
        np.testing.assert_allclose(each.totals, expected[0].totals, rtol=1e-10)
        np.testing.assert_allclose(each.totals, serial.totals, rtol=0.01)
        for name, (where, block) in each.weights.items():
            part = whole[name][where]
            np.testing.assert_allclose(block[: len(part)], part, rtol=0, atol=1e-10)


@pytest.mark.parametrize("layout", strided([*LAYOUTS[:2], SHORT, "d=2 zero=2 hidden=300"], 2))
def test_8_bit_state_takes_two_bytes_plus_scales_as_predicted(layout):
    config = config_of(f"{LINE} {layout}")

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        trainer.step(0)
        formula = 0.0
        for item in trainer.parameters:
            own = trainer.parameters.slices[item].own
            if in_blocks(item.shape):
                columns = item.updated_layout.block(item.shape, mesh)[-1]
                formula += own * 2 + own // columns * -(-columns // BLOCK) * 8
            else:
                formula += own * 2 * 8
        return mesh.pool.peak["optimizer"], formula

    predicted = every_rank(config, config.model.vocabulary)
    for ours, (held, formula) in zip(predicted, run(config.sizes(), rank), strict=True):
        assert ours.peak["optimizer"] == held == formula


def test_footprint_of_8_bit_states_is_smaller():
    full, short = (config_of(LINE.replace("adamw-8bit", name)) for name in ("adamw", "adamw-8bit"))
    less = footprint.parameters(full) - footprint.parameters(short)
    count = footprint.parameters(full) / (4 * 8)
    assert less == pytest.approx(count * (2 * 8 - 2 - 8 / BLOCK), rel=1e-12)


@slow
def test_8_bit_state_resumes_on_another_layout(tmp_path):
    """Three steps on one layout are followed by one on another."""
    line = LINE.replace("steps=2", "steps=4")
    opened = checkpoint(f"{line} d=2 x=2 zero=1", tmp_path)
    assert problems(opened.folder) == []
    held = {tensor.name: tensor for tensor in tensors(opened)}
    codes = "first_codes", "second_codes", "first_scales", "second_scales"
    up = held["layers.0.up.weight"]
    assert up.kinds == ("value", *codes) and up.bytes == prod(up.shape) * (8 + 2 + 8 / BLOCK)
    assert held["layers.0.up.bias"].kinds == ("value", "first", "second")
    config = config_of(f"{line} d=2 zero=3")
    assert mismatch(config, opened) is None
    adamw = config_of(line.replace("adamw-8bit", "adamw"))
    assert "has no first and second moments" in mismatch(adamw, opened)

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        restore(opened, trainer.parameters, trainer.optimizer)
        trainer.optimizer.steps = 3
        return trained_of(trainer, [trainer.step(3)])

    (expected,) = run({}, lambda mesh: train(mesh, config_of(line)))
    expected = expected._replace(totals=expected.totals[3:])
    for each in run(config.sizes(), rank):
        same(each, expected)


class Text:
    """Batches of a byte text, at random positions."""

    def __init__(self, config):
        self.shape = config.train.batch, config.model.sequence
        self.text = np.frombuffer(TEXT.read_bytes(), np.uint8).astype(np.int32)

    def batch(self, step):
        count, length = self.shape
        starts = np.random.default_rng(step).integers(0, len(self.text) - length, count)
        tokens = self.text[starts[:, None] + np.arange(length + 1)]
        return tokens[:, :-1], tokens[:, 1:]


@slow
def test_8_bit_adamw_learns_as_adamw():
    """The mean losses of the last ten of 100 steps differ by at most 1 %."""

    def loss(name):
        config = config_of(f"optimizer={name} {LEARNING}")

        def rank(mesh):
            trainer = Trainer(mesh, config, 256, Text(config))
            return [trainer.step(number).loss for number in range(100)]

        (found,) = run({}, rank)
        assert found[0] > 5
        return np.mean(found[-10:])

    full = loss("adamw")
    assert full < 3.5
    assert loss("adamw-8bit") == pytest.approx(full, rel=0.01)


def test_new_run_starts_with_zero_8_bit_moments():
    shapes = {"w": (3, 2 * BLOCK), "v": (5,)}
    begun = initial_state(shapes, np.dtype("float32"), lambda name: np.ones(shapes[name]), STATES)
    found = [(piece.name, piece.kind, piece.dtype, piece.boxes) for piece in begun.pieces]
    whole, scales = [(0, 3, 0, 512)], [(0, 3, 0, 2)]
    assert found[1:5] == [
        ("w", "first_codes", "|u1", whole),
        ("w", "second_codes", "|u1", whole),
        ("w", "first_scales", "<f4", scales),
        ("w", "second_scales", "<f4", scales),
    ]
    assert [kind for _, kind, _, _ in found[5:]] == ["value", "first", "second"]
    sizes = [array.nbytes for array in begun.arrays]
    assert sizes == [6144, 1536, 1536, 24, 24, 20, 20, 20] and sum(sizes) == begun.nbytes
