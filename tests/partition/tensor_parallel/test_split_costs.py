"""Costs of split layers: collectives, shards, and pieces in the same stage."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")

from hpc3d.partition.evaluation import ModelCosts
from hpc3d.partition.model_graph import costs_of, graph_of
from hpc3d.partition.operation_costs import Operations
from hpc3d.partition.tensor_parallel.split_costs import ShardedOperations, TensorCosts
from hpc3d.predict.machine.machine import Link, Rates
from tests.partition.execution.modules import prepared
from tests.partition.sample_models import small
from tests.partition.tensor_parallel.modules import HERE
from tests.partition.test_operation_costs import FLOP

pytestmark = pytest.mark.slow

FREE = replace(  # only calls take time, one second each
    FLOP,
    memory_bandwidth=1e30,
    gemm={"float64": Rates(1e30, (1.0,), (1e30,))},
    links=(Link(0, 1.0, 1e30),),
)


def operations(name):
    return Operations(prepared(f"{HERE}:{name}")[-1])


def total(graph, name):
    return graph.total(name, graph.everything)


def test_pairs_reduce_once_forward_and_once_backward():
    """Three blocks with attention and a perceptron. The embedding is reduced, and the head is
    gathered."""
    graph = graph_of(ShardedOperations(operations("transformer(3)"), 2), FREE, 8)
    assert total(graph, "forward") == pytest.approx(3 * 2 + 1 + 1)
    assert total(graph, "backward") == pytest.approx(3 * 2 + 1)


def test_ranks_divide_products_and_weights():
    quiet = replace(FLOP, links=(Link(0, 0.0, 1e30),))
    whole = graph_of(Operations(small("bert")), quiet, 8)
    part = graph_of(ShardedOperations(Operations(small("bert")), 2), quiet, 8)
    for name in ("forward", "backward", "parameters"):
        assert 0.5 < total(part, name) / total(whole, name) < 0.6


def test_pieces_between_two_layers_of_a_pair_stay_together():
    """A boundary in between would gather the shards; the pairs are six linear layers."""
    split = ShardedOperations(operations("mlp(3)"), 2)
    atoms = graph_of(split, FREE, 8).atoms
    pairs = [atom.ids for atom in atoms if any("up" in name for name in atom.ids)]
    assert [len(pair) for pair in pairs] == [3, 3, 3]
    assert all("down" in pair[-1] for pair in pairs)


def test_costs_of_another_order_keep_the_number_of_ranks():
    costs = TensorCosts(costs_of(ShardedOperations(operations("mlp"), 2), FREE, 8), 2)
    again = costs.reordered([*range(costs.count)])
    assert again.ways == 2 and isinstance(again, TensorCosts)
    assert ModelCosts.ways == 1 and again.graph(4).atoms == costs.graph(4).atoms
