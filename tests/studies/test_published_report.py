"""The report and the page of published steps."""

import json
import re
import tomllib
from dataclasses import asdict
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest

from hpc3d.predict.machine.machine_file import load
from hpc3d.studies import published_report, tensor_3d, vtrain
from hpc3d.studies.hopper_steps import published
from hpc3d.studies.megatron import RECOMPUTATION, WEAK_SCALING
from tests.studies.test_hopper_steps import ROWS, SMALL

PAGE = (Path(__file__).parents[2] / "docs/published-steps.md").read_text(encoding="utf-8")
ROW = r"^\| (.+?) \| (used|held out) \| \d+ \|.*? ([+-][\d.]+)% \|"
LISTED = re.findall(ROW, PAGE, re.MULTILINE)


def test_machine_file_contains_the_intervals_of_the_page():
    _, _, intervals = PAGE.partition("## Intervals\n")
    blocks = intervals.partition("    [[errors]]")[2].split("    [[errors]]")
    listed = [tomllib.loads(dedent(block)) for block in blocks]
    assert [asdict(each) for each in load("h100").errors] == listed


def test_page_lists_every_published_row():
    megatron, speedups = len(RECOMPUTATION) + len(WEAK_SCALING), 2 * len(tensor_3d.PAPER)
    assert len(LISTED) == len(published()) + megatron + 109 + speedups
    assert {row["id"] for row in published()} < {name for name, *_ in LISTED}


def test_page_names_the_cause_of_every_error_beyond_35_percent():
    _, _, causes = PAGE.partition("## Errors beyond 35 %\n")
    causes = causes.partition("\n## ")[0]
    far = {name for name, _, error in LISTED if abs(float(error)) > 35}
    assert far and far == {*re.findall(r"([\w.-]+) \([+-]\d+%\)", causes)}
    assert "not known" not in causes


@pytest.fixture
def few(monkeypatch, capsys):
    """Return the report of two rows on H100 and a few on other machines, and its lines."""
    row = ROWS["fms-fsdp-llama2-7b-96"]
    rows = [ROWS[SMALL], row | {"layout": row["layout"] | {"parallel.shard": 7}}]  # of 96
    steps = vtrain.read(published_report.shipped(published_report._VTRAIN[1]))[::40]
    megatron = {name: {"rows": []} for name in ("recomputation", "weak scaling")}
    monkeypatch.setattr(published_report, "published", lambda: rows)
    monkeypatch.setattr(published_report.vtrain, "read", lambda path: steps)
    monkeypatch.setattr(published_report.megatron_report, "main", lambda options: megatron)
    found = published_report.main(SimpleNamespace(machine=None))
    return found, capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_report_lists_rows_and_errors(few):
    found, lines = few
    assert json.loads(json.dumps(found)) == found
    assert f"| {SMALL} | used | 8 | 0.631 |" in "\n".join(lines)
    assert "| fms-fsdp-llama2-7b-96 | held out | | 0.853 | not supported | | | |" in lines
    assert [len(found[name]["rows"]) for name in ("h100", "a100", "v100")] == [2, 3, 4]
    assert lines[-5:-2] == ["    [[errors]]", '    layout = "sharded"', "    steps = 1"]


@pytest.mark.slow
def test_speedups_on_v100_agree_with_the_paper(few):
    assert all(abs(row["error"]) <= tensor_3d.CLOSE for row in few[0]["v100"]["rows"])


def test_cause_is_printed_with_the_rows_that_it_explains(monkeypatch):
    monkeypatch.setattr(published_report, "_CAUSES", {"slow": "The network is slow."})
    rows = [{"id": f"slow-{n}", "error": 0.3 + n / 10} for n in range(3)]
    rows += [{"id": "other", "error": -0.5}, {"id": "refused", "refused": "no"}]
    assert [*published_report._causes(rows)] == [
        "- slow-1 (+40%), slow-2 (+50%): The network is slow.",
        "- other (-50%): The cause is not known.",
    ]
