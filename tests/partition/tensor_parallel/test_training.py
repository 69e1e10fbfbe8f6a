"""Modules whose layers are split over ranks, on threads, compared with torch."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from hpc3d.checkpoints import sharded
from hpc3d.checkpoints.block_slices import coverage_error, whole_of
from hpc3d.checkpoints.sharded import Checkpoint, Snapshot
from tests.partition.execution.counted_bytes import peaks
from tests.partition.execution.modules import (
    RATE,
    STEPS,
    assert_trained_alike,
    on_ranks,
    prepared,
    trained,
    trained_by_torch,
    unsplit,
)
from tests.partition.tensor_parallel.modules import HERE

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "replicas", "micros", "schedule", "how"),
    [
        ("mlp", (1, 1), 2, "1f1b", {}),
        ("special('complex')", (1,), 1, "none", {}),
        ("special('written')", (1,), 1, "none", {}),
        ("special('vector')", (1,), 1, "none", {}),
        ("special('matrix')", (1, 1), 2, "zb-h1", {}),
        pytest.param("transformer", (1, 2), 2, "1f1b", {}, marks=SLOW),
        pytest.param("mlp", (2, 2), 3, "gpipe", {"recompute": True}, marks=SLOW),
        pytest.param("transformer(tied=True)", (1, 1), 2, "zb-h1", {}, marks=SLOW),
        pytest.param("transformer(tied=True)", (2,), 2, "none", {"ways": 4}, marks=SLOW),
        pytest.param("transformer", (1, 1), 2, "interleaved", {"chunks": 2}, marks=SLOW),
        pytest.param("encoder", (1, 1), 2, "1f1b", {}, marks=SLOW),
        pytest.param("gpt2", (1, 2), 2, "1f1b", {}, marks=SLOW),
        pytest.param("llama(2)", (1, 1), 2, "zb-h2", {}, marks=SLOW),
        pytest.param("llama(1)", (1,), 1, "none", {"recompute": True}, marks=SLOW),
        pytest.param("llama(2)", (1,), 1, "none", {"ways": 4}, marks=SLOW),
    ],
)
def test_split_layers_train_as_in_torch(name, replicas, micros, schedule, how):
    """Language models of transformers compute their loss in float32, from the same rows."""
    found = trained(f"{HERE}:{name}", replicas, micros, schedule, **{"ways": 2, **how})
    assert_trained_alike(found, trained_by_torch(f"{HERE}:{name}", micros, replicas[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropping_transformer", "dropping_encoder"])
def test_dropout_does_not_depend_on_the_split(name):
    """Masks are drawn for all heads and columns; torch draws other ones."""
    (expected,) = trained(f"{HERE}:{name}", (1,), 2, "none")
    found = trained(f"{HERE}:{name}", (1, 2), 2, "1f1b", ways=2)
    assert_trained_alike(found, expected)


@pytest.mark.slow
def test_16_bits_are_split_as_well():
    """Sums over ranks are rounded once more, and master weights are split like the weights."""
    how = f"{HERE}:transformer", (1, 1), 2, "1f1b"
    (one, losses), *_ = trained(f"{HERE}:transformer", (1,), 2, "none", dtype=torch.bfloat16)
    for tensors, seen in trained(*how, dtype=torch.bfloat16, ways=2):
        np.testing.assert_allclose(seen, losses, rtol=1e-2)
        for name, tensor in tensors.items():
            assert np.abs(tensor - one[name]).max() < 2.5 * STEPS * RATE, name
            assert np.linalg.norm(tensor - one[name]) < 0.1 * np.linalg.norm(one[name]), name


def test_ranks_store_their_part_of_the_weights_and_of_the_optimizer():
    _, _, captured = prepared(f"{HERE}:mlp(6)")
    total = sum(each.numel() for each in captured.program.state_dict.values())

    def stored(trainer):
        moments = sum(array.size for array in trainer.optimizer.states.values())
        return trainer.parameters.value.size, moments

    for values, moments in on_ranks(stored, f"{HERE}:mlp(6)", (1,), 1, "none", ways=4):
        assert moments == 2 * values and values < 0.3 * total


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "ways"), [((1,), 4), ((1, 1), 2)])
def test_peak_memory_of_a_rank_matches_its_plan(replicas, ways):
    """Counts all tensors of a step, and the moments."""
    name = "inputs.partition.bert:made(128, 4, 4, 16, 64, vocabulary=500)"
    schedule = "1f1b" if replicas[1:] else "none"
    for predicted, counted in peaks(name, replicas, 4, schedule, "none", ways):
        assert predicted == pytest.approx(counted, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [((1, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 2), (1, 4))]
)
def test_checkpoint_is_read_with_any_number_of_ranks(before, after, tmp_path):
    """Tests sections of rows and of columns, and moments, for (stages, tensor-parallel ranks)."""
    name, folder = f"{HERE}:gpt2", tmp_path / "step-00000003.tmp"
    folder.mkdir()

    def save(trainer):
        for number in range(STEPS):
            trainer.step(number)
        mesh, optimizer = trainer.mesh, trainer.optimizer
        sharded.write_shard(folder, mesh.rank, Snapshot(trainer.parameters, optimizer))
        if mesh.rank == 0:
            header = {"format": sharded.FORMAT, "version": 1, "step": STEPS}
            header |= {"updates": optimizer.steps, **trainer.manifest()}
            assert not sharded.complete(folder, mesh.ranks, header, keep=1)
        return [trainer.step(STEPS).loss]

    def load(trainer):
        sharded.restore(Checkpoint(folder.with_suffix("")), trainer.parameters, trainer.optimizer)
        tensors, trainer.optimizer.steps = unsplit(trainer.torch_weights), STEPS
        return tensors, [trainer.step(STEPS).loss]

    on = [((1,) * stages, 2, "1f1b" if stages > 1 else "none") for stages, _ in (before, after)]
    losses = on_ranks(save, name, *on[0], ways=before[1])
    opened = Checkpoint(folder.with_suffix(""))
    shapes = opened.header["module"]["shapes"]
    for (tensor, _), parts in opened.sources.items():
        assert not coverage_error([box for _, box in parts], whole_of(shapes[tensor]))
    found = on_ranks(load, name, *on[1], ways=after[1])
    assert_trained_alike(found, (trained_by_torch(name, 2)[0], losses[0]))
