"""The graph of a module: what its pieces cost together."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")

from hpc3d.partition.model_graph import graph_of
from tests.partition.sample_models import small
from tests.partition.test_operation_costs import FLOP


def test_a_stage_holds_values_gradients_and_two_moments_of_its_parameters():
    """Of 6 layers of 64 x 64 with biases, in float32."""
    graph = graph_of(small("mlp"), FLOP, 16)
    parameters = 6 * (64 * 64 + 64) * 4
    assert graph.total("parameters", graph.everything) == parameters
    assert graph.total("memory", graph.everything) == 4 * parameters


def test_buffers_have_neither_gradients_nor_moments():
    graph = graph_of(small("resnet"), FLOP, 8)
    trained = graph.total("parameters", graph.everything)
    state = small("resnet").program.state_dict
    buffers = sum(
        each.numel() * each.element_size()
        for name, each in state.items()
        if "running" in name or "batches" in name
    )
    assert graph.total("memory", graph.everything) == 4 * trained + buffers


def test_values_are_what_crosses_in_bytes():
    """[16, 64] in float32 between any two operations of a perceptron."""
    graph = graph_of(small("mlp"), FLOP, 16)
    assert [value.nbytes for value in graph.values] == 11 * [16 * 64 * 4]


def test_skips_of_a_unet_cross_every_border_between_their_ends():
    graph = graph_of(small("unet"), FLOP, 8)
    assert max(value.targets[-1] - value.source for value in graph.values) > len(graph) / 2


def test_operations_keep_their_costs():
    graph = graph_of(small("bert"), FLOP, 8)
    whole = graph_of(small("bert"), FLOP, 4)
    assert graph.total("forward", graph.everything) == pytest.approx(
        2 * whole.total("forward", whole.everything), rel=1e-9
    )
