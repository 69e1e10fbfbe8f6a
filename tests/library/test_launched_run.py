"""Training started from Python on real ranks: success, failure and interruption."""

import os
import signal
import subprocess
import sys

import pytest

from hpc3d.console.sanitize import Problems
from hpc3d.library import launched_run
from hpc3d.library.commands import run_training
from tests.library.tiny import TINY
from tests.mpi import JOB_LOCK, surroundings
from tests.runs import assert_gone, processes, wait_for

NOISE = "prterun has exited due to process rank 0\n"


def ended(monkeypatch, code, err):
    monkeypatch.setattr(launched_run, "_ended", lambda command, settings, quiet: (code, err))


def test_rejected_training_raises_the_lines_of_the_command(monkeypatch):
    lines = "hpc3d.train: 3 s: reads\nhpc3d.train: mesh: a\n" + NOISE + "hpc3d.train: name: b\n"
    ended(monkeypatch, 2, err=lines)
    with pytest.raises(Problems) as refused:
        run_training("gpt-serial")
    assert refused.value.lines == ["mesh: a", "name: b"]


@pytest.mark.parametrize(
    ("code", "err", "line"),
    [(4, "hpc3d.train: loss is nan\n", "code 4: loss is nan"), (1, NOISE, "code 1: prterun")],
)
def test_failed_run_raises_runtime_error(monkeypatch, code, err, line):
    ended(monkeypatch, code, err=err)
    with pytest.raises(RuntimeError, match=line):
        run_training("gpt-serial")


@pytest.mark.slow
def test_run_training_resumes_on_another_layout(tmp_path, capfd, monkeypatch):
    for key, value in {**surroundings(), "FORCE_COLOR": "1"}.items():  # as Jupyter's kernels do
        monkeypatch.setenv(key, value)
    options = TINY | {"checkpoint.every": 3, "name": "tiny"}
    with JOB_LOCK:
        run = run_training("gpt-serial", options | {"mesh.d": 2}, 2, tmp_path)
        assert run.folder.parent == tmp_path
        assert len(run.losses) == 3 and run.losses[2] < run.losses[0]
        assert capfd.readouterr() == ((run.folder / "train.log").read_text(), "")
        more = {"mesh.d": 1, "train.steps": 5}
        longer = run_training(resume=run, options=more, quiet=True)
        assert longer.folder == run.folder and longer.table("step")["ranks"][0] == 1
        with pytest.raises(ValueError, match="mesh: d 3 = 3 ranks, but the job has 2 ranks"):
            run_training("gpt-serial", options | {"mesh.d": 3}, 2, tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_keyboard_interrupt_ends_the_ranks(tmp_path):
    """As with a notebook's stop button, only this process receives SIGINT."""
    options = TINY | {"train.steps": 100_000, "mesh.d": 2}
    code = f"import hpc3d; hpc3d.run_training('gpt-serial', {options}, 2, {str(tmp_path)!r})"
    with JOB_LOCK:
        environment = {**os.environ, **surroundings()}
        notebook = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        logs = "*/train.log"
        try:
            wait_for(
                lambda: (
                    notebook.poll() is not None
                    or any("   1 " in log.read_text() for log in tmp_path.glob(logs))
                )
            )
        finally:
            notebook.send_signal(signal.SIGINT)
            _, err = notebook.communicate(timeout=250)
    assert notebook.returncode and err.rstrip().endswith("KeyboardInterrupt")
    # The launcher ends before the call does, and the ranks with it or soon after.
    try:
        assert all(command.startswith(sys.executable) for command in processes(tmp_path))
        assert_gone(tmp_path)
    finally:
        subprocess.run(["pkill", "-9", "-f", str(tmp_path)], check=False)
