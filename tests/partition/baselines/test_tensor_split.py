"""1-D tensor parallelism of a captured model: which layers are split, and their costs."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")

from hpc3d.partition.baselines.tensor_split import MegatronOperations, split_roles
from hpc3d.partition.model_graph import graph_of
from hpc3d.partition.operation_costs import Operations
from hpc3d.predict.machine.machine import Link, Rates
from tests.partition.sample_models import HERE, captured, small
from tests.partition.test_operation_costs import FLOP

pytestmark = pytest.mark.slow

FREE = replace(
    FLOP,
    memory_bandwidth=1e30,
    gemm={"float32": Rates(1e30, (1.0,), (1e30,))},
    links=(Link(0, 1.0, 1e30),),
)


def modules(name, nodes):
    """Return the modules of some operations of a model, in order."""
    found = small(name)
    return [found.pieces[place].module for place in sorted(found.piece_of[node] for node in nodes)]


def test_linear_layers_alternate_column_and_row_splits():
    """The head's first layer is not split, because a norm reads all of its result."""
    roles = split_roles(small("bert"), 2)
    layers = range(4)
    names = [f"layers.{n}.{part}" for n in layers for part in ("qkv", "up")]
    assert modules("bert", roles.columns) == [*names, "head", "pooler"]
    names = [f"layers.{n}.{part}" for n in layers for part in ("out", "down")]
    assert modules("bert", roles.rows) == [*names, "following"]
    assert modules("bert", roles.losses) == [""] and not roles.tables


@pytest.mark.slow
def test_both_attentions_of_a_decoder_are_split():
    roles = split_roles(small("translation"), 4)
    rows = modules("translation", roles.rows)
    assert rows[:2] == ["encoder.0.own.out", "encoder.0.down"]
    assert rows[-3:] == ["decoder.1.own.out", "decoder.1.cross.out", "decoder.1.down"]


def test_indivisible_heads_are_not_split():
    """With 4 heads on 8 ranks, everything except attention is split."""
    rows = modules("bert", split_roles(small("bert"), 8).rows)
    assert rows == [*(f"layers.{n}.down" for n in range(4)), "following"]


def test_convolutions_are_not_split():
    assert not split_roles(small("resnet"), 2).rows


def total(graph, name):
    return graph.total(name, graph.everything)


def test_split_layer_has_two_all_reduces_forward_and_two_backward():
    """Each message takes one second, and nothing else takes time. The second output of the loss
    adds one forward, the loss over words three, and the inputs of both heads two."""
    operations = Operations(small("bert"))
    graph = graph_of(MegatronOperations(operations, 2), FREE, 8)
    assert total(graph, "forward") == pytest.approx(4 * 2 + 1 + 3)
    assert total(graph, "backward") == pytest.approx(4 * 2 + 2)


def test_flops_of_split_products_are_shared():
    """For 8 x 16 tokens, all FLOPs except those of the head's dense layer are split."""
    quiet = replace(FLOP, links=(Link(0, 0.0, 1e30),))
    operations = Operations(small("bert"))
    whole = graph_of(operations, quiet, 8)
    part = graph_of(MegatronOperations(operations, 2), quiet, 8)
    dense = 2 * 8 * 16 * 32**2
    for name, times in (("forward", 1), ("backward", 2)):
        shared = (total(whole, name) - times * dense) / 2
        assert total(part, name) == pytest.approx(shared + times * dense, rel=1e-9)


def test_column_splits_divide_n_and_row_splits_divide_k():
    """Products (batch, m, n, k) of [2, 64] and [64, 64], and those of both gradients."""
    found = MegatronOperations(Operations(small("mlp")), 2)
    works = {node.name: kind[0] for node, kind in found.kinds.items()}
    assert works["linear_2"].forward.products == ((1, 2, 32, 64),)
    assert works["linear_2"].backward.products == ((1, 2, 64, 32), (1, 64, 32, 2))
    assert works["linear_1"].forward.products == ((1, 2, 64, 32),)
    assert works["linear_1"].backward.products == ((1, 2, 32, 64), (1, 32, 64, 2))
    assert works["linear"].backward.products == ((1, 64, 32, 2),)


def test_rank_stores_its_shard_of_the_weights():
    """For a perceptron split by columns and rows alternately, half, except the biases of rows."""
    operations = Operations(small("mlp"))
    graph = graph_of(MegatronOperations(operations, 2), FLOP, 8)
    assert total(graph, "parameters") == 4 * (6 * 64 * 64 / 2 + 3 * 64 / 2 + 3 * 64)


def test_activations_between_split_layers_are_saved_in_shards():
    """[16, 64]: six linear layers and six functions save their inputs, except the model's input;
    the two in the middle of each pair are halved."""
    graph = graph_of(MegatronOperations(Operations(small("mlp")), 2), FLOP, 16)
    assert total(graph, "saved") == 16 * 64 * 4 * (11 - 3 * 2 / 2)


def test_layer_whose_full_result_is_needed_is_not_split():
    assert not split_roles(captured(f"{HERE}:by_name"), 2).columns
