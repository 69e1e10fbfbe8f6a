"""The graph of a module: total costs of its pieces."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")

from hpc3d.partition.capture import capture
from hpc3d.partition.factory import made_with_data
from hpc3d.partition.measured_profile import UNIT
from hpc3d.partition.model_graph import costs_of, graph_of
from hpc3d.partition.operation_costs import Operations
from tests.partition.sample_models import small
from tests.partition.test_operation_costs import FLOP


def graph(name, batch):
    return graph_of(Operations(small(name)), FLOP, batch)


def test_stage_memory_counts_values_gradients_and_two_moments():
    """There are 6 layers of 64 x 64 with biases, in float32."""
    found = graph("mlp", 16)
    parameters = 6 * (64 * 64 + 64) * 4
    assert found.total("parameters", found.everything) == parameters
    assert found.total("memory", found.everything) == 4 * parameters


def test_16_bit_parameters_have_gradients_moments_and_masters_in_float32():
    module, inputs = made_with_data("inputs.partition.mlp:small", 0, "bfloat16")
    costs = costs_of(Operations(capture(module, inputs)), UNIT)
    found, parameters = costs.graph(16), 6 * (64 * 64 + 64)
    assert found.total("parameters", found.everything) == 4 * parameters
    assert found.total("memory", found.everything) == (2 + 4 + 3 * 4) * parameters
    assert costs.states == 3 and costs.reordered([*range(costs.count)]).states == 3


@pytest.mark.slow
def test_buffers_have_neither_gradients_nor_moments():
    found = graph("resnet", 8)
    trained = found.total("parameters", found.everything)
    state = small("resnet").program.state_dict
    buffers = sum(
        each.numel() * each.element_size()
        for name, each in state.items()
        if "running" in name or "batches" in name
    )
    assert found.total("memory", found.everything) == 4 * trained + buffers


def test_values_have_the_bytes_that_cross():
    """They are [16, 64] in float32 between any two operations of a perceptron."""
    found = graph("mlp", 16)
    assert [each.nbytes for each in found.values if each.nbytes] == 11 * [16 * 64 * 4]


def test_saved_values_of_other_pieces_are_separate():
    """In a perceptron, all Linear but the first, and all GELU, save the previous result."""
    array = 16 * 64 * 4
    found = [each for each in graph("mlp", 16).values if each.saved]
    assert [each[1:] for each in found] == [((each.source + 1,), 0.0, array) for each in found]
    assert len(found) == 11


def test_unet_skip_connections_cross_every_border_between_their_ends():
    found = graph("unet", 8)
    assert max(value.targets[-1] - value.source for value in found.values) > len(found) / 2


@pytest.mark.slow
def test_operation_costs_scale_with_the_batch():
    found = graph("bert", 8)
    half = graph("bert", 4)
    assert found.total("forward", found.everything) == pytest.approx(
        2 * half.total("forward", half.everything), rel=1e-9
    )


@pytest.mark.slow
def test_tied_embedding_counts_once():
    """BERT has 64 tokens of width 32, in float32."""
    found, table = graph("bert", 8), 64 * 32 * 4
    state = small("bert").program.state_dict
    parameters = sum({id(each): each.numel() * 4 for each in state.values()}.values())
    assert found.total("parameters", found.everything) == parameters
    (shared,) = found.shared
    assert (shared.parameters, shared.memory) == (table, 4 * table)
    assert [found.atoms[atom].parameters >= table for atom in shared.atoms] == [True, True]


def test_atoms_reference_their_pieces():
    found = graph("unet", 8)
    pieces = [piece for atom in found.atoms for piece in atom.pieces]
    assert sorted(pieces) == [*range(len(small("unet").pieces))]


def test_working_memory_of_a_layer_is_that_of_its_widest_operation():
    """It has the gradients of a weight, a bias, the input and the output."""
    found = graph("mlp", 16)
    assert found.atoms[2].working == (64 * 64 + 64 + 2 * 16 * 64) * 4
    assert found.atoms[1].working == 2 * 16 * 64 * 4
