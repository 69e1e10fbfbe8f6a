"""Collectives in which each member sends to all others, and the networks that they are for."""

from types import SimpleNamespace

import pytest

from hpc3d.comm import all_pairs
from tests.mpi import checked


@pytest.mark.parametrize(
    ("ranks", "on_this_host", "fabric", "elsewhere", "kind"),
    [
        (4, 4, False, False, "MpiCommunicator"),
        (4, 2, False, False, "AllPairs"),
        (4, 2, True, False, "AllPairs"),
        (4, 2, True, True, "MpiCommunicator"),
    ],
)
def test_hosts_without_an_rdma_network_exchange_in_pairs(
    ranks, on_this_host, fabric, elsewhere, kind, tmp_path, monkeypatch
):
    (tmp_path / "class").mkdir()
    if fabric:
        (tmp_path / "class" / "mlx5_0").touch()
    monkeypatch.setattr(all_pairs, "_FABRICS", [tmp_path / "missing", tmp_path / "class"])
    comm = SimpleNamespace(
        rank=0,
        size=ranks,
        Split_type=lambda _: SimpleNamespace(size=on_this_host, Free=lambda: None),
        allreduce=lambda tcp, op: tcp or not elsewhere,
    )
    assert type(all_pairs.mpi_communicator(comm, range(ranks), None)).__name__ == kind


@pytest.mark.slow
def test_real_ranks():
    """On 2 to 5 hosts, with every block as a long one and with the usual limit."""
    words = ["-m", "tests.comm.on_two_level", "tcp", *"abcde", 1, 1 << 16]
    out = checked(5, *words, timeout=200)
    assert out.splitlines() == [f"{size} AllPairs" for _ in range(2) for size in range(2, 6)]
