"""Tests whose ranks are those of the job that pytest itself runs in:

    mpirun -np 8 python -m pytest --with-mpi -q tests/with_mpi

Without --with-mpi they are skipped (pytest-mpi), and MPI is not started.
"""

import sys

import pytest

from hpc3d.runtime.environment import OWN_RANK, number_in, set_environment

RANKS = 8


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Ranks share the cores, and the first one speaks for all."""
    if config.getoption("--with-mpi"):
        set_environment()
        if number_in(OWN_RANK, 0):
            config.pluginmanager.unregister(name="terminalreporter")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A rank that fails says why and ends the job: the others may wait for it."""
    report = yield
    if report.failed and item.config.getoption("--with-mpi"):
        from mpi4py import MPI

        print(f"rank {MPI.COMM_WORLD.rank}: {item.name}\n{report.longreprtext}", file=sys.stderr)
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
    return report


@pytest.fixture
def ranks():
    """The first RANKS ranks of the job."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    first = world.Split(world.rank < RANKS)
    if world.rank >= RANKS:
        pytest.skip(f"rank {world.rank} is not one of the first {RANKS}")
    return first
