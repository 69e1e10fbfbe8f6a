"""Declared properties of optimizers: full matrices, states and their types."""

from dataclasses import replace

import numpy as np
import pytest

from hpc3d.checkpoints import new_run
from hpc3d.checkpoints.inspect import kinds_of, problems
from hpc3d.checkpoints.resume import mismatch
from hpc3d.checkpoints.sharded import Checkpoint, Snapshot, complete, restore, write_shard
from hpc3d.comm.threads import run
from hpc3d.config.load import to_toml
from hpc3d.predict.simulation.count import every_rank
from hpc3d.training import footprint
from hpc3d.training.guard import Corrupt, ReplicaCheck
from hpc3d.training.optimizers.catalog import OPTIMIZERS
from hpc3d.training.optimizers.optimizer import Optimizer, StateSpec, is_matrix
from tests.pipeline.mixes import alone, config_of, cover, same, train, trainer_of

slow = pytest.mark.slow


class RowNorm(Optimizer):
    """Optimizer with v = 0.9 v + g, stored in float32, and w = (1 - lr decay) w - lr v / (norm of
    v's row + 1e-3) for matrices, w - lr v for vectors."""

    STATES = (StateSpec("velocity"), StateSpec("longest", "float32"))
    WHOLE_MATRICES = is_matrix

    def update(self, learning_rate, scale):
        self.steps += 1
        decay = learning_rate * self.weight_decay
        for (value, _, grad), states, keep in self.pieces(decay):
            velocity = states["velocity"]
            velocity *= 0.9
            velocity += scale * grad
            value *= keep
            value -= learning_rate * velocity
        for part, (value, _, grad), states, keep in self.matrices(decay):
            velocity = states["velocity"]
            velocity *= 0.9
            velocity += scale * grad
            norms = np.sqrt(self.over_columns(part, (velocity**2).sum(1)))[:, None]
            states["longest"][:] = np.maximum(states["longest"], norms)
            value *= keep
            value -= learning_rate * velocity / (norms + 1e-3)

    def over_columns(self, part, squares):
        for axis in part.layout[1]:
            squares = self.parameters.mesh.comm(axis).all_reduce(squares).wait()
        return squares


@pytest.fixture(autouse=True)
def row_norm(monkeypatch):
    """Install RowNorm in place of SGD: `optimizer=sgd`."""
    monkeypatch.setitem(OPTIMIZERS, "sgd", RowNorm)


LAYOUTS = [
    "d=2 x=2 zero=1 scheme=1d microbatches=2",
    "p=2 d=2 schedule=1f1b microbatches=2 zero=1 bucket_mb=0",
    *(
        pytest.param(line, marks=slow)
        for line in [
            "d=3 zero=0",
            "d=2 x=2 y=2 scheme=2d zero=0",
            "d=2 y=2 z=2 scheme=3d zero=1",
            "x=2 y=2 z=2 scheme=3d",
            "d=2 x=2 y=2 scheme=2d-summa zero=1 bucket_mb=0.01",
            "d=2 x=2 y=2 z=2 scheme=3d-broadcast zero=1",
            "d=2 x=2 z=2 scheme=2.5d zero=1",
            "d=3 y=3 zero=2",
            "p=2 d=2 x=2 schedule=zb-h1 microbatches=4 zero=2 tied=false",
            "d=2 x=2 y=2 scheme=2d zero=3 hidden=36",
            "d=2 x=2 y=2 scheme=2d zero=1 kind=qwen2 kv_heads=1",
            "d=2 y=4 zero=2 kind=llama kv_heads=2",
            "p=2 d=2 schedule=zb-v chunks=2 microbatches=4 zero=1 overlap=false",
        ]
    ),
]
LINE = "optimizer=sgd learning_rate=0.05 steps=3 layers=2"
ZERO_1 = f"{LINE} {LAYOUTS[0]}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_matrix_optimizer_matches_one_rank(layout):
    line = f"{LINE} layers=4 {layout}"
    config = config_of(line)
    (expected,) = run({}, lambda mesh: train(mesh, config_of(alone(line))))
    found = run(config.sizes(), lambda mesh: train(mesh, config))
    for each in found:
        same(each, expected)
    cover(found, expected)


def test_replicas_share_the_states_of_full_matrices():
    def rank(mesh):
        trainer = trainer_of(mesh, config_of(ZERO_1))
        mine = {part.item.name for part in trainer.parameters.matrices}
        every = {item.name for item in trainer.parameters if len(item.shape) == 2}
        return mine, every, trainer.optimizer.states["velocity"].size

    (mine, every, size), _, (others, _, size_of_others), _ = run({"d": 2, "x": 2}, rank)
    assert mine | others == every and not mine & others
    assert 0.8 < size / size_of_others < 1.25


def test_predicted_full_matrix_states_match_a_run():
    config = config_of(ZERO_1)

    def rank(mesh):
        trainer_of(mesh, config).step(0)
        return mesh.pool.peak["optimizer"]

    predicted = [each.peak["optimizer"] for each in every_rank(config, config.model.vocabulary)]
    assert predicted == run(config.sizes(), rank)


def checkpoint(line, folder):
    """Return a full checkpoint of a run after its steps."""
    config = config_of(line)
    folder = folder / "step-00000003.tmp"
    folder.mkdir()
    header = {"run_id": "run", "config": to_toml(config), "step": 3, "updates": 3}

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        replicas = ReplicaCheck(trainer, 1)
        for number in range(3):
            trainer.step(number)
            replicas.after(number)
        write_shard(folder, mesh.rank, Snapshot(trainer.parameters, trainer.optimizer))
        if mesh.rank == 0:
            assert not complete(folder, mesh.ranks, header, keep=1)

    run(config.sizes(), rank)
    return Checkpoint(folder.with_suffix(""))


def test_optimizer_states_resume_on_another_layout(tmp_path):
    opened = checkpoint(ZERO_1, tmp_path)
    assert kinds_of(opened) == ("value", "velocity", "longest")
    assert problems(opened.folder) == []
    config = config_of(alone(ZERO_1))
    assert mismatch(config, opened) is None

    def rank(mesh):
        trained, other = trainer_of(mesh, config), trainer_of(mesh, config)
        for number in range(3):
            trained.step(number)
        restore(opened, other.parameters, other.optimizer)
        for name, state in trained.optimizer.states.items():
            np.testing.assert_allclose(other.optimizer.states[name], state, atol=1e-6)
        assert other.optimizer.states["longest"].dtype == np.float32

    run({}, rank)


def test_checkpoint_without_the_optimizer_states_does_not_match(tmp_path):
    config = config_of(ZERO_1)
    other = replace(config, train=replace(config.train, optimizer="adamw"))
    assert "first and second" in mismatch(other, checkpoint(ZERO_1, tmp_path))


def test_differing_state_of_replicas_is_named():
    config = config_of(f"{LINE} d=2 zero=0")

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        replicas = ReplicaCheck(trainer, 1)
        trainer.step(0)
        if mesh.rank:
            trainer.optimizer.states["velocity"][5] += 1
        try:
            replicas.after(0)
        except Corrupt as wrong:
            return [find.line for find in wrong.found]

    assert " state velocity " in str(run({"d": 2}, rank))


def test_new_run_starts_with_the_states_of_its_optimizer():
    specs = RowNorm.STATES
    begun = new_run.initial_state(
        {"w": (3, 2)}, np.dtype("float64"), lambda _: np.ones((3, 2)), specs
    )
    found = [(piece.kind, piece.dtype, piece.offset) for piece in begun.pieces]
    assert found == [("value", "<f8", 0), ("velocity", "<f8", 48), ("longest", "<f4", 96)]
    assert [array.nbytes for array in begun.arrays] == [48, 48, 24] and begun.nbytes == 120


def test_footprint_includes_optimizer_states():
    config = config_of(alone(ZERO_1))
    whole = footprint.parameters(config)
    adamw = replace(config, train=replace(config.train, optimizer="adamw"))
    assert whole / footprint.parameters(adamw) == (8 + 8 + 12) / (8 + 8 + 16)
