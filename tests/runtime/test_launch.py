"""Start and end of a job: threads, yielding, one-line errors, and no remaining ranks."""

import os
import re
import signal
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from hpc3d.console.exit_codes import BAD_INPUT
from hpc3d.console.sanitize import sanitized_streams
from hpc3d.runtime import launch
from hpc3d.runtime.environment import WORLD_RANKS
from tests.mpi import ROOT, mpirun, surroundings
from tests.runs import interruptible, said, wait_for, without_progress

slow = pytest.mark.slow
PROMPT = 120  # seconds: a rank that waits for another one would wait until the time limit
# Open MPI 4 binds 2 ranks to a core each, also to cores that it was not given; Open MPI 5 names
# the setting in its own way.
UNBOUND = {
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


def job(ranks, mode, folder, **environment):
    """Return the finished job, and the ranks that completed their clean-up."""
    words = ("-m", "tests.runtime.on_launch", mode, folder)
    done = mpirun(ranks, *words, environment=environment)
    return done, sorted(int(name) for name in os.listdir(folder))


@pytest.fixture
def one_core():
    """Bind this process and its child processes to one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def test_mpi_ranks_yield_on_one_core(one_core, tmp_path):
    done, _ = job(2, "environment", tmp_path, **UNBOUND)
    assert done.stdout.split() == ["1", "1"] * 2


@slow
def test_mpi_ranks_share_the_cores(tmp_path):
    cores = len(os.sched_getaffinity(0))
    done, _ = job(2, "environment", tmp_path, **UNBOUND)
    assert done.stdout.split()[0] == str(max(1, cores // 2))
    assert ("1" if cores == 1 else "-") == done.stdout.split()[1]


def alone(*words, stderr=subprocess.PIPE, **environment):
    settings = {**os.environ, **surroundings(), "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", *words]
    how = {"stdout": subprocess.DEVNULL, "stderr": stderr, "text": True, "timeout": 250}
    return subprocess.run(command, env=settings, check=False, preexec_fn=interruptible, **how)


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "PMI_SIZE"])
def test_singleton_under_a_multi_rank_launcher_is_explained(name, tmp_path):
    done = alone("hpc3d.train", "--run.out", str(tmp_path), **{name: "64"})
    line, *more = without_progress(done.stderr).splitlines()
    assert re.fullmatch("hpc3d.train: 64 .* MPI .* 1", line)
    assert any(re.search("-> .*srun --mpi=(pmix|pmi2) ", line) for line in more)
    assert done.returncode == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rank", range(3))
def test_only_rank_0_of_several_singletons_explains(rank, tmp_path):
    where = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": str(rank)}
    done = alone("hpc3d.train", "--run.out", str(tmp_path), **where)
    assert bool(without_progress(done.stderr)) == (rank == 0)
    assert done.returncode == 2


@pytest.mark.slow
def test_intended_single_rank_inside_a_larger_job_runs(tmp_path):
    done, ended = job(1, "agree", tmp_path, SLURM_NTASKS="64")
    assert (done.returncode, ended) == (0, [0])


@pytest.mark.parametrize(
    ("mode", "code", "message"),
    [
        ("fail", 1, "RuntimeError: a message of rank 1"),
        ("leave_early", 3, "hpc3d.test: rank 1 exited with 3"),
        pytest.param("fail_in_thread", 1, "RuntimeError: a message of a thread", marks=slow),
        pytest.param("return_code", 3, "hpc3d.test: rank 1 exited with 3", marks=slow),
    ],
)
def test_failing_rank_ends_the_job(mode, code, message, tmp_path):
    done, ended = job(4, mode, tmp_path)
    assert done.seconds < PROMPT
    assert done.returncode == code
    assert done.stderr.count(message) == 1
    (line,) = said(done)
    assert line.startswith("hpc3d.test: rank 1 ")
    assert 1 in ended


def test_failure_of_all_ranks_is_reported_once(tmp_path):
    done, _ = job(4, "fail_all", tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("a message of all ranks\n") == 1


def test_failure_of_a_single_rank_does_not_mention_mpi(tmp_path):
    done = alone("tests.runtime.on_launch", "fail_all", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("hpc3d.test: rank 0 failed\nTraceback")
    assert done.stderr.rstrip().endswith("RuntimeError: a message of all ranks")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_signal_during_products_saves_and_continues(tmp_path):
    done = alone("tests.runtime.on_launch", "told_amid_products", tmp_path, OMP_NUM_THREADS="2")
    assert (done.returncode, done.stderr) == (0, "")


@slow
@pytest.mark.parametrize("mode", ["terminated_in_products", "interrupted_twice_in_products"])
def test_termination_signal_during_products_ends_the_rank(mode, tmp_path):
    done = alone("tests.runtime.on_launch", mode, tmp_path, OMP_NUM_THREADS="2")
    assert done.returncode == 128 + signal.SIGTERM
    assert "hpc3d.test: ended by SIGTERM" in said(done)
    wait_for((tmp_path / "0").exists)


def test_second_interrupt_does_not_wait_for_the_save_of_the_first(tmp_path):
    copies, errors = tmp_path / "copies", tmp_path / "errors"
    copies.mkdir()
    with errors.open("w") as file:  # a pipe would be open until the copy ends
        words = ("tests.runtime.on_launch", "interrupted_while_saving", copies)
        done = alone(*words, stderr=file)
    wait_for(lambda: any(copies.iterdir()))
    subprocess.run(["pkill", "-9", "-f", str(copies)], check=False)
    assert (done.returncode, errors.read_text()) == (130, "hpc3d.test: ended by SIGINT\n")
    # If the first copy had been waited for, there would be another one of the second signal.
    assert len([*copies.iterdir()]) == 1


def test_interrupt_before_the_job_starts_is_one_line(monkeypatch, capsys):
    def interrupt(name, body):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_started", interrupt)
    assert launch.run("train", None) == 130
    assert capsys.readouterr().err == "hpc3d.train: ended by SIGINT\n"


def test_mpi_load_failure_of_a_single_rank_is_one_line(monkeypatch, capsys):
    chosen = "OMPI_MCA_btl"

    class Module(ModuleType):
        def __getattr__(self, name):
            raise ImportError(f"cannot load MPI for {os.environ[chosen]}\n/usr/lib/libmpi.so")

    for name in (*WORLD_RANKS, "PMIX_RANK", chosen):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setitem(sys.modules, "hpc3d.runtime.job", Module("job"))
    assert launch.run("train", None) == 2
    remedy = "run python -m hpc3d.doctor to find the cause"
    line = f"hpc3d.train: cannot load MPI for self; {remedy}\n"
    assert capsys.readouterr().err == line


def test_missing_mpi_library_is_one_line_with_the_package_to_install(tmp_path):
    missing = surroundings() | {"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")}
    command = [sys.executable, "-m", "hpc3d.train", "gpt-text"]
    done = subprocess.run(command, env=missing, capture_output=True, text=True, check=False)
    assert done.returncode == BAD_INPUT
    (line,) = done.stderr.splitlines()
    assert line.startswith("hpc3d.train: cannot load MPI library; ")
    assert "python -m pip install 'hpc3d[mpi]', or run python -m hpc3d.doctor" in line


@pytest.mark.parametrize("words", ["train --help mesh", "generate -h", "evaluate --help"])
def test_help_needs_no_mpi_library(words, tmp_path):
    missing = surroundings() | {"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")}
    command = [sys.executable, "-m", "hpc3d", *words.split()]
    done = subprocess.run(command, env=missing, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and len(done.stdout.splitlines()) > 5


@slow
@pytest.mark.parametrize(
    "mode", ["terminated_in_mpi", "terminated_in_shared_memory", "terminated_at_work"]
)
def test_terminated_rank_runs_its_cleanup(mode, tmp_path):
    done, _ = job(2, mode, tmp_path)
    assert done.returncode == 128 + 15
    wait_for((tmp_path / "1").exists)


@pytest.mark.slow
def test_rank_exits_even_if_the_launcher_does_not_respond(tmp_path):
    try:
        done, ended = job(2, "unheard", tmp_path)
    finally:
        subprocess.run(["pkill", "-9", "-f", str(tmp_path)], check=False)
    assert done.returncode != 0
    assert said(done)[0] == "hpc3d.test: rank 0 failed"
    assert 0 in ended


def test_error_during_cleanup_is_reported_and_the_rest_runs(tmp_path):
    done, ended = job(2, "agree", tmp_path)
    (line,) = said(done)
    assert re.fullmatch("hpc3d.test: rank [01]: .*: no space left", line)
    assert (done.returncode, ended) == (0, [0, 1])


def test_full_disk_on_stdout_ends_the_job_like_other_commands(monkeypatch):
    """The output is text that rank 0 generates, between two collective calls."""
    told = []
    job = SimpleNamespace(
        first_to_fail=lambda: True, ending=threading.Lock(), exit_hooks=[], name="generate", rank=0
    )
    job.complain = job.abort = told.append
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with sanitized_streams():
            try:
                print("a", flush=True)
            except OSError as error:
                launch._die(job, error)
    assert told == ["standard output: cannot be written (No space left on device)", BAD_INPUT]
