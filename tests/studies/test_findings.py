"""The four findings: the closed forms that they stand beside, and clear points of each figure."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hpc3d import trace
from hpc3d.analyze.metrics.wait_states import calls_of, wait_rows
from hpc3d.predict.simulation.simulator import BYTES
from hpc3d.predict.simulation.write_trace import write_trace
from hpc3d.studies.pp_vs_dp import figures, findings
from hpc3d.studies.pp_vs_dp.comparison import race, slowed, why
from hpc3d.studies.pp_vs_dp.experiment import settled, step
from hpc3d.studies.pp_vs_dp.message_sizes import buckets, half_bytes, microbatches
from hpc3d.studies.pp_vs_dp.stage_balance import partitions
from hpc3d.studies.pp_vs_dp.wait_times import by_axis, waiting
from tests.predict.fixed import ALPHA, LAUNCH, LINE, MACHINE

RANKS, LAYERS, SEQUENCE, FLOAT = 4, 4, 16, 4
APART = replace(MACHINE, ranks_per_node=1, links=MACHINE.links[1:])  # a rank a node


def small(machine, hidden, batch, count):
    return race(machine, RANKS, hidden, batch, count, LAYERS, SEQUENCE)


# 1. Pipeline or data parallelism


@pytest.mark.parametrize(("batch", "less"), [(72, "pipeline"), (136, "pipeline"), (296, "data")])
def test_bytes_of_both_are_their_closed_forms(batch, less):
    hidden, tokens = 64, batch * SEQUENCE
    row = small(MACHINE, hidden, batch, 4)
    layer = 12 * hidden**2 + 13 * hidden
    parameters = LAYERS * layer + (BYTES + SEQUENCE + 2) * hidden  # both norms and tables
    assert row["pipeline_bytes"] == 2 * tokens * hidden * FLOAT
    assert row["data_bytes"] == 2 * (RANKS - 1) * parameters * FLOAT // RANKS
    assert row["boundary"] == 12 * LAYERS * hidden * (RANKS - 1) / RANKS == 2304
    assert (less == "pipeline") == (tokens < row["boundary"])
    assert row["moves_less"] == less


def test_a_pipeline_wins_where_the_model_is_wide_the_network_slow_and_tokens_few():
    slow = slowed(APART, 64)
    row = small(slow, 256, 16, 4)
    assert (row["moves_less"], row["wins"], row["why"]) == ("pipeline", "pipeline", "")
    assert row["pipeline_s"] < 0.1 * row["data_s"]
    assert row["pipeline_memory"] < row["data_memory"] / 2
    wide, narrow, many = (
        each["pipeline_s"] / each["data_s"]
        for each in (row, small(slow, 64, 16, 4), small(slow, 64, 256, 4))
    )
    assert wide < narrow < 1 < many


def test_data_parallelism_wins_against_a_pipeline_with_one_microbatch():
    one, four = (small(MACHINE, 512, 16, count) for count in (1, 4))
    assert one["data_s"] == four["data_s"]
    assert (one["moves_less"], one["wins"], one["why"]) == ("pipeline", "data", "bubble")
    assert four["wins"] == "pipeline"


def test_what_costs_a_losing_pipeline_most():
    row = {"moves_less": "pipeline", "wins": "data", "pipeline_s": 2.0, "data_s": 1.0}
    shares = {"ideal_bubble": 0.2, "pipeline_exposed": 0.6}
    assert why(row | shares) == "messages"
    assert why(row | shares | {"ideal_bubble": 0.5}) == "bubble"
    assert why(row | shares | {"pipeline_exposed": 0.22}) == "passes"
    assert why(row | shares | {"moves_less": "data"}) == ""
    assert why(row | shares | {"moves_less": "data", "wins": "pipeline"}) == "sums"


def test_a_slowed_machine_is_slower_between_nodes_only():
    slow, far, near = slowed(MACHINE, 4), (0, 8), (0, 1)
    assert slow.call("send", 1e6, near) == MACHINE.call("send", 1e6, near)
    moved = MACHINE.call("send", 1e6, far) - MACHINE.call("send", 0, far)
    assert slow.call("send", 1e6, far) - slow.call("send", 0, far) == pytest.approx(4 * moved)


# 2. Memory


def parted(counts=(1, 2, 4)):
    """Rows of 8 layers and 4 microbatches."""
    rows = partitions(MACHINE, 8, 64, 4, 512, counts)
    return rows[: len(counts)], rows[len(counts) :]


def test_activations_of_all_ranks_are_those_in_flight():
    """But for what a stage works with, which is the same on each, and what it has received."""
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


def test_fewer_microbatches_than_stages_are_in_flight_at_most():
    even, _ = parted((8,))
    assert even[0]["in_flight"] == 5 * 4 + 3 + 2 + 1


def test_total_memory_rises_with_the_stages_and_more_with_a_poor_partition():
    even, poor = parted()
    for rows in (even, poor):
        assert np.all(np.diff([row["total"] for row in rows]) > 0)
        assert [row["copies"] for row in rows] == [0] + [512 * 64 * 4 * FLOAT] * 2
        assert len({row["states"] for row in rows}) == 1
    assert all(bad["total"] > good["total"] for good, bad in zip(even[1:], poor[1:]))
    assert even[-1]["worst"] < even[0]["worst"] < poor[-1]["worst"]
    assert poor[-1]["worst_stage"] == 0


# 3. Messages


def test_half_of_the_bandwidth_is_reached_with_alpha_over_beta():
    send = half_bytes(MACHINE, "send", (0, 1))
    assert send == pytest.approx((LAUNCH + ALPHA) * LINE, rel=2e-3)
    rounds = 6  # of an all-reduce of 8, by halving and doubling
    total = half_bytes(MACHINE, "all_reduce", range(8))
    assert total == pytest.approx((LAUNCH + rounds * ALPHA) * LINE, rel=2e-3)


def summed():
    rows = buckets(APART, 256, 4, 512, 16, sizes=(1, 2, 4, 16))
    return rows[:4], rows[4:]


def test_buckets_move_the_same_bytes_and_cost_a_latency_each():
    overlapped, after = summed()
    for rows in (overlapped, after):
        assert len({round(row["calls"] * row["message"]) for row in rows}) == 1
        assert np.all(np.diff([row["calls"] for row in rows]) < 0)
    assert np.all(np.diff([row["step_s"] for row in after]) < 0)


def test_the_best_bucket_is_neither_the_smallest_nor_the_largest_where_sums_overlap():
    overlapped, after = summed()
    steps = [row["step_s"] for row in overlapped]
    assert 0 < np.argmin(steps) < 3
    assert all(early < late["step_s"] for early, late in zip(steps[:3], after))
    assert steps[3] == pytest.approx(
        after[3]["step_s"], rel=1e-3
    )  # one bucket: nothing to hide it


def test_more_microbatches_are_smaller_messages_that_take_longer():
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


# 4. Waiting


def test_wait_and_transfer_are_those_of_the_trace_of_all_ranks(tmp_path):
    parallel = {"microbatches": 4, "layers_per_stage": (5, 2, 1), "scheme": "1d"}
    mesh = {"p": 3, "d": 2, "x": 2}
    config = settled(MACHINE, mesh, 16, parallel, hidden=128, layers=8, sequence=16)
    runs, _ = step(MACHINE, config)
    found = by_axis(runs)
    with trace.open(write_trace(tmp_path, runs, config, MACHINE)) as opened:
        rows = wait_rows(calls_of(opened), ("axis",))
    assert {row["axis"] for row in rows} == {*found} == {"p", "d", "x", "world"}
    for row in rows:
        wait, transfer = found[row["axis"]]
        assert wait == pytest.approx(row["wait_s"], abs=1e-12)
        assert transfer == pytest.approx(row["transfer_s"], abs=1e-12)
    assert found["p"][0] > found["p"][1] > 0


def test_uneven_stages_wait_longer_and_move_no_more():
    rows = waiting(MACHINE, 128, 8)
    assert [row["imbalance"] for row in rows] == [0, 0.25, 0.5, 1, 1.5]
    waits = [sum(row["wait_s"].values()) for row in rows]
    assert np.all(np.diff(waits) > 0) and waits[-1] > 2 * waits[0]
    assert {row["wait_s"]["x"] for row in rows} == {0}
    transfers = [row["transfer_s"]["x"] for row in rows]
    assert transfers == pytest.approx([transfers[0]] * len(rows), rel=1e-6)


# All of them


def few():
    """The tables of fewer and smaller steps."""
    cells = [
        small(machine, hidden, batch, 4)
        for machine in (APART, slowed(APART, 16))
        for hidden in (64, 128)
        for batch in (16, 64)
    ]
    return {
        "machine": MACHINE.name,
        "dtype": "float32",
        "races": cells,
        "by_microbatches": [small(APART, 128, 16, count) for count in (1, 4, 16)],
        "partitions": [row for rows in parted() for row in rows],
        "buckets": [row for rows in summed() for row in rows],
        "microbatches": microbatches(MACHINE, 512, 1, 512, 4, counts=(1, 8)),
        "waiting": waiting(MACHINE, 128, 4, ((2, 2), (3, 1))),
    }


def test_products_of_the_last_row_are_over_those_of_the_first():
    rows = [{"calls": 2, "message": 3}, {"calls": 0, "message": 0}, {"calls": 8, "message": 6}]
    assert findings.ends(rows, "calls", "message") == 8
    assert findings.ends(rows, "message") == 2


@pytest.mark.slow
def test_the_findings_are_printed_and_drawn(tmp_path, capsys):
    found = few()
    findings.report(found)
    text = capsys.readouterr().out
    for title in ("1. 4 stages", "2. Memory", "3. Reductions", "4. Uneven stages"):
        assert title in text
    assert max(map(len, text.splitlines())) < 100
    ratios = [row["pipeline_s"] / row["data_s"] for row in found["by_microbatches"]]
    assert "   ratio        " + "".join(f"{each:7.2f}" for each in ratios) in text.splitlines()
    figures.write(found, tmp_path / "figures")
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    expected = ("pipeline-or-data", "partition", "message-size", "waiting")
    assert names == {f"{name}.{kind}" for name in expected for kind in ("png", "svg")}
    assert all(path.stat().st_size > 5_000 for path in (tmp_path / "figures").iterdir())


@pytest.mark.slow
def test_the_findings_on_h100():
    found = findings.main(SimpleNamespace(machine=None))
    near, far = found["races"][:20], found["races"][20:]
    for rows in (near, far):
        corners = {(row["hidden"], row["tokens"]): row["wins"] for row in rows}
        assert corners[8192, 4096] == "pipeline" and corners[512, 262144] == "data"
    wins = [sum(row["wins"] == "pipeline" for row in rows) for rows in (near, far)]
    assert 0 < wins[0] < wins[1] < 20
    worst = {row["partition"]: row["worst"] for row in found["partitions"]}
    assert worst["even"] < found["partitions"][0]["worst"] < worst["poor"]
