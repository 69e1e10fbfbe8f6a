"""Improvement of arrangements by single changes."""

import random
from itertools import combinations

import numpy as np
import pytest

pytest.importorskip("networkx")

from hpc3d.partition.atom_graph import Atom, Graph, Value
from hpc3d.partition.downsets import Chain
from hpc3d.partition.evaluation import (
    Limits,
    ModelCosts,
    PipelineChoice,
    StageChoice,
    evaluated,
)
from hpc3d.partition.improvement import cuts_moved, improved, moved, next_best, settled
from hpc3d.partition.joint_search import Allowed, fastest, timed
from tests.partition.arrangements import MACHINE, line
from tests.partition.graphs import chain

COSTS = line([1.0] * 12, [0.0] * 11)
POOR = PipelineChoice((StageChoice(3), StageChoice(4), StageChoice(12)), 4)
ANY = Allowed(4, 1e9, (4,), ("1f1b",))


def test_poor_arrangement_is_improved_to_a_local_optimum():
    """A row takes 12 s in 3 stages, one of them on two ranks."""
    choice, step = improved(COSTS, POOR, ANY, np.arange(0))
    assert sorted(choice.replicas) == [1, 1, 2] and choice.ranks == 4
    assert step == evaluated(COSTS, choice, 1e9) and step.seconds < 0.6 * 2 * 9 * 3 * 4
    for border in range(2):
        assert next_best(COSTS, choice, step, border, 1e9)[1] >= step.seconds


@pytest.mark.parametrize("seed", range(3))
def test_improvement_moves_all_borders(seed):
    """Compares all partitions of a chain into three stages, with different atom times."""
    draw = random.Random(seed)
    costs = line([draw.uniform(1, 9) for _ in range(24)], [draw.uniform(0, 9) for _ in range(23)])
    poor = PipelineChoice((StageChoice(6), StageChoice(14, 2), StageChoice(24)), 4)
    cuts = [
        (StageChoice(a), StageChoice(b, 2), poor.stages[2])
        for a, b in combinations(range(1, 24), 2)
    ]
    best = min(evaluated(costs, poor._replace(stages=stages)).seconds for stages in cuts)
    _, step = improved(costs, poor, ANY._replace(replicas=(1, 2, 1)), np.arange(0))
    assert step.seconds <= 1.005 * best < 0.995 * evaluated(costs, poor).seconds


def test_recomputation_is_dropped_if_memory_allows():
    again = PipelineChoice((StageChoice(6, 2, True), StageChoice(12, 2, True)), 4)
    choice, _ = improved(COSTS, again, ANY, np.arange(0))
    assert not any(stage.recompute for stage in choice.stages)
    kept, _ = improved(COSTS, again, ANY._replace(recompute=(True,)), np.arange(0))
    assert all(stage.recompute for stage in kept.stages)


def test_requested_replicas_are_kept():
    choice, _ = improved(COSTS, POOR, ANY._replace(replicas=(1, 1, 1)), np.arange(0))
    assert choice.replicas == (1, 1, 1)
    assert [stage.end for stage in choice.stages] == [4, 8, 12]


def test_border_moves_to_adjacent_and_given_positions():
    choice = PipelineChoice((StageChoice(50), StageChoice(100)), 4)
    ends = {each.stages[0].end for each in moved(choice, 0, np.array([0, 10, 50, 90, 100]))}
    assert ends == {10, 90, *range(44, 57)} - {50}


@pytest.mark.parametrize(
    ("memory", "end", "instead", "tight"), [(1e9, 3, 4, False), (9.0, 2, None, True)]
)
def test_faster_step_that_does_not_fit_is_reported(memory, end, instead, tight):
    """With two rows, the first of two stages saves 4 bytes per atom, and the second 2."""

    def graph(rows):
        atoms = [Atom((n,), 1.0 * rows, 2.0 * rows, saved=1.0 * rows) for n in range(6)]
        return Graph(atoms, [Value(n, (n + 1,), 0.0) for n in range(5)])

    costs = ModelCosts(graph, MACHINE, 8)
    choice = PipelineChoice((StageChoice(end), StageChoice(6)), 4)
    step = evaluated(costs, choice, memory)
    other, seconds, found = next_best(costs, choice, step, 0, memory)
    assert step.fits and found == tight
    assert (other and other.stages[0].end, seconds is None) == (instead, instead is None)


def test_improvement_ends_where_no_single_border_move_helps():
    chance = random.Random(1)
    cuts = Chain(chain([chance.uniform(1, 9) for _ in range(20)]))
    limits = Limits(4, microbatches=6)
    poor = timed(cuts, limits, "1f1b", [3, 8, 12, 20])
    good, best = settled(cuts, limits, poor), fastest(cuts, limits, ("1f1b",))
    assert best.seconds <= good.seconds <= 1.05 * best.seconds < 0.9 * poor.seconds
    for number in range(3):
        assert all(each.seconds >= good.seconds for each in cuts_moved(cuts, limits, good, number))


def test_cuts_that_do_not_fit_are_skipped():
    """Two microbatches in flight on the first stage save 2 bytes per atom, of 8 bytes."""
    graph = chain([1.0] * 6)
    cuts = Chain(Graph([atom._replace(saved=1.0) for atom in graph.atoms], graph.values))
    limits = Limits(2, microbatches=2)
    found = timed(cuts, limits, "1f1b", [3, 6])
    assert {each.ends[0] for each in cuts_moved(cuts, limits, found, 0)} == {1, 2, 4, 5}
    tight = limits._replace(memory=8)
    assert {each.ends[0] for each in cuts_moved(cuts, tight, found, 0)} == {1, 2, 4}
