"""Documented exit codes, which users' scripts rely on."""

import os
import re
import signal
from pathlib import Path

from hpc3d.console import exit_codes

README = Path(__file__).parents[2] / "README.md"


def test_exit_codes_match_the_readme():
    codes = {name: value for name, value in vars(exit_codes).items() if isinstance(value, int)}
    assert codes == {
        "FAILED": 1,
        "BAD_INPUT": 2,
        "CHECK_FAILED": 3,
        "NOT_FINITE": 4,
        "STALLED": 5,
        "STOPPED": os.EX_TEMPFAIL,
        "INTERRUPTED": 128 + signal.SIGINT,
    }
    table = README.read_text(encoding="utf-8").split("| exit code |")[1].split("\n\n")[0]
    listed = {int(code) for code in re.findall(r"^\| (\d+) ", table, re.MULTILINE)}
    assert {*codes.values()} <= listed
