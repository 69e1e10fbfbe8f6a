"""Cuts of a chain, and costs between two cuts."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")

from hpc3d.partition.coarse_chain import Ranges, border_of, positions_of, sums_of
from hpc3d.partition.evaluation import RunCosts
from tests.partition.arrangements import MACHINE, line, random_costs


def test_long_chain_is_cut_where_little_crosses():
    """No bytes cross every fourth of 399 boundaries."""
    costs = line([1.0] * 400, [0.0 if n % 4 == 3 else 99.0 for n in range(399)])
    places = positions_of(costs, 4, 48)
    assert len(places) == 49 and places[0] == 0 and places[-1] == 400
    assert not (places % 4).any() and max(np.diff(places)) <= 16


def test_short_chain_is_cut_everywhere():
    assert [*positions_of(line([1.0] * 5, [9.0] * 4), 2, 48)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", range(4))
def test_ranges_match_the_costs_between_two_cuts(seed):
    costs, _, _ = random_costs(seed)
    costs.run = RunCosts(forward=2.0, backward=3.0) if seed % 2 else RunCosts()
    places = np.array([0, 2, costs.count])
    found = Ranges(costs, 2, places)
    for first, last in ((0, 1), (1, 2), (0, 2)):
        part = costs.part(2, places[first], places[last])
        for name in ("forward", "backward", "weight", "fixed", "trained", "saved", "working"):
            assert getattr(found, name)[first, last] == pytest.approx(getattr(part, name))
        assert found.crossing[first] == part.received


def test_border_and_reduction_times_are_those_of_the_machine():
    """Nodes have two ranks, so boundaries of larger groups are between nodes."""
    costs = line([1.0], [])
    assert border_of(costs, 2).seconds(50.0) == pytest.approx(6.0)
    assert border_of(costs, 3).seconds(50.0) == pytest.approx(52.0, rel=0.02)
    assert sums_of(costs, 2).seconds(30.0) == pytest.approx(
        MACHINE.call("all_reduce", 30.0, range(2)), rel=0.02
    )
    assert sums_of(costs, 1).seconds(30.0) == 0.0
