"""RaNNC's search over blocks, compared with known results."""

from itertools import combinations, pairwise

import pytest

pytest.importorskip("networkx")

from hpc3d.partition.atom_graph import Graph
from hpc3d.partition.baselines.rannc_search import Devices, first_feasible, lock_step
from hpc3d.partition.downsets import Chain
from tests.partition.graphs import LOADS, chain


def blocks_of(loads, memory=0.0, saved=0.0):
    """By rows: a chain whose blocks take and save so much a row, and hold `memory`."""

    def costs(rows):
        graph = chain([load * rows for load in loads])
        atoms = [atom._replace(memory=memory, saved=saved * rows) for atom in graph.atoms]
        return Chain(Graph(atoms, graph.values))

    return costs


def test_lock_step_time_of_published_stages():
    """ResNet152x8 on three stages (RaNNC's README): 3.62 s, where 1F1B takes 3.49."""
    forward, backward = (0.164066, 0.143170, 0.113227), (0.455616, 0.460086, 0.410329)
    assert lock_step(forward, backward, 4) == pytest.approx(3.61895, abs=1e-5)


def test_lock_step_time_of_one_microbatch_is_the_sum():
    assert lock_step([1, 2, 3], [4, 5, 6], 1) == 21


def test_fewest_feasible_stages_are_selected():
    """Three replicas of 4 samples have two of them, two stages one after the other all."""
    found = first_feasible(blocks_of([1, 1]), 4, Devices(2, 2, 9.0))
    assert (found.ends, found.replicas, found.microbatches) == ([2], [2], 1)


def test_stages_increase_until_they_fit():
    """Of 8 blocks of 3 bytes, 7 bytes are two: four stages on four devices."""
    found = first_feasible(blocks_of([1] * 8, memory=3.0), 8, Devices(4, 4, 7.0))
    assert found.ends == [2, 4, 6, 8] and found.replicas == [1, 1, 1, 1]
    assert first_feasible(blocks_of([1] * 8, memory=3.0), 8, Devices(2, 2, 7.0)) is None


def test_pipeline_stays_on_one_node_if_it_fits():
    """Two stages on each of two nodes of two."""
    found = first_feasible(blocks_of([1, 1], memory=3.0), 8, Devices(4, 2, 4.0))
    assert found.replicas == [2, 2]
    across = first_feasible(blocks_of([1] * 4, memory=3.0), 8, Devices(4, 2, 4.0))
    assert across.replicas == [1, 1, 1, 1]


def test_heavy_stage_gets_a_power_of_two_of_replicas():
    """9 s and 3 s on four devices: 2 and 2 although 3 and 1 would be even."""
    found = first_feasible(blocks_of([9, 3], memory=3.0), 16, Devices(4, 4, 4.0))
    assert found.replicas == [2, 2]


def test_more_than_one_microbatch_implies_recomputation():
    """Estimates of a stage of 1 s a sample forward, 2 backward: in two microbatches 3 backward."""
    whole = first_feasible(blocks_of([1.0]), 8, Devices(1, 1, 9.0))
    assert (whole.microbatches, whole.seconds) == (1, 24)
    parts = first_feasible(blocks_of([1.0], saved=1.0), 8, Devices(1, 1, 5.0))
    assert (parts.microbatches, parts.seconds) == (2, 2 * 4 * (1 + 3))


def test_cut_minimizes_the_slowest_passes():
    """Of all cuts of the published loads into four stages of at most three blocks."""

    def slowest(ends):
        return max(sum(LOADS[before:after]) for before, after in pairwise((0, *ends)))

    cuts = [(*cut, 8) for cut in combinations(range(1, 8), 3)]
    fitting = [cut for cut in cuts if all(b - a <= 3 for a, b in pairwise((0, *cut)))]
    found = first_feasible(blocks_of(LOADS, memory=1.0, saved=0.01), 8, Devices(4, 4, 3.05))
    assert len(found.ends) == 4 and slowest(found.ends) == min(map(slowest, fitting))
