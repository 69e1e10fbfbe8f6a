"""Shared memory of a node is reused without errors, and always removed."""

import os
import shutil
import tempfile

import numpy as np
import pytest

from hpc3d.arrays.pool import Pool
from hpc3d.comm import shared_memory
from tests.mpi import checked, mpirun
from tests.strided import strided


@pytest.fixture
def folder():
    """Folder in shared memory for this test only."""
    path = tempfile.mkdtemp(dir=shared_memory.SHARED)
    yield path
    shutil.rmtree(path)


def ranks(count, mode, folder):
    out = checked(count, "-m", "tests.comm.on_shared_memory", mode, folder)
    return out.split()


def test_shared_memory_is_reused_and_removed(folder):
    assert ranks(3, "steady", folder) == ["steady"] * 3
    assert os.listdir(folder) == []


@pytest.mark.slow
def test_shared_memory_is_not_reused_while_a_member_reads(folder):
    assert ranks(2, "slow", folder) == ["slow"] * 2


@pytest.mark.parametrize("mode", strided(["kept", "sizes", "order"], 3))
def test_members_with_mismatched_calls_raise(mode, folder):
    assert ranks(2, mode, folder) == ["refused"] * 2


def test_any_number_of_calls_can_be_in_flight(folder):
    assert ranks(2, "many", folder) == ["many"] * 2


@pytest.mark.slow
def test_no_shared_memory_remains_after_a_member_is_killed(folder):
    done = mpirun(3, "-m", "tests.comm.on_shared_memory", "killed", folder)
    assert done.returncode == 128 + 9
    assert os.listdir(folder) == []


@pytest.mark.slow
def test_mpi_is_the_fallback_without_shared_memory(folder):
    assert ranks(2, "kind", folder) == ["SharedMemory"] * 2
    assert ranks(2, "kind", f"{folder}/missing") == ["AllPairs"] * 2


@pytest.mark.parametrize(
    ("machine", "ranks", "good"),
    [("x86_64", 1, True), ("aarch64", 1, False), ("x86_64", 1 << 40, False)],
)
def test_shared_memory_is_limited_to_supported_machines(machine, ranks, good, monkeypatch):
    monkeypatch.setattr(shared_memory.platform, "machine", lambda: machine)
    assert shared_memory.usable(ranks) is good


def test_pool_reuses_memory_after_the_last_view_is_deleted():
    pool = Pool()
    first = pool.empty((100, 3), np.float64)
    view, address = first[10:], first.ctypes.data
    del first
    assert pool.empty((100, 3), np.float64).ctypes.data != address
    assert pool.live["activation"] == 2400
    del view
    assert pool.live["activation"] == 0
    assert pool.peak["activation"] == 4800
    assert pool.empty((3, 100), np.float64).ctypes.data == address
