"""Forked copies of a process, and its exit if it cannot fork."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hpc3d.runtime import fork

SLOW = """
import time
from hpc3d.runtime import fork
fork._COPIED = {}
fork.os.fork = lambda: time.sleep({})
print(fork.fork_or_end())
"""


def test_forked_copy_and_parent_both_continue(monkeypatch):
    """The end of this process is scheduled before the fork, and cancelled after it."""
    done = []
    alarm = SimpleNamespace(
        dump_traceback_later=lambda seconds, **how: done.append((seconds, how["exit"])),
        cancel_dump_traceback_later=lambda: done.append("called off"),
    )
    monkeypatch.setattr(fork, "faulthandler", alarm)
    child = fork.fork_or_end()
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert done == [(fork._COPIED, True), "called off"]


@pytest.mark.parametrize(("limit", "seconds", "code"), [(1000, 0, 0), (0.2, 1000, 1)])
def test_process_that_cannot_fork_in_time_exits(limit, seconds, code):
    program = SLOW.format(limit, seconds)
    done = subprocess.run([sys.executable, "-c", program], timeout=200, check=False)
    assert done.returncode == code
