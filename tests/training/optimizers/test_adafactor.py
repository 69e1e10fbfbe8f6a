"""Adafactor on any layout matches Adafactor on one rank, which matches torch."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch

from hpc3d.checkpoints.inspect import problems, tensors
from hpc3d.checkpoints.resume import mismatch
from hpc3d.checkpoints.sharded import restore
from hpc3d.comm.communicator import Self
from hpc3d.comm.mesh import Mesh
from hpc3d.comm.threads import run
from hpc3d.model.parameters import Parameters
from hpc3d.predict.simulation.count import every_rank
from hpc3d.tensor.layout import Layout
from hpc3d.training.guard import Corrupt, ReplicaCheck
from hpc3d.training.optimizers.adafactor import Adafactor
from hpc3d.training.optimizers.optimizer import is_matrix
from tests.pipeline.mixes import alone, config_of, cover, same, train, trained_of, trainer_of
from tests.predict.simulation.test_count import counted
from tests.strided import strided
from tests.training.optimizers.test_optimizer import checkpoint

slow = pytest.mark.slow

LINE = "optimizer=adafactor learning_rate=0.05 steps=4 layers=2"
LAYOUTS = [
    "p=2 d=2 x=2 zero=1 scheme=1d schedule=1f1b microbatches=2 bucket_mb=0",
    "d=2 x=2 y=2 zero=3 scheme=2d hidden=36",
    "p=2 e=2 d=2 zero=1 experts=4 top_k=2 schedule=gpipe microbatches=2",
    *(
        pytest.param(line, marks=slow)
        for line in [
            "d=3 zero=0",
            "d=4 shard=2 zero=1",
            "d=3 y=3 zero=2",
            "x=2 y=2 z=2 scheme=3d",
            "d=2 y=2 z=2 scheme=3d zero=1",
            "d=2 x=2 y=2 scheme=2d-summa zero=1 bucket_mb=0.01",
            "d=2 x=2 y=2 z=2 scheme=3d-broadcast zero=1",
            "d=2 x=2 z=2 scheme=2.5d zero=1",
            "p=2 d=2 x=2 schedule=zb-h1 microbatches=4 zero=2 tied=false",
            "p=2 d=2 schedule=zb-v chunks=2 microbatches=4 zero=1 layers=4",
            "d=2 c=2 x=2 sequence=4 zero=2 kind=llama kv_heads=4 ffn=48",
            "d=2 e=2 x=2 y=2 zero=0 scheme=2d experts=4 shared_experts=1",
            "d=2 e=2 y=2 zero=3 experts=4 balance_bias=0.01",
            "d=2 x=2 zero=1 kind=bert padding=4",
        ]
    ),
]


def without_noise(trained):
    """Set the biases of keys to 0 if they are near 0: their gradient is 0 up to rounding, so their
    steps are noise. No other bias stays near 0."""
    for name, (where, block) in trained.weights.items():
        if name.endswith("qkv.bias"):
            trained.weights[name] = where, np.where(abs(block) < 1e-3, 0, block)
    return trained


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adafactor_on_several_ranks_matches_one_rank(layout):
    line = f"{LINE} {layout}"
    config = config_of(line)
    (expected,) = run({}, lambda mesh: without_noise(train(mesh, config_of(alone(line)))))
    found = run(config.sizes(), lambda mesh: without_noise(train(mesh, config)))
    for each in found:
        same(each, expected)
    cover(found, expected)


SHAPES = {"w": (6, 4), "stack": (5, 3, 4), "v": (7,), "u": (2,)}


def allocated(mesh):
    """Return parameters on one rank, wide enough that some updates are clipped."""
    parameters = Parameters(mesh, "float64", whole_matrices=is_matrix)
    for name, shape in SHAPES.items():
        parameters.add(
            name, shape, Layout(*[""] * len(shape)), decay=name == "w", std=len(shape) - 1
        )
    parameters.allocate(seed=4)
    return parameters


def matrices_of(name, array):
    """Return the matrices of a stack, or the array itself."""
    return [*array.swapaxes(0, 1)] if name == "stack" else [array]


def test_adafactor_step_matches_torch():
    """torch scales the learning rate by max(eps2, rms(w)), so eps2 = 10 gives a constant. Each
    matrix of a stack is updated separately."""
    rate, decay = 0.02, 0.1
    mesh = Mesh({}, {}, {}, Self())
    parameters = allocated(mesh)
    optimizer = Adafactor(parameters, decay)
    theirs = {
        item.name: [torch.tensor(each.copy()) for each in matrices_of(item.name, item.value)]
        for item in parameters
    }
    groups = [
        {"params": tensors, "weight_decay": 10 * decay * (name == "w")}
        for name, tensors in theirs.items()
    ]
    reference = torch.optim.Adafactor(groups, lr=rate / 10, eps=(1e-30, 10.0))
    draw = np.random.default_rng(5)
    for _ in range(6):
        for item in parameters:
            item.grad[...] = draw.normal(0, draw.choice([0.1, 3.0]), item.shape)
            for tensor, grad in zip(theirs[item.name], matrices_of(item.name, item.grad)):
                tensor.grad = torch.tensor(0.5 * grad)
        optimizer.update(rate, 0.5)
        reference.step()
        for item in parameters:
            for tensor, value in zip(theirs[item.name], matrices_of(item.name, item.value)):
                np.testing.assert_allclose(value, tensor, rtol=1e-12, err_msg=item.name)


def elements_of(trainer):
    """Return the number of elements in the states of this rank, from the shapes of its blocks."""
    total = 0
    for item in trainer.parameters:
        if not is_matrix(item.name, item.shape):
            total += trainer.parameters.slices[item].own
        elif trainer.parameters.updates(item):
            rows, *experts, columns = item.updated_layout.block(item.shape, trainer.mesh)
            total += (rows + columns) * prod(experts)
    return total


COUNTED = [*LAYOUTS[:3], "d=2 z=2 zero=2", "p=2 d=2 y=2 schedule=zb-h1 microbatches=4 zero=0"]


@pytest.mark.parametrize("layout", strided(COUNTED, 3))
def test_predicted_state_memory_and_traffic_match_a_run(layout):
    """The states are rows and columns of matrices, and full vectors."""
    config = config_of(f"{LINE} {layout}")
    predicted = every_rank(config, config.model.vocabulary)

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        trainer.step(0)
        return mesh.pool.peak["optimizer"], 8 * elements_of(trainer)

    for ours, (held, formula) in zip(predicted, run(config.sizes(), rank), strict=True):
        assert ours.peak["optimizer"] == held == formula
    for ours, theirs in zip(predicted, counted(config), strict=True):
        assert ours.moved() == theirs.moved()


@pytest.mark.parametrize("layout", ["x=4 scheme=1d", "x=2 y=2 scheme=2d", "e=2 z=2 experts=4"])
def test_adafactor_sends_only_row_and_column_sums(layout):
    """For a block A x B, a rank sends A + 1 elements along an axis that shards columns, B + 2
    along one that shards rows, and 1 for a vector, and receives 2 (1 - 1/g) times as many."""
    line = f"{LINE} {layout}"
    config, plain = config_of(line), config_of(line.replace("adafactor", "sgd"))

    def sent(mesh):
        found = Counter()
        for item in trainer_of(mesh, config).parameters:
            layout = item.updated_layout
            if not is_matrix(item.name, item.shape):
                found.update(layout[0])
                continue
            rows, *experts, columns = layout.block(item.shape, mesh)
            for _ in range(prod(experts)):
                found.update(dict.fromkeys(layout[-1], rows + 1))
                found.update(dict.fromkeys(layout[0], columns + 2))
        return found

    shares = run(config.sizes(), sent)
    ranks = zip(*(every_rank(each, 29) for each in (config, plain)), shares, strict=True)
    for ours, theirs, elements in ranks:
        more = Counter()
        for (axis, op, _), (_, received) in ours.moved().items():
            more[axis] += received * (op == "all_reduce")
        for (axis, op, _), (_, received) in theirs.moved().items():
            more[axis] -= received * (op == "all_reduce")
        for axis, size in config.sizes().items():
            assert more[axis] == 2 * (size - 1) * 8 * elements[axis] / size


WAYS = ["d=2 x=2 zero=1 scheme=1d", "d=2 y=2 zero=3", "p=2 x=2 y=2 scheme=2d zero=0"]


@pytest.mark.parametrize(("before", "after"), strided([*pairwise([*WAYS, WAYS[0]])], 3))
def test_adafactor_state_resumes_on_another_layout(before, after, tmp_path):
    """Three steps on one layout are followed by two on another."""
    line = LINE.replace("steps=4", "steps=5")
    opened = checkpoint(f"{line} {before}", tmp_path)
    assert problems(opened.folder) == []
    kinds = {tensor.name: tensor.kinds for tensor in tensors(opened)}
    assert kinds["layers.0.up.weight"] == ("value", "row_means", "column_means")
    assert kinds["layers.0.up.bias"] == ("value", "second")
    config = config_of(f"{line} {after}")
    assert mismatch(config, opened) is None
    adamw = replace(config, train=replace(config.train, optimizer="adamw"))
    assert "has no first and second moments" in mismatch(adamw, opened)

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        restore(opened, trainer.parameters, trainer.optimizer)
        trainer.optimizer.steps = 3
        return without_noise(trained_of(trainer, [trainer.step(number) for number in (3, 4)]))

    (expected,) = run({}, lambda mesh: without_noise(train(mesh, config_of(line))))
    expected = expected._replace(totals=expected.totals[3:])
    for each in run(config.sizes(), rank):
        same(each, expected)


def test_differing_row_means_of_replicas_are_named():
    """Ranks along x have different columns of the same rows."""
    config = config_of(f"{LINE} x=2 scheme=1d")

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        replicas = ReplicaCheck(trainer, 1)
        trainer.step(0)
        if mesh.rank:
            item = next(each for each in trainer.parameters if each.name == "layers.0.up.weight")
            ((_, means), _) = trainer.optimizer.states_of(item)
            means[3] += 1
        try:
            replicas.after(0)
        except Corrupt as wrong:
            return [find.line for find in wrong.found]

    assert " state row_means of layers.0.up.weight" in str(run({"x": 2}, rank))
