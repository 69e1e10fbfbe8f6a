"""Nodes, identified by what their ranks share, and names of ranks with their hosts."""

import re

import pytest

from hpc3d.runtime import host_map
from hpc3d.runtime.host_map import Homes, kernel, listed, namesakes, spans

TWO = Homes(["hn1", "hn1", "hn1", "hn2", "hn2"], [0, 0, 0, 3, 3])


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3, 4], "all of hn2"),
        ([3], "rank 3 (hn2)"),
        ([0, 2], "ranks 0 2 (hn1)"),
        ([0, 1, 2, 3, 4], "all of hn1 and hn2"),
        ([0, 3, 4], "all of hn2 and rank 0 (hn1)"),
        ([1, 2, 4], "ranks 1-2 (hn1) and 4 (hn2)"),
    ],
)
def test_ranks_are_named_by_their_hosts(ranks, text):
    assert TWO.named(ranks) == text
    assert TWO.several() and TWO.leaders() == [0, 3]


def test_single_rank_host_is_named_with_its_rank():
    assert Homes(["hn1", "hn2", "hn2"], [0, 1, 1]).named([0]) == "rank 0 (hn1)"


def test_ranks_on_one_node_are_named_without_host():
    one = Homes(["hn1"] * 4, [0] * 4)
    assert not one.several()
    assert (one.named([2]), one.named([0, 1, 3])) == ("rank 2", "ranks 0-1 3")


def test_hosts_with_the_same_name_are_distinguished():
    twins = Homes(["node"] * 4, [0, 0, 2, 2])
    assert twins.several() and twins.leaders() == [0, 2]
    assert twins.named([2, 3]) == "all of node"
    assert twins.named([1, 2, 3]) == "all of node and rank 1 (node)"


def test_hosts_with_the_same_name_are_rejected():
    one, two = ("a", "1"), ("b", "")
    assert namesakes([("n", one), ("m", two), ("n", one)]) is None
    refused = namesakes([("n", one), ("m", two), ("n", one), ("n", two)])
    assert re.match("ranks 0 2 and 3 .* n: ", refused)


def test_rank_spans_and_lists_as_text():
    assert spans((0, 1, 2, 4, 5, 7)) == "0-2 4-5 7"
    assert [listed(words) for words in (["a"], ["a", "b"], ["a", "b", "c"])] == [
        "a",
        "a and b",
        "a, b and c",
    ]


def test_kernel_is_identified_by_boot_id_and_time_namespace(monkeypatch, tmp_path):
    boot = tmp_path / "boot_id"
    boot.write_text("0-1\n")
    monkeypatch.setattr(host_map, "BOOT", boot)
    monkeypatch.setattr(host_map, "CLOCKS", tmp_path / "time")
    assert kernel() == ("0-1", "")
    (tmp_path / "time").symlink_to("time:[7]")
    assert kernel() == ("0-1", "time:[7]")
