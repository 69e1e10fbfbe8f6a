"""Comparison of data, pipeline and tensor parallelism."""

import pytest

from hpc3d.studies.pp_vs_dp.strategies import strategies
from tests.predict.fixed import MACHINE

RANKS, LAYERS, HIDDEN, BATCH, SEQUENCE, FLOAT = 2, 4, 128, 8, 16, 4


@pytest.fixture(scope="module")
def rows():
    found = strategies(MACHINE, RANKS, LAYERS, HIDDEN, BATCH, SEQUENCE)
    return {row["strategy"]: row for row in found}


def test_parts_of_the_time_sum_to_the_step(rows):
    for row in rows.values():
        parts = sum(row[f"{name}_s"] for name in ("computation", "communication", "idle"))
        assert parts == pytest.approx(row["step_s"], rel=1e-12)
    assert rows["PP"]["idle_s"] > 0.1 * rows["PP"]["step_s"]


def test_zero_stages_shard_the_states(rows):
    kinds = ("optimizer", "gradient", "parameter")
    for stage, kind in enumerate(kinds, 1):
        for each in range(4):
            row = rows[f"ZeRO {each}" if each else "DP"]
            share = RANKS if each >= stage else 1
            full = rows["DP"]["memory"][kind]
            assert row["memory"][kind] == pytest.approx(full / share, rel=0.02)


def test_tensor_parallelism_moves_the_same_bytes_with_sequence_parallelism(rows):
    """There are four all-reduces of sub-block outputs per layer; each half of one is an all-gather
    or a reduce-scatter. Tables, norms and biases add less than a tenth."""
    output = BATCH * SEQUENCE * HIDDEN * FLOAT
    moved = 4 * LAYERS * 2 * (1 - 1 / RANKS) * output
    for name in ("TP", "TP, sequence"):
        assert moved <= rows[name]["received_bytes"] < 1.25 * moved
