"""What the head of the log says of hosts."""

from hpc3d.training.log import hosts


def test_several_hosts_are_named_with_their_ranks():
    assert [*hosts(["a"] * 4)] == []
    assert [*hosts(["a", "a", "b", "a"])] == ["4 ranks on 2 hosts: a 3, b 1"]
    many = [f"n{rank // 4}" for rank in range(64)]
    (line,) = hosts(many)
    assert line.startswith("64 ranks on 16 hosts: n0 4, n1 4, ") and line.endswith("n7 4, 8 more")
