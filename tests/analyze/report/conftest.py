"""A run with known values."""

import pytest

from tests.analyze.report.by_hand import write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "small")
