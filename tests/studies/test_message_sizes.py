"""Costs of messages by size."""

import numpy as np
import pytest

from hpc3d.studies.pp_vs_dp.message_sizes import half_bytes, microbatches
from tests.predict.fixed import ALPHA, LAUNCH, LINE, MACHINE
from tests.studies.small import summed


def test_half_bandwidth_message_size_is_alpha_over_beta():
    send = half_bytes(MACHINE, "send", (0, 1))
    assert send == pytest.approx((LAUNCH + ALPHA) * LINE, rel=2e-3)
    rounds = 6  # of an all-reduce of 8, by halving and doubling
    total = half_bytes(MACHINE, "all_reduce", range(8))
    assert total == pytest.approx((LAUNCH + rounds * ALPHA) * LINE, rel=2e-3)


def test_buckets_move_equal_bytes_and_add_latency_each():
    overlapped, after = summed()
    for rows in (overlapped, after):
        assert len({round(row["calls"] * row["message"]) for row in rows}) == 1
        assert np.all(np.diff([row["calls"] for row in rows]) < 0)
    assert np.all(np.diff([row["step_s"] for row in after]) < 0)


def test_best_bucket_size_is_intermediate_with_overlap():
    overlapped, after = summed()
    steps = [row["step_s"] for row in overlapped]
    assert 0 < np.argmin(steps) < 3
    assert all(early < late["step_s"] for early, late in zip(steps[:3], after))
    assert steps[3] == pytest.approx(
        after[3]["step_s"], rel=1e-3
    )  # one bucket: nothing to hide it


def test_more_microbatches_have_smaller_and_slower_messages():
    rows = microbatches(MACHINE, 512, 1, 512, 4, counts=(1, 4, 16, 64))
    one, summa = rows[:4], rows[4:]
    moved = [row["calls"] * row["message"] for row in one]
    assert moved == pytest.approx([moved[0]] * 4)
    for each in (one, summa):
        assert np.all(np.diff([row["message"] for row in each]) < 0)
        assert np.all(np.diff([row["calls_s"] for row in each]) > 0)
        assert np.all(np.diff([row["step_s"] for row in each]) > 0)
    more = [row["calls"] * row["message"] for row in summa]
    assert more[3] > 2 * more[0]  # the weights' panels go with each microbatch again
