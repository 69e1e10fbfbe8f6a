"""Megatron-LM's arrangements of a small BERT."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")

from dataclasses import replace
from functools import cache

from hpc3d.partition.baselines.contenders import Task, data_parallel
from hpc3d.partition.baselines.tensor_pipeline import megatron, megatron_pipeline
from hpc3d.partition.baselines.tensor_split import MegatronOperations
from hpc3d.partition.model_graph import costs_of
from hpc3d.partition.operation_costs import Operations
from hpc3d.partition.tensor_parallel.split_costs import TensorCosts
from hpc3d.predict.machine.machine import Link
from tests.partition.sample_models import small
from tests.partition.test_evaluation import MACHINE
from tests.partition.test_operation_costs import FLOP

pytestmark = pytest.mark.slow

BATCH = 4
QUIET = replace(FLOP, links=(Link(0, 0.0, 1e30),))


@cache
def operations(name="bert"):
    return Operations(small(name))


def task(memory=1e12, name="bert", ranks=4):
    return Task.of(operations(name), QUIET, BATCH, ranks, memory)


def test_megatron_plan_is_data_parallel_with_enough_memory():
    """Only products take time, and all ranks share them either way; messages are not cheaper."""
    found, plain = megatron(task()), data_parallel(task())
    assert found.ways == 1 and found.choice.microbatches == 1
    assert found.step.seconds == plain.step.seconds


def test_layers_are_split_if_the_weights_do_not_fit():
    """It requires half of the 399,360 bytes of a perceptron, and the activations of 4 samples."""
    found = megatron(task(250_000, "mlp", ranks=2))
    assert found.ways == 2 and found.step.fits and found.choice.replicas == (1,)
    assert 399_360 / 2 < max(found.step.held) < 250_000


def test_megatron_pipeline_has_equal_numbers_of_layers():
    """Half of a layer fits on a rank, so two ranks share each of three layers."""
    found = megatron_pipeline(task(130_000, "mlp"))
    assert found.step.fits and len(found.choice.stages) * found.ways == 4
    assert not megatron(task(80_000, "mlp")).step.fits


def test_only_the_pipeline_uses_microbatches():
    """The layer inputs of 1024 samples do not fit, but those of fewer samples do."""
    large = Task.of(operations("mlp"), QUIET, 1024, 1, 800_000)
    assert not megatron(large).step.fits
    found = megatron_pipeline(large)
    assert found.step.fits and found.choice.microbatches > 1


@pytest.mark.slow
def test_model_without_linear_layer_pairs_has_no_tensor_plan():
    assert megatron(task(name="resnet")).choice is None


def test_tensor_parallel_replicas_communicate_at_their_real_distance():
    """Nodes have two ranks, and every replica has one rank on each. All-reduces of replicas of one
    rank are within a node, and all-reduces and messages of a replica are between nodes."""
    base = Task.of(operations(), MACHINE, BATCH, 4, 1e12).costs
    costs = TensorCosts(costs_of(MegatronOperations(operations(), 2), MACHINE, BATCH), 2)
    assert costs.summed(20, range(2)) == base.summed(20, (0, 2)) > base.summed(20, range(2))
    apart = costs.message(6, range(1), range(1, 2))
    assert apart == base.message(6, range(1), range(2, 3)) > base.message(6, range(1), range(1, 2))
