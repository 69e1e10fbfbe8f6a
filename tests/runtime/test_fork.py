"""Copies of a process, and its end where none can be made."""

import os
import subprocess
import sys
import time

import pytest

from hpc3d.runtime import fork

SLOW = """
import time
from hpc3d.runtime import fork
fork._COPIED = 0.2
fork.os.fork = lambda: time.sleep({})
print(fork.fork_or_end())
"""


def test_a_copy_goes_on_and_so_does_this_process(monkeypatch):
    monkeypatch.setattr(fork, "_COPIED", 0.2)
    child = fork.fork_or_end()
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    time.sleep(0.4)


@pytest.mark.parametrize(("seconds", "code"), [(0.01, 0), (30, 1)])
def test_a_process_that_is_not_copied_in_time_ends(seconds, code):
    done = subprocess.run([sys.executable, "-c", SLOW.format(seconds)], timeout=20, check=False)
    assert done.returncode == code
