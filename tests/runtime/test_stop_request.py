"""Runs that receive a stop request save a checkpoint, exit with 75 and can be resumed."""

import os
import signal
import subprocess
import sys

import pytest

from hpc3d.checkpoints.sharded import Checkpoint, steps_of
from hpc3d.console.exit_codes import FAILED, STOPPED
from hpc3d.runtime.stop_request import ENDING, FILE, MINUTES, Stop, reason
from tests.mpi import checked, mpirun
from tests.runs import interruptible, losses, newest, train, when_running, without_progress, words


def ranks_of(run):
    """Return the processes of the ranks of a run, without the launcher."""
    found = subprocess.run(
        ["pgrep", "-f", f"^{sys.executable} .*{run.parent}"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [int(word) for word in found.stdout.split() if int(word) != os.getpid()]


ACTS = {
    "signal of one rank": lambda run: os.kill(ranks_of(run)[-1], signal.SIGUSR1),
    "SIGTERM of one rank": lambda run: os.kill(ranks_of(run)[0], signal.SIGTERM),
    "file": lambda run: (run / "STOP").touch(),
}


slow = pytest.mark.slow


@slow
@pytest.mark.parametrize(
    ("act", "ranks"),
    [
        ("SIGTERM of one rank", 2),
        pytest.param("SIGTERM of one rank", 4, marks=pytest.mark.slow),
        ("signal of one rank", 4),
        pytest.param("file", 4, marks=pytest.mark.slow),
    ],
)
def test_run_saves_on_a_stop_request_and_resumes(act, ranks, tmp_path):
    told = when_running(tmp_path, ACTS[act])
    done = mpirun(ranks, "-m", "hpc3d.train", *words(tmp_path, train__steps=5000), meanwhile=told)
    assert done.returncode == STOPPED, done.stderr
    run = newest(tmp_path)
    (saved,) = steps_of(run / "checkpoints")
    step = Checkpoint(saved).header["step"]
    assert f"stopped after {step:,} of 5,000 steps: " in done.stdout
    assert f" --resume {run}\n" in done.stdout
    assert len(losses(run)) == step
    checked(ranks, "-m", "hpc3d.train", "--resume", run, "--train.steps", step + 1)
    whole = train(ranks, tmp_path / "whole", train__steps=step + 1)
    assert losses(run)[-1] == losses(whole)[-1]


@slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_single_rank_without_a_launcher_saves_and_stops(number, tmp_path):
    command = [sys.executable, "-m", "hpc3d.train", *words(tmp_path, train__steps=5000)]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": interruptible}
    with subprocess.Popen(command, **how) as process:
        when_running(tmp_path, lambda run: process.send_signal(number))()
        out, err = (text.decode() for text in process.communicate(timeout=250))
    run = newest(tmp_path)
    assert (process.returncode, without_progress(err)) == (STOPPED, "")
    assert f": received {number.name}" in out and f" --resume {run}\n" in out
    assert len(losses(run)) == Checkpoint(steps_of(run / "checkpoints")[0]).header["step"]


@slow
def test_max_minutes_stops_the_run(tmp_path):
    done = mpirun(
        2, "-m", "hpc3d.train", *words(tmp_path, train__steps=5000, train__max_minutes=0.1)
    )
    assert done.returncode == STOPPED
    assert ": reached train.max_minutes, which also limits a resumed run; " in done.stdout
    assert " --resume " in done.stdout


@slow
def test_stop_with_passes_in_flight_reports_that_nothing_is_saved(tmp_path):
    how = {"mesh__p": 2, "parallel__schedule": "pipedream", "parallel__microbatches": 2}
    how |= {"model__tied": "false", "train__clip": 0}
    options = words(tmp_path, train__steps=5000, **how)
    told = when_running(tmp_path, ACTS["file"])
    done = mpirun(2, "-m", "hpc3d.train", *options, meanwhile=told)
    assert done.returncode == FAILED, done.stderr
    assert "microbatches in flight" in done.stdout and " --resume " not in done.stdout
    assert not (newest(tmp_path) / "checkpoints").exists()


class Job:
    """Job in which only this rank is tested."""

    def __init__(self, rank=0, signals=(), started=0.0):
        self.rank, self.signals, self.started = rank, [*signals], started


def test_stop_request_of_a_rank_reflects_signals_minutes_and_stop_file(tmp_path):
    assert Stop(Job(), tmp_path, "USR1", 0).request() == 0
    assert Stop(Job(), tmp_path, "USR1", 1e-9).request() == MINUTES
    assert Stop(Job(1), tmp_path, "USR1", 1e-9).request() == 0
    told = Job(1, [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
    assert Stop(told, tmp_path, "USR2", 0).request() == signal.SIGUSR2
    assert told.requests == {*ENDING, signal.SIGUSR2}
    assert Stop(Job(1, [signal.SIGUSR1]), tmp_path, "USR2", 0).request() == 0
    (tmp_path / "STOP").touch()
    assert Stop(Job(), tmp_path, "USR1", 0).request() == FILE
    assert Stop(Job(1), tmp_path, "USR1", 0).request() == 0


@pytest.mark.parametrize("stop_request", [signal.SIGTERM, MINUTES, FILE])
def test_every_request_has_a_reason(stop_request):
    assert reason(stop_request)
