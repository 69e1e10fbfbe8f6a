"""Costs of uneven stages."""

import numpy as np
import pytest

from tests.studies.small import FLOAT, parted


@pytest.mark.slow
def test_total_activations_match_the_microbatches_in_flight():
    """Working memory, which is equal on all stages, and received data are excluded."""
    even, poor = parted()
    assert [row["in_flight"] for row in even] == [(row["count"] + 1) * 8 / 2 for row in even]
    assert [row["in_flight"] for row in poor] == [8, 2 * 7 + 1, 4 * 5 + 3 + 2 + 1]
    work = even[0]["layers_held"] - 8
    received = FLOAT * 512 * 64 / (even[0]["activations"] / even[0]["layers_held"])
    assert 0 < work < 1
    for row in even + poor:
        count, held = row["count"], row["layers_held"]
        expected = row["in_flight"] + count * work + (count - 1) * received
        assert held == pytest.approx(expected, abs=1e-9)


def test_fewer_microbatches_than_stages_limit_those_in_flight():
    even, _ = parted((8,))
    assert even[0]["in_flight"] == 5 * 4 + 3 + 2 + 1


@pytest.mark.slow
def test_total_memory_grows_with_stages_and_with_imbalance():
    even, poor = parted()
    for rows in (even, poor):
        assert np.all(np.diff([row["total"] for row in rows]) > 0)
        assert [row["copies"] for row in rows] == [0] + [512 * 64 * 4 * FLOAT] * 2
        assert len({row["states"] for row in rows}) == 1
    assert all(bad["total"] > good["total"] for good, bad in zip(even[1:], poor[1:]))
    assert even[-1]["worst"] < even[0]["worst"] < poor[-1]["worst"]
    assert poor[-1]["worst_stage"] == 0
