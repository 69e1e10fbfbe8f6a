"""The report and the page of published steps on H100 GPUs."""

import json
from types import SimpleNamespace

import pytest

from hpc3d.studies import hopper_report
from tests.studies.test_hopper_steps import ROWS, SMALL


@pytest.mark.slow
def test_report_lists_rows_and_errors(capsys, monkeypatch):
    rows = [ROWS[SMALL], ROWS["fms-fsdp-llama2-7b-96"]]
    monkeypatch.setattr(hopper_report, "published", lambda: rows)
    found = hopper_report.main(SimpleNamespace(machine=None))
    assert json.loads(json.dumps(found)) == found
    lines = capsys.readouterr().out.splitlines()
    assert f"| {SMALL} | used | 8 | 0.631 |" in "\n".join(lines)
    assert "| fms-fsdp-llama2-7b-96 | held out | | 0.853 | not supported | | | | |" in lines
    assert lines[-1].startswith("| no ring, all but nanotron | 1 |")
