"""The command that reproduces the published steps of Megatron-LM."""

from types import SimpleNamespace

import pytest

from hpc3d.studies import megatron_report
from hpc3d.studies.megatron import (
    WEAK_SCALING,
)


@pytest.mark.slow
def test_command_prints_and_returns_plain_values(capsys, monkeypatch):
    import json

    monkeypatch.setattr(megatron_report, "WEAK_SCALING", WEAK_SCALING[:3])
    found = megatron_report.main(SimpleNamespace(machine=None))
    assert json.loads(json.dumps(found)) == found
    out = capsys.readouterr().out
    assert "7.5B" in out and "absolute error: mean" in out
