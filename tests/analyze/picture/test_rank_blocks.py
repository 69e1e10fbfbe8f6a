"""Units, blocks and axes of each rank equal those of the objects that training uses."""

from dataclasses import replace

import numpy as np
import pytest

from hpc3d.analyze.picture.rank_blocks import MOST_DRAWN, RankBlocks
from hpc3d.comm.threads import run
from hpc3d.predict.simulation.simulator import load_resolved
from hpc3d.training.trainer import Trainer
from tests.analyze.picture.layouts import SHIPPED, blocks_of


def uses(name, *keys):
    return {each.axis: tuple(each[2:]) for each in blocks_of(name, *keys).uses()}


def small(*keys):
    words = "--model.layers 2 --model.hidden 16 --model.heads 4 --train.batch 8"
    return ("gpt-serial", *words.split(), *keys)


WORDS = {
    (): ("replicated", "replicated", "replicated"),
    ("--parallel.zero", "1"): ("replicated", "replicated", "split"),
    ("--parallel.zero", "2"): ("replicated", "split", "split"),
    ("--parallel.zero", "3"): ("split", "split", "split"),
    ("--parallel.zero", "1", "--train.optimizer", "muon"): ("replicated", "replicated", "split"),
}


@pytest.mark.parametrize("keys", WORDS, ids=" ".join)
def test_zero_stages_split_the_optimizer_state_then_gradients_then_parameters(keys):
    assert uses(*small("--mesh.d", "4", *keys)) == {"d": (*WORDS[keys], "tokens split")}


def test_hybrid_sharding_replicates_shards_between_the_groups():
    keys = "--mesh.d 4 --parallel.shard 2 --parallel.zero 3"
    found = uses(*small(*keys.split()))
    assert found["r"] == ("replicated", "replicated", "replicated", "tokens split")
    assert found["d"] == ("split", "split", "split", "tokens split")


@pytest.mark.parametrize(
    ("scheme", "axis", "matrices", "activations"),
    [
        ("1d", "x", "split", "replicated"),
        ("1d-sequence", "x", "split", "tokens split"),
        ("2d-summa", "x", "split", "tokens split"),
        ("2d-summa", "y", "split", "hidden split"),
        ("2.5d", "z", "replicated", "tokens split"),
        ("3d", "z", "split", "hidden split"),
    ],
)
def test_tensor_axis_splits_matrices_and_activations(scheme, axis, matrices, activations):
    found = uses(*small(f"--mesh.{axis}", "2", "--parallel.scheme", scheme))
    assert found == {axis: (*[matrices] * 3, activations)}


def test_the_expert_axis_splits_only_experts():
    found = uses("moe-gshard-64")
    assert found["e"] == (*["experts split"] * 3, "tokens split")
    assert found["p"] == ("by layer",) * 4


@pytest.mark.parametrize("matrix", ["layers.1.up.weight", "embedding.token", "layers.0.qkv.bias"])
def test_blocks_contain_the_initial_values_of_a_training_run(matrix):
    """Eight ranks on threads have the elements of the full tensor that their blocks name."""
    config = load_resolved("gpt-3d-8", ["--parallel.zero", "0"])
    serial = replace(config, mesh=replace(config.mesh, x=1, y=1, z=1))

    def values(config):
        def value(mesh):
            parameters = Trainer(mesh, config, config.model.vocabulary, None).parameters
            return next(each.value for each in parameters if each.name == matrix)

        return run(config.sizes(), value)

    blocks, (full,) = RankBlocks(config), values(serial)
    item = blocks.matrix(matrix)
    for rank, value in enumerate(values(config)):
        where = tuple(slice(*each) for each in blocks.block(rank, item))
        assert np.array_equal(value, full[where])


@pytest.mark.parametrize("name", SHIPPED)
def test_all_ranks_or_one_example_per_axis_are_drawn(name):
    blocks = blocks_of(*SHIPPED[name])
    size = blocks.grid.size
    if size <= MOST_DRAWN:
        assert blocks.drawn == [*range(size)]
    else:
        assert [row.axis for row in blocks.rows] == blocks.axes
        for row in blocks.rows:
            along = {*blocks.grid.ranks_along(row.axis, {})}
            assert row.ranks[0] == 0 and row.ranks[-1] == max(along) and {*row.ranks} <= along


def test_an_unknown_matrix_is_refused_with_similar_names():
    with pytest.raises(ValueError, match=r"--matrix layers.0.up: .* layers.0.up.weight"):
        blocks_of("gpt-3d-8").matrix("layers.0.up")
