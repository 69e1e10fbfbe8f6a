"""RaNNC's search over blocks, compared with known results."""

from itertools import combinations, pairwise

import pytest

pytest.importorskip("networkx")

from hpc3d.partition.atom_graph import Graph
from hpc3d.partition.baselines.rannc_search import Devices, first_feasible, lock_step
from hpc3d.partition.downsets import Chain
from tests.partition.graphs import LOADS, chain


def blocks_of(loads, memory=0.0, saved=0.0):
    """Return, by rows, a chain whose blocks take and save an amount per row, and have `memory`."""

    def costs(rows):
        graph = chain([load * rows for load in loads])
        atoms = [atom._replace(memory=memory, saved=saved * rows) for atom in graph.atoms]
        return Chain(Graph(atoms, graph.values))

    return costs


def test_lock_step_time_of_published_stages():
    """ResNet152x8 on three stages (RaNNC's README): 3.62 s, and 3.49 s with 1F1B."""
    forward, backward = (0.164066, 0.143170, 0.113227), (0.455616, 0.460086, 0.410329)
    assert lock_step(forward, backward, 4) == pytest.approx(3.61895, abs=1e-5)


def test_lock_step_time_of_one_microbatch_is_the_sum():
    assert lock_step([1, 2, 3], [4, 5, 6], 1) == 21


def test_fewest_feasible_stages_are_selected():
    """Each of three replicas would have two of 4 samples; two consecutive stages have all."""
    found = first_feasible(blocks_of([1, 1]), 4, Devices(2, 2, 9.0))
    assert (found.ends, found.replicas, found.microbatches) == ([2], [2], 1)


def test_stages_increase_until_they_fit():
    """Of 8 blocks of 3 bytes, two fit in 7 bytes: four stages on four devices."""
    found = first_feasible(blocks_of([1] * 8, memory=3.0), 8, Devices(4, 4, 7.0))
    assert found.ends == [2, 4, 6, 8] and found.replicas == [1, 1, 1, 1]
    assert first_feasible(blocks_of([1] * 8, memory=3.0), 8, Devices(2, 2, 7.0)) is None


def test_pipeline_stays_on_one_node_if_it_fits():
    """There are two stages on each of two nodes with two devices."""
    found = first_feasible(blocks_of([1, 1], memory=3.0), 8, Devices(4, 2, 4.0))
    assert found.replicas == [2, 2]
    across = first_feasible(blocks_of([1] * 4, memory=3.0), 8, Devices(4, 2, 4.0))
    assert across.replicas == [1, 1, 1, 1]


def test_heavy_stage_gets_a_power_of_two_of_replicas():
    """With 9 s and 3 s on four devices: 2 and 2, although 3 and 1 would be balanced."""
    found = first_feasible(blocks_of([9, 3], memory=3.0), 16, Devices(4, 4, 4.0))
    assert found.replicas == [2, 2]


def test_more_than_one_microbatch_implies_recomputation():
    """A sample takes 1 s forward and 2 s backward, or 3 s backward in two microbatches."""
    whole = first_feasible(blocks_of([1.0]), 8, Devices(1, 1, 9.0))
    assert (whole.microbatches, whole.seconds) == (1, 24)
    parts = first_feasible(blocks_of([1.0], saved=1.0), 8, Devices(1, 1, 5.0))
    assert (parts.microbatches, parts.seconds) == (2, 2 * 4 * (1 + 3))


def test_cut_minimizes_the_slowest_passes():
    """Tests all cuts of the published loads into four stages of at most three blocks."""

    def slowest(ends):
        return max(sum(LOADS[before:after]) for before, after in pairwise((0, *ends)))

    cuts = [(*cut, 8) for cut in combinations(range(1, 8), 3)]
    fitting = [cut for cut in cuts if all(b - a <= 3 for a, b in pairwise((0, *cut)))]
    found = first_feasible(blocks_of(LOADS, memory=1.0, saved=0.01), 8, Devices(4, 4, 3.05))
    assert len(found.ends) == 4 and slowest(found.ends) == min(map(slowest, fitting))
