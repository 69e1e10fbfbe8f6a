"""Bytes sent between hosts, compared with formulas."""

import pytest

from hpc3d.analyze.metrics.crossing import host_pair_rows, host_traffic_rows
from hpc3d.analyze.metrics.wait_states import calls_of
from hpc3d.analyze.report import charts, figure_list
from hpc3d.analyze.report.run_analysis import analyze_run
from tests.analyze.synthetic import by_hand, call

GROUPS = [("x", (0, 1, 2, 3)), ("y", (0, 1)), ("z", (0, 2)), ("d", (1, 2, 3))]
HOSTS = ["a", "a", "b", "b"]


def crossings(path, rows, hosts=HOSTS, steps=1):
    """Return the rows of the hosts and of their pairs, for four ranks and steps of 1 s."""
    cells = [(rank, step) for rank in range(4) for step in range(steps)]
    table = {(rank, step): (1000 * step, 1000 * step + 1000) for rank, step in cells}
    with by_hand(path / "t.h5", rows, table, GROUPS, hosts) as trace:
        calls = calls_of(trace)
        pairs = {
            (row["sender_host"], row["receiver_host"]): row["bytes"]
            for row in host_pair_rows(calls)
        }
        return {row["host"]: row for row in host_traffic_rows(calls)}, pairs


def together(op, nbytes, group=0, count=1000, seq=0, **values):
    return [
        call(rank, op, 1, 5, seq, group=group, bytes=nbytes, count=count, **values)
        for rank in GROUPS[group][1]
    ]


# op, bytes that each of four members receives of a block of 4000 B: on the card of each of two
# hosts with two of them.
LEVELS = [
    ("all_gather", 3000, 2000),
    ("reduce_scatter", 3000, 2000),
    ("all_reduce", 6000, 4000),
    ("all_to_all", 3000, 4000),
]


@pytest.mark.parametrize(("op", "nbytes", "on_card"), LEVELS)
def test_nic_traffic_of_a_collective_counts_one_member_per_host(tmp_path, op, nbytes, on_card):
    rows, pairs = crossings(tmp_path, together(op, nbytes))
    for host in "ab":
        found = rows[host]
        assert (found["ranks"], found["calls"]) == (2, 2)
        assert found["bytes"] == pytest.approx(2 * nbytes)
        assert found["crossing"] == pytest.approx(2 * nbytes * 2 / 3)
        assert found["on_cards"] == pytest.approx(on_card)
    assert pairs["a", "b"] == pytest.approx(2 * nbytes * 2 / 3)
    assert pairs["a", "a"] == pytest.approx(2 * nbytes / 3)


def test_nic_carries_all_bytes_with_one_rank_per_host(tmp_path):
    rows, _ = crossings(tmp_path, together("all_reduce", 6000), hosts=list("abcd"))
    assert [row["on_cards"] for row in rows.values()] == pytest.approx([6000] * 4)


def test_groups_with_unequal_ranks_per_host_use_flat_collectives(tmp_path):
    """Rank 1 is alone on host a; host b sends the data of ranks 2 and 3 to it, and gets half."""
    rows, _ = crossings(tmp_path, together("all_gather", 2000, group=3))
    assert rows["a"]["on_cards"] == pytest.approx(2000)
    assert rows["b"]["on_cards"] == pytest.approx(2 * 1000)


def test_traffic_inside_a_host_is_not_on_the_nic(tmp_path):
    rows, pairs = crossings(tmp_path, together("all_reduce", 4000, group=1))
    assert rows["a"] | {"bytes": 8000.0} == rows["a"]
    assert [(row["calls"], row["crossing"], row["on_cards"]) for row in rows.values()] == [
        (0, 0, 0),
        (0, 0, 0),
    ]
    assert pairs == {("a", "a"): 8000}


def test_message_between_hosts_counts_on_the_receiving_host(tmp_path):
    rows = [
        call(0, "send", 1, 2, 0, group=2, peer=2, bytes=700),
        call(2, "recv", 1, 3, 0, group=2, peer=0, bytes=700),
    ]
    found, pairs = crossings(tmp_path, rows, steps=2)
    assert [(row["calls"], row["on_cards"]) for row in found.values()] == [(0.5, 0), (0.5, 350)]
    assert pairs == {("a", "b"): 350}


@pytest.mark.parametrize(("op", "on_cards"), [("broadcast", (0, 4000)), ("reduce", (4000, 0))])
def test_rooted_collective_crosses_once_per_host(tmp_path, op, on_cards):
    rows = together(op, 4000, peer=0)
    rows[0]["bytes"] = 0 if op == "broadcast" else 4000
    found, _ = crossings(tmp_path, rows)
    assert tuple(row["on_cards"] for row in found.values()) == on_cards


def test_single_host_has_no_crossing_table(tmp_path):
    assert crossings(tmp_path, together("all_gather", 3000), hosts=["a"] * 4) == ({}, {})


def test_report_has_a_table_and_chart_of_traffic_between_hosts(tmp_path):
    rows, steps = together("all_gather", 3000), {(rank, 0): (0, 1000) for rank in range(4)}
    with by_hand(tmp_path / "t.h5", rows, steps, GROUPS, HOSTS) as trace:
        run = analyze_run(trace)
    assert [row["host"] for row in run.tables["crossing"]] == ["a", "b"]
    (chart,) = [each.chart for each in figure_list.of_run(run) if each.name == "hosts"]
    assert isinstance(chart, charts.Bars) and chart.labels == ["a", "b"]
    assert [sum(values) for _, values in chart.parts.values()] == pytest.approx([4, 8])
