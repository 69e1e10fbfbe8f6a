"""Order of the samples in merged dimensions."""

import pytest

pytest.importorskip("torch")

import torch

from hpc3d.partition.capturing.sample_layout import (
    SampleLayout,
    SampleLayouts,
    Unrelated,
    reshaped,
)
from tests.partition.functions_of_samples import captured_function


def orders(model, x):
    """Return rows in several orders, each with its own name."""
    apart = x.view(x.shape[0], 2, 3)
    return {
        "sample_major": apart.flatten(0, 1).sin(),
        "time_major": apart.transpose(0, 1).flatten(0, 1).sin(),
        "joined": torch.cat([x, x, x]).sin(),
        "taken": torch.cat([x, x, x])[: x.shape[0]].sin(),
        "tiled": apart.flatten(0, 1).repeat(3, 1).sin(),
        "repeated": x.repeat_interleave(3, 0).sin(),
    }


@pytest.mark.slow
def test_layout_of_merged_dimensions():
    graph = captured_function(orders).program.graph
    known = SampleLayouts(graph).known
    found = [known[node] for node in graph.output_node().all_input_nodes]
    assert found == [
        SampleLayout(0, 1, 2),
        SampleLayout(0, 2, 1),
        SampleLayout(0, 3, 1),
        SampleLayout(0, 1, 1),
        SampleLayout(0, 3, 2),
        SampleLayout(0, 1, 3),
    ]


def test_reshape_follows_the_elements_of_a_sample():
    """A layout is the product of the sizes before the batch dimension, and of those after it."""
    graph = captured_function(lambda model, x: model.a(x)).program.graph
    batch = next(iter(graph.output_node().all_input_nodes)).meta["val"].shape[0]
    assert reshaped(SampleLayout(1), (4, batch, 6), (4 * batch, 6)) == SampleLayout(0, 4, 1)
    assert reshaped(SampleLayout(0), (batch, 4, 6), (4 * batch, 6)) == SampleLayout(0, 1, 4)
    assert reshaped(SampleLayout(0, 4, 1), (4 * batch, 6), (4, batch, 6)) == SampleLayout(1)
    assert reshaped(SampleLayout(0), (batch, 6), (2 * batch, 3)) == SampleLayout(0, 1, 2)
    for before, after in (((4, batch), (batch, 4)), ((4, batch), (2 * batch, 2))):
        with pytest.raises(Unrelated):
            reshaped(SampleLayout(1), before, after)
    with pytest.raises(Unrelated):
        reshaped(SampleLayout(0, 4, 1), (4 * batch, 6), (batch, 4, 6))
