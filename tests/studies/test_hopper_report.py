"""The report and the page of published steps on H100 GPUs."""

import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest

from hpc3d.predict.machine.machine_file import load
from hpc3d.studies import hopper_report
from tests.studies.test_hopper_steps import ROWS, SMALL


def test_machine_file_contains_the_intervals_of_the_page():
    page = Path(hopper_report.__file__).parents[2] / "docs/h100-steps.md"
    _, _, intervals = page.read_text().partition("## Intervals\n")
    blocks = intervals.partition("    [[errors]]")[2].split("    [[errors]]")
    listed = [tomllib.loads(dedent(block)) for block in blocks]
    assert [asdict(each) for each in load("h100").errors] == listed


@pytest.mark.slow
def test_report_lists_rows_and_errors(capsys, monkeypatch):
    row = ROWS["fms-fsdp-llama2-7b-96"]
    rows = [ROWS[SMALL], row | {"layout": row["layout"] | {"parallel.shard": 7}}]  # of 96
    monkeypatch.setattr(hopper_report, "published", lambda: rows)
    found = hopper_report.main(SimpleNamespace(machine=None))
    assert json.loads(json.dumps(found)) == found
    lines = capsys.readouterr().out.splitlines()
    assert f"| {SMALL} | used | 8 | 0.631 |" in "\n".join(lines)
    assert "| fms-fsdp-llama2-7b-96 | held out | | 0.853 | not supported | | | |" in lines
    assert lines[lines.index("## Intervals") - 2].startswith("| all but nanotron | 1 |")
    assert lines[-5:-2] == ["    [[errors]]", '    layout = "sharded"', "    steps = 1"]
