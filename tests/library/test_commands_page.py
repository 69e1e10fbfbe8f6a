"""The reference page of the commands, docs/commands.md."""

import re
from pathlib import Path

import pytest

from hpc3d.__main__ import COMMANDS
from hpc3d.library.commands_page import page

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")


def test_the_page_is_that_of_the_parsers():
    wrong = "run: python -m hpc3d.library.commands_page > docs/commands.md"
    assert page() == PAGE, wrong


def test_every_command_has_a_section():
    assert {*COMMANDS} <= {*re.findall(r"^## (.+)$", PAGE, re.MULTILINE)}


@pytest.mark.parametrize(
    "line",
    [
        "* **`--ranks N`** (required): Number of ranks.",
        "python -m hpc3d.report [options] RUN_DIR|TRACE.h5 [RUN_DIR|TRACE.h5 ...]",
        "python -m hpc3d.partition --ranks N [options] [MODULE:FACTORY]",
        "* **`--objective time|load`**: Objective to minimize (default: time).",
    ],
)
def test_options_and_usages_are_readable(line):
    assert line in PAGE.split("\n")
