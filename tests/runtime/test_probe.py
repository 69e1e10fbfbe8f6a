"""Commands that query this machine: their results, and their termination."""

import sys

import pytest

from hpc3d.runtime.probe import installed, outcome, release
from tests.runs import assert_gone, time_is_up_when


def test_outcome_returns_the_code_and_all_output():
    program = (
        "import os, sys; print('out'); print(os.environ['ASKED'], file=sys.stderr); sys.exit(3)"
    )
    code, printed = outcome([sys.executable, "-uc", program], 60, ASKED="err")
    assert (code, printed) == (3, "out\nerr\n")


def test_timed_out_command_is_killed_with_its_children(tmp_path, monkeypatch):
    begun, limit = tmp_path / "begun", 12345
    program = f"echo begun; (touch {begun}; sleep 999; true) & wait"
    time_is_up_when(monkeypatch, begun.exists, limit)
    assert outcome(["bash", "-c", program], limit) == (None, "begun\n")
    assert_gone(begun)


def test_installed_returns_a_version_or_none():
    assert release(installed("numpy")) >= [2]
    assert installed("no-such-package-of-ours") is None


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.0.0rc1", [2]), ("1.26.4", [1, 26, 4]), ("10.0", [10]), ("0", [0]), ("unknown", [0])],
)
def test_release_parses_version_numbers(version, numbers):
    assert release(version) == numbers
