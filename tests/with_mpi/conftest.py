"""Tests that use the ranks of the MPI job in which pytest itself runs (`make test-mpi`):

    mpirun -n 8 python -m pytest --with-mpi --ranks 8 -q tests/with_mpi

Without --with-mpi they are skipped (pytest-mpi), and MPI is not started.
"""

import sys

import pytest

from hpc3d.runtime.environment import OWN_RANK, number_in, set_environment

FEW = 8  # ranks at most that multiply and train


def pytest_addoption(parser):
    parser.addoption("--ranks", type=int, help="how many the launcher was told to start")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Let the ranks share the cores, and only the first rank print."""
    if config.getoption("--with-mpi"):
        set_environment()
        first = not number_in(OWN_RANK, 0)
        if said := _wrong_size(config.getoption("--ranks", None)):
            raise pytest.UsageError(*[said] if first else [])
        if not first:
            config.pluginmanager.unregister(name="terminalreporter")


def _wrong_size(meant):
    """Return the error if the launcher and MPI disagree on the number of ranks, or if the number
    does not suit the tests; otherwise an empty text."""
    from hpc3d.runtime.mpi_library import mismatch_report

    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # there is mpi4py and no MPI
        reason = str(error).partition("\n")[0]
        return f"{reason}; python -m hpc3d.doctor reports the cause and a remedy"
    size = MPI.COMM_WORLD.size
    if meant not in (None, size):
        lines = f"{meant} ranks were started, but MPI sees {size}", *mismatch_report(meant)
        return "\n".join(lines)
    if size not in (2, 4) and size % FEW:
        return f"these tests run on 2, 4 or a multiple of {FEW} ranks, not on {size}"
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A rank that fails prints the reason and ends the job, because others may wait for it."""
    report = yield
    if report.failed and item.config.getoption("--with-mpi"):
        from mpi4py import MPI

        print(f"rank {MPI.COMM_WORLD.rank}: {item.name}\n{report.longreprtext}", file=sys.stderr)
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
    return report


@pytest.fixture
def world():
    """Communicator of all ranks."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def few(world):
    """FEW ranks at equal distances, so that they are on all nodes; the others skip the test."""
    apart = max(1, world.size // FEW)
    chosen = world.Split(world.rank % apart == 0)
    if world.rank % apart:
        pytest.skip(f"rank {world.rank} is not one of {FEW}")
    return chosen
