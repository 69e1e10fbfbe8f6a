"""Environment variables that are set before MPI and BLAS are loaded."""

import os

import pytest

from hpc3d.runtime import environment

RANKS = "OMPI_COMM_WORLD_LOCAL_SIZE"
BTL = "OMPI_MCA_btl"
YIELD = "OMPI_MCA_mpi_yield_when_idle"


@pytest.fixture
def machine(monkeypatch):
    """Return a function that simulates a rank on another machine."""
    for name in (*environment.THREAD_VARIABLES, *environment.LOCAL_RANKS, YIELD):
        monkeypatch.setenv(name, "")  # so that what is set on the way is undone
        monkeypatch.delenv(name)

    def pretend(cores, own, launcher, allowed):
        now = {0: set(range(own)), os.getppid(): set(range(launcher))}
        monkeypatch.setattr(os, "sysconf", lambda name: cores)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: now[pid])
        monkeypatch.setattr(
            os,
            "sched_setaffinity",
            lambda pid, wish: now.update({pid: {*wish} & {*range(allowed)}}),
        )
        return now

    return pretend


@pytest.mark.parametrize(
    ("cores", "own", "launcher", "allowed", "ranks", "threads", "yields"),
    [
        pytest.param(8, 8, 8, 8, None, 8, False, id="alone"),
        pytest.param(8, 8, 8, 8, "4", 2, False, id="two cores a rank"),
        pytest.param(8, 8, 8, 8, "3", 2, False, id="a core too many"),
        pytest.param(8, 8, 8, 8, "64", 1, True, id="more ranks than cores"),
        pytest.param(8, 1, 8, 8, "8", 1, False, id="bound to a core"),
        pytest.param(8, 4, 8, 8, "2", 4, False, id="bound to a socket"),
        pytest.param(8, 4, 8, 8, "8", 1, False, id="four ranks bound to a socket"),
        pytest.param(8, 1, 8, 8, "2", 1, False, id="bound to less than its share"),
        pytest.param(64, 2, 2, 2, "2", 1, False, id="container"),
        pytest.param(64, 2, 2, 2, "4", 1, True, id="container, more ranks than cores"),
        pytest.param(64, 2, 64, 2, "4", 1, True, id="launcher outside of the container"),
        pytest.param(2, 1, 1, 2, "2", 1, True, id="launcher bound by the user"),
        pytest.param(8, 8, 8, 8, "4(x2)", 2, False, id="as Slurm writes it"),
    ],
)
def test_threads_share_the_cores(
    machine, monkeypatch, cores, own, launcher, allowed, ranks, threads, yields
):
    affinity = machine(cores, own, launcher, allowed)
    if ranks:
        monkeypatch.setenv("SLURM_TASKS_PER_NODE", ranks)
    environment.set_environment()
    assert {os.environ[name] for name in environment.THREAD_VARIABLES} == {str(threads)}
    assert (YIELD in os.environ) == yields
    assert affinity[0] == set(range(own))


def test_environment_set_by_the_user_is_kept(machine, monkeypatch):
    machine(8, 8, 8, 8)
    monkeypatch.setenv(RANKS, "64")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv(YIELD, "0")
    environment.set_environment()
    assert os.environ["OMP_NUM_THREADS"] == "5"
    assert os.environ[YIELD] == "0"


@pytest.mark.parametrize(
    ("step", "alone"),
    [
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "64"}, True),
        ({"SLURM_STEP_NUM_TASKS": "64"}, False),
        ({"SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"}, False),
    ],
)
def test_mpi_starts_as_a_singleton_without_a_launcher(monkeypatch, step, alone):
    for name in (*environment.WORLD_RANKS, "PMIX_RANK", BTL):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**step, "SLURM_STEP_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with environment.mpi_environment():
        assert ("SLURM_STEP_ID" in os.environ) == (not alone)
        assert os.environ.get(BTL) == ("self" if alone else None)
    assert dict(os.environ) == before
