"""Reductions and gathers by messages between all pairs of 2 to 5 hosts with one rank each."""

from math import inf
from types import SimpleNamespace

import pytest

from hpc3d.comm.all_pairs import AllPairs, shortest_exchange, slices_of
from hpc3d.runtime import host_map
from tests.mpi import checked
from tests.strided import daily


@pytest.mark.parametrize(("count", "size"), [(0, 2), (2, 3), (10, 3), (70001, 5)])
def test_slices_cover_all_elements_once(count, size):
    found = [index for each in slices_of(count, size) for index in range(count)[each]]
    assert found == [*range(count)]


@pytest.mark.parametrize(
    ("devices", "size"),
    [
        (["net/eth0"], AllPairs.long),
        (["net/eth0", "infiniband"], AllPairs.long),  # the driver is loaded, but finds no device
        (["net/eth0", "infiniband/mlx5_0"], inf),
        (["cxi/cxi0"], inf),
        (["hfi1/hfi1_0"], inf),
    ],
)
def test_mpi_collectives_are_used_on_networks_with_remote_memory_access(
    devices, size, tmp_path, monkeypatch
):
    monkeypatch.setattr(host_map, "_DEVICES", tmp_path)
    for name in devices:
        (tmp_path / name).mkdir(parents=True)
    one_host = SimpleNamespace(allreduce=lambda found, operation: found)
    assert shortest_exchange(one_host) == size


@pytest.mark.slow
@daily
def test_collectives_of_short_and_long_blocks_are_those_of_numpy():
    out = checked(5, "-m", "tests.comm.on_two_level", *"abcde", 1, 1 << 16, timeout=200)
    assert out.splitlines() == 2 * [f"{size} AllPairs" for size in range(2, 6)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "kinds"),
    [("abcde", 4 * ["AllPairs MPI"]), ("aabb", ["SharedMemory", "AllPairs MPI", "TwoLevel MPI"])],
)
def test_remote_memory_access_on_one_host_makes_all_ranks_use_mpi(hosts, kinds, tmp_path):
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    out = checked(len(hosts), "-m", "tests.comm.on_two_level", *hosts, tmp_path, timeout=200)
    sizes = range(2, len(hosts) + 1)
    assert out.splitlines() == [f"{size} {kind}" for size, kind in zip(sizes, kinds)]
