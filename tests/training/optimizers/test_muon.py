"""Muon compared with its published form in torch, and on every axis with one rank."""

from collections import Counter
from dataclasses import replace
from math import ceil, prod, sqrt

import numpy as np
import pytest
import torch

from hpc3d.checkpoints.inspect import problems, tensors
from hpc3d.checkpoints.resume import mismatch
from hpc3d.checkpoints.sharded import restore
from hpc3d.comm.threads import run
from hpc3d.predict.simulation.count import every_rank
from hpc3d.training import footprint
from hpc3d.training.optimizers.muon import is_hidden
from tests.pipeline.mixes import (
    Trained,
    alone,
    config_of,
    cover,
    same,
    serial,
    train,
    trained_of,
    trainer_of,
)
from tests.predict.simulation.test_count import counted
from tests.strided import strided
from tests.training.optimizers.test_optimizer import checkpoint

LINE = "optimizer=muon learning_rate=0.02"
RATE, DECAY, SCALE = 0.01, 0.3, 0.7
GATED = 40  # features between up and down, where up has a gate


def newton_schulz(g):
    """`zeropower_via_newtonschulz5` of the blog post, in the type of g."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() + 1e-30)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Muon:
    """Muon update of one matrix, with its state."""

    def __init__(self, weight, momentum=0.95):
        self.weight, self.momentum, self.m = weight, momentum, torch.zeros_like(weight)

    def step(self, g):
        self.m = self.momentum * self.m + (1 - self.momentum) * g
        o = newton_schulz(self.momentum * self.m + (1 - self.momentum) * g)
        self.weight *= 1 - RATE * DECAY
        self.weight -= 0.2 * sqrt(max(g.shape)) * RATE * o


def apart(item, array):
    """Return the matrices of a parameter: of each expert; q, k and v of all heads; gate and up."""
    stack = array.swapaxes(0, 1) if array.ndim == 3 else array[None]
    gated = item.name.endswith("up.weight") and stack.shape[2] == 2 * GATED
    kinds, width = (3, 24 // 12) if "qkv.weight" in item.name else (1 + gated, 1)
    interleaved = stack.reshape(*stack.shape[:2], -1, kinds, width)
    found = [of[:, :, kind].reshape(len(of), -1) for of in interleaved for kind in range(kinds)]
    return [torch.tensor(np.array(matrix)) for matrix in found]


@pytest.mark.parametrize(
    "words",
    ["", "beta1=0.8", f"kind=llama kv_heads=2 ffn={GATED}", f"experts=4 kind=llama ffn={GATED}"],
)
@pytest.mark.slow
def test_muon_steps_match_a_torch_reference(words):
    draw = np.random.default_rng(1)
    config = config_of(f"{LINE} {words} layers=1 weight_decay={DECAY}")

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        hidden = [each for each in trainer.parameters if is_hidden(each.name, each.shape)]
        momentum = config.train.beta1 or 0.95
        expected = [[Muon(w, momentum) for w in apart(each, each.value)] for each in hidden]
        for _ in range(3):
            trainer.parameters.grad[:] = draw.standard_normal(trainer.parameters.grad.shape)
            trainer.optimizer.update(RATE, SCALE)
            for item, matrices in zip(hidden, expected):
                for matrix, g in zip(matrices, apart(item, item.grad), strict=True):
                    matrix.step(SCALE * g)
        for item, matrices in zip(hidden, expected):
            for matrix, found in zip(matrices, apart(item, item.value), strict=True):
                np.testing.assert_allclose(found, matrix.weight, rtol=0, atol=1e-12)
        return {each.name for each in hidden}

    (names,) = run({}, rank)
    assert any("proj.weight" in name for name in names)
    assert not any(word in name for name in names for word in ("embedding", "head", "bias"))


def test_muon_update_is_close_to_torch():
    """The tolerance accounts for torch's orthogonalization in bfloat16."""
    config, draw = config_of(f"{LINE} layers=1"), np.random.default_rng(2)

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        (item,) = [each for each in trainer.parameters if each.name.endswith("proj.weight")]
        weight = torch.nn.Parameter(torch.tensor(item.value.copy()))
        how = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": config.train.weight_decay}
        reference = torch.optim.Muon([weight], lr=RATE, momentum=0.95, **how)
        for _ in range(3):
            trainer.parameters.grad[:] = draw.standard_normal(trainer.parameters.grad.shape)
            weight.grad = torch.tensor(item.grad.copy())
            before = item.value.copy()
            trainer.optimizer.update(RATE, 1.0)
            reference.step()
        moved = np.abs(item.value - before).max()
        np.testing.assert_allclose(item.value, weight.detach(), rtol=0, atol=0.1 * moved)

    run({}, rank)


LAYOUTS = [
    "x=2 y=2 schedule=none microbatches=2 scheme=2d",
    "d=2 x=2 schedule=none microbatches=2 zero=1 scheme=1d",
    "d=4 shard=2 schedule=none microbatches=2 zero=1",
    "d=3 y=3 schedule=none microbatches=2 zero=3 kind=qwen2 kv_heads=1",
    "p=2 d=2 x=2 schedule=1f1b microbatches=2 zero=2 kind=llama kv_heads=2 ffn=48",
    "x=2 y=2 z=2 schedule=none microbatches=2 scheme=3d-broadcast",
    "d=2 e=2 x=2 schedule=none microbatches=2 zero=1 experts=4 kind=llama ffn=48",
    "d=2 x=2 y=2 z=2 schedule=none microbatches=2 zero=1 scheme=3d",
    "d=2 x=2 z=2 schedule=none microbatches=3 scheme=2.5d zero=0 recompute=full",
    "d=2 x=2 y=2 schedule=none microbatches=2 zero=2 scheme=2d-summa hidden=30 heads=6",
    "p=2 d=2 schedule=zb-v chunks=2 microbatches=4 zero=1 kind=bert padding=4",
    "d=2 c=2 x=2 schedule=none microbatches=2 sequence=4 zero=3 kind=llama kv_heads=2",
    "d=2 e=2 y=2 schedule=none zero=3 experts=4 shared_experts=1 hidden=30 heads=6",
]


@pytest.mark.parametrize("layout", strided(LAYOUTS, 12, 1))
def test_muon_on_several_ranks_matches_one_rank(layout):
    line = f"{LINE} {layout}"
    config, expected = config_of(line), without_keys_bias(serial(alone(line)))
    found = run(config.sizes(), lambda mesh: without_keys_bias(train(mesh, config)))
    for each in found:
        same(each, expected)
    cover(found, expected)


def without_keys_bias(trained):
    """Return the weights without the biases of keys, which add the same to all scores of a query.
    Their gradient is 0 up to rounding; their steps are noise, but do not affect results."""
    noise = ("qkv.bias", "qkv.k.bias")
    kept = {name: part for name, part in trained.weights.items() if not name.endswith(noise)}
    return Trained(trained.totals, kept)


@pytest.mark.slow
@pytest.mark.parametrize("layout", strided(LAYOUTS[:6], 3, 2))
def test_predicted_muon_memory_traffic_and_flops_match_a_run(layout):
    config = config_of(f"{LINE} {layout}")
    predicted = every_rank(config, config.model.vocabulary)

    def rank(mesh):
        trainer_of(mesh, config).step(0)
        return mesh.pool.peak["optimizer"]

    held = run(config.sizes(), rank)
    assert [each.peak["optimizer"] for each in predicted] == held
    for ours, theirs in zip(predicted, counted(config), strict=True):
        assert ours.moved() == theirs.moved()
        assert ours.flops() == theirs.flops()


def matrices_of(trainer):
    """Return {(axes that shard them, rows, columns, matrices): number of blocks of a rank}."""
    found = Counter()
    for item in trainer.parameters:
        if is_hidden(item.name, item.shape):
            rows, *experts, columns = item.shape
            axes = "".join(axis for dim in (0, -1) for axis in item.updated_layout[dim])
            count = prod(experts) // trainer.mesh.size("e") if experts else 1
            found[axes, rows, columns, 3 if "qkv" in item.name else 1] += count
    return found


def moved_by_all_to_all(rank):
    """Return {axis of tensors: bytes}."""
    found = Counter()
    for (axis, op, _), (_, received) in rank.moved().items():
        found[axis] += received * (op == "all_to_all" and axis in "xyz")
    return found


@pytest.mark.parametrize("layout", ["x=4 scheme=1d", "x=2 y=2 scheme=2d", "e=2 z=2 experts=4"])
def test_full_matrices_are_assigned_to_ranks_round_robin(layout):
    """Of n matrices A x B sharded by g ranks, a rank updates at most ceil(n / g) full ones. Along
    an axis of s ranks, it receives 2 (1 - 1/s) of ceil(n / g) matrices."""
    config = config_of(f"{LINE} {layout} layers=3")
    adamw = replace(config, train=replace(config.train, optimizer="adamw"))
    sizes, flops, expected = config.sizes(), 0.0, 0.0
    ranks = every_rank(config, 29), every_rank(adamw, 29)
    held = run(sizes, lambda mesh: matrices_of(trainer_of(mesh, config)))
    for ours, theirs, matrices in zip(*ranks, held, strict=True):
        received = Counter()
        for (axes, rows, columns, kinds), count in matrices.items():
            sharing = prod(sizes[axis] for axis in axes)
            for axis in axes:
                whole = ceil(count / sharing) * 8 * rows * columns
                received[axis] += 2 * whole * (1 - 1 / sizes[axis])
            short, long = sorted((rows, columns // kinds))
            expected += count * kinds * 5 * (4 * short * short * long + 2 * short**3) / sharing
        assert moved_by_all_to_all(ours) - moved_by_all_to_all(theirs) == received
        flops += ours.flops()["gemm"] - theirs.flops()["gemm"]
    assert flops == pytest.approx(expected)


def test_muon_state_resumes_on_another_layout(tmp_path):
    """Three steps on one layout are followed by two on another."""
    line = f"{LINE} steps=5 layers=2"
    opened = checkpoint(f"{line} d=2 x=2 zero=1 scheme=1d", tmp_path)
    assert problems(opened.folder) == []
    kinds = {tensor.name: tensor.kinds for tensor in tensors(opened)}
    assert kinds["layers.0.up.weight"] == ("value", "momentum")
    assert kinds["layers.0.up.bias"] == kinds["embedding.token"] == ("value", "first", "second")
    config = config_of(f"{line} d=2 y=2 zero=3")
    assert mismatch(config, opened) is None
    lion = replace(config, train=replace(config.train, optimizer="lion"))
    assert "has no momentum moments" in mismatch(lion, opened)

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        restore(opened, trainer.parameters, trainer.optimizer)
        trainer.optimizer.steps = 3
        steps = [trainer.step(number) for number in (3, 4)]
        return without_keys_bias(trained_of(trainer, steps))

    expected = without_keys_bias(serial(alone(line)))
    expected = expected._replace(totals=expected.totals[3:])
    for each in run(config.sizes(), rank):
        same(each, expected)


def test_muon_matrix_has_4_bytes_of_state():
    config = config_of(f"{LINE} dtype=float32")
    adamw = replace(config, train=replace(config.train, optimizer="adamw"))
    assert footprint.parameters(config) / footprint.parameters(adamw) == (4 + 4 + 4) / 16
