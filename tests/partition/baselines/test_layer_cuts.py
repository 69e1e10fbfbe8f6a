"""Cuts between layers."""

from itertools import combinations, pairwise

import pytest

from hpc3d.partition.atom_graph import Atom, Graph
from hpc3d.partition.baselines.layer_cuts import LayerRun, balanced, even, layer_runs

NAMES = (
    "add",
    "tokens/embedding",
    "layers.0.up/linear",
    "layers.0/gelu",
    "layers.0.parts.1/linear",
    "view",
    "layers.1.up/linear",
    "layers.0/gelu_1",
    "head/linear",
    "loss",
)


def test_layer_runs_follow_the_numbers_in_module_names():
    graph = Graph([Atom((name,), 1.0, 1.0) for name in NAMES], [])
    runs = [(1, False), (2, False), (6, True), (8, True), (10, False)]
    assert layer_runs(graph) == [LayerRun(*each) for each in runs]


def test_function_belongs_to_the_layer_before_it():
    graph = Graph(
        [Atom((name,), 1.0, 1.0) for name in ("0/linear", "relu", "1/linear", "loss")], []
    )
    assert layer_runs(graph) == [LayerRun(2, True), LayerRun(4, True)]


def runs(count):
    """Return an embedding, layers of two atoms each, and a head."""
    layers = [LayerRun(2 * number + 3, True) for number in range(count)]
    return [LayerRun(1, False), *layers, LayerRun(2 * count + 2, False)]


@pytest.mark.parametrize(
    ("layers", "stages", "ends"),
    [(4, 2, [5, 10]), (4, 4, [3, 5, 7, 10]), (5, 2, [5, 12]), (3, 4, None), (3, 1, [8])],
)
def test_stages_have_equal_numbers_of_layers(layers, stages, ends):
    assert even(runs(layers), stages) == ends


@pytest.mark.parametrize("stages", range(1, 7))
def test_balanced_cut_minimizes_the_heaviest_stage(stages):
    weights = [8, 11, 2, 1, 18, 5, 4, 11]

    def heaviest(ends):
        return max(sum(weights[before:after]) for before, after in pairwise((0, *ends)))

    cuts = [(*cut, 8) for cut in combinations(range(1, 8), stages - 1)]
    found = balanced(weights, stages)
    assert len(found) == stages and heaviest(found) == min(map(heaviest, cuts))


def test_balanced_cut_has_no_empty_stage():
    assert balanced([9, 0, 0], 3) == [1, 2, 3] and balanced([1, 1], 3) is None
