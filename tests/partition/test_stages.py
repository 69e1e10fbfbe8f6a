"""What a stage takes and holds."""

from hpc3d.partition.stages import Limits, held, load
from tests.partition.graphs import chain


def test_the_load_is_what_it_computes_and_moves_once():
    graph = chain((2, 3, 5), nbytes=4.0)
    assert load(graph, 0b010, Limits(3)) == 9
    assert load(graph, 0b010, Limits(3, bandwidth=2.0)) == 9 + 4
    assert load(graph, 0b110, Limits(3, bandwidth=2.0)) == 24 + 2


def test_what_is_held_grows_with_the_microbatches_in_flight():
    atoms = [atom._replace(memory=3.0, saved=2.0) for atom in chain((1, 1)).atoms]
    graph = type(chain())(atoms, [])
    assert held(graph, 0b01, 1) == 5 and held(graph, 0b11, 4) == 22
