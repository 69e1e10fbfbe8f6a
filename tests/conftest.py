"""What all tests have in common."""

import pytest


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """No word from a command that takes long because the machine is busy."""
    monkeypatch.setattr("hpc3d.patience.FIRST", 3600)
