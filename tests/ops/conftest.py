"""Number of rows that an operation processes at a time."""

import pytest

from hpc3d.ops import rows


@pytest.fixture(params=[1 << 17, 200], ids=["one block", "many blocks"])
def blocks(request, monkeypatch):
    monkeypatch.setattr(rows, "CACHE", request.param)
