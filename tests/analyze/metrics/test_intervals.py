"""Time intervals, compared with sets of integers."""

import numpy as np
import pytest

from hpc3d.analyze.metrics.intervals import before, in_common, merged


@pytest.mark.parametrize("number", range(5))
def test_interval_functions_agree_with_sets_of_integers(number, chance):
    random = np.random.default_rng(chance.getrandbits(64))
    sets, unions = [], []
    for _ in range(2):
        start = random.integers(0, 80, 12)
        end = start + random.integers(0, 12, 12)
        sets.append({time for pair in zip(start, end) for time in range(*pair)})
        unions.append(merged(start, end))
    for times, (start, end) in zip(sets, unions):
        assert {time for pair in zip(start, end) for time in range(*pair)} == times
        assert (start[1:] > end[:-1]).all()
        edges = np.arange(-2, 100)
        assert before((start, end), edges).tolist() == [
            sum(time < edge for time in times) for edge in edges
        ]
    assert in_common(*unions) == len(sets[0] & sets[1])


def test_empty_intervals_have_no_overlap():
    nothing = merged(np.array([], int), np.array([], int))
    assert in_common(nothing, (np.array([3]), np.array([5]))) == 0
    assert in_common((np.array([3]), np.array([5])), nothing) == 0
