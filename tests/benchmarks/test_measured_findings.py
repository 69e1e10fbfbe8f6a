"""Small measured runs of the findings, next to their predictions."""

from types import SimpleNamespace

import pytest

from hpc3d.benchmarks import measured_findings
from hpc3d.predict.calibration.calibration_runs import FINDINGS, config_of
from hpc3d.predict.machine.machine_file import dumps
from tests.predict.fixed import MACHINE


def test_every_small_run_is_a_valid_layout():
    lines = [line for lines in FINDINGS.values() for line in lines]
    assert {config_of(line).mesh.grid().size for line in lines} == {1, 2}


def test_machine_must_be_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="not measured; run python"):
        measured_findings.findings(SimpleNamespace(machine=None, rounds=1))


@pytest.mark.slow
def test_measured_memory_is_the_predicted_one(tmp_path, monkeypatch, capsys):
    machine = tmp_path / "machine.toml"
    machine.write_text(dumps(MACHINE))
    runs = {"One": ("p=2 hidden=64 batch=4 microbatches=2",)}
    monkeypatch.setattr(measured_findings, "FINDINGS", runs)
    found = measured_findings.findings(SimpleNamespace(machine=str(machine), rounds=1))
    (row,) = found["measured"]
    assert row["finding"] == "One" and row["measured_s"] > 0 < row["predicted_s"]
    assert row["measured_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.02)
    assert runs["One"][0] in capsys.readouterr().out
