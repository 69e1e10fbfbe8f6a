"""A small trace, and a recorder with a test clock."""

import pytest

from hpc3d.trace.merge import merge
from hpc3d.trace.recorder import Recorder
from tests.trace.recording import HEADER, Clock
from tests.trace.small import write_all


@pytest.fixture
def path(tmp_path):
    return merge(write_all(tmp_path))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def recorder(tmp_path, clock):
    (tmp_path / "trace").mkdir()
    return Recorder(tmp_path, HEADER, capacity=64, clock=clock)
