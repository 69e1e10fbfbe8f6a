"""Borders that are moved one at a time."""

import random

import pytest

pytest.importorskip("networkx")

from hpc3d.partition.atom_graph import Graph
from hpc3d.partition.borders import moved, settled
from hpc3d.partition.downsets import Chain
from hpc3d.partition.stages import Limits
from hpc3d.partition.step_time import quickest, timed
from tests.partition.graphs import chain


def test_a_plan_settles_where_no_border_alone_makes_it_better():
    chance = random.Random(1)
    cuts = Chain(chain([chance.uniform(1, 9) for _ in range(20)]))
    limits = Limits(4, microbatches=6)
    poor = timed(cuts, limits, "1f1b", [3, 8, 12, 20])
    good, best = settled(cuts, limits, poor), quickest(cuts, limits, ("1f1b",))
    assert best.seconds <= good.seconds <= 1.05 * best.seconds < 0.9 * poor.seconds
    for number in range(3):
        assert all(each.seconds >= good.seconds for each in moved(cuts, limits, good, number))


def test_places_that_do_not_fit_are_left_out():
    """Two microbatches in flight on the first stage keep 2 bytes an atom, of 8."""
    graph = chain([1.0] * 6)
    cuts = Chain(Graph([atom._replace(saved=1.0) for atom in graph.atoms], graph.values))
    limits = Limits(2, microbatches=2)
    found = timed(cuts, limits, "1f1b", [3, 6])
    assert {each.ends[0] for each in moved(cuts, limits, found, 0)} == {1, 2, 4, 5}
    tight = limits._replace(memory=8)
    assert {each.ends[0] for each in moved(cuts, tight, found, 0)} == {1, 2, 4}
