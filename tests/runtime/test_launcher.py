"""A launcher that outlives its ranks is killed; other processes are not."""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from hpc3d.runtime import launcher
from hpc3d.runtime.launcher import born, end_later, keep_open
from tests.mpi import ROOT
from tests.runs import wait_for

DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(999)"
WAITS = "import time; print(flush=True); time.sleep(999)"


@pytest.fixture
def begun(monkeypatch):
    """Return a function that starts a Python process, which is killed after the test."""
    monkeypatch.setattr(launcher, "HEARD", 0.3)
    monkeypatch.setattr(launcher, "AGAIN", 0.3)
    processes = []

    def begin(text):
        process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
        process.stdout.readline()
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(("text", "code"), [(WAITS, -15), (DEAF, -9)])
def test_launcher_is_terminated_then_killed(text, code, begun):
    process = begun(text)
    end_later((process.pid, born(process.pid)))
    wait_for(lambda: process.poll() is not None)
    assert process.returncode == code


def test_other_process_with_a_reused_pid_is_not_killed(begun, monkeypatch):
    """The process that would kill it has ended, and the other process is still alive."""
    process, children = begun(WAITS), []
    copy = launcher.fork_or_end
    monkeypatch.setattr(launcher, "fork_or_end", lambda: children.append(copy()) or children[-1])
    end_later((process.pid, "0"))
    (child,) = children
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert process.poll() is None


@pytest.mark.parametrize(("name", "is_one"), [("prterun", True), ("bash-of-a-job", False)])
def test_launcher_is_recognized_by_its_name(name, is_one, tmp_path):
    parent = tmp_path / name
    ask = "import os; from hpc3d.runtime.launcher import launcher as l; print(l(), os.getppid())"
    parent.write_text(f'#!/bin/sh\n{sys.executable} -c "{ask}"\ntrue\n')
    parent.chmod(0o755)
    done = subprocess.run([parent], cwd=ROOT, text=True, capture_output=True, check=True)
    pid = done.stdout.split()[-1]
    assert done.stdout.startswith(f"({pid}, '" if is_one else "None ")


def test_nothing_is_forked_without_a_launcher(monkeypatch):
    monkeypatch.setattr(launcher.os, "fork", lambda: pytest.fail("a process"))
    end_later(None)


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_descriptor_is_open_until_the_launcher_ends(begun, monkeypatch):
    """The address that reports the first failure is in use while any rank may still fail."""
    monkeypatch.setattr(launcher, "_KEPT", 0)
    process, address = begun(WAITS), f"\0hpc3d-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(address)
        keep_open(bound.fileno(), (process.pid, born(process.pid)))

    def is_free():
        with suppress(OSError), socket.socket(socket.AF_UNIX) as other:
            other.bind(address)
            return True

    time.sleep(0.3)  # a child that does not wait for the launcher has ended by now
    assert not is_free()
    process.kill()
    process.wait()
    wait_for(is_free)
