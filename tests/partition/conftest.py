"""Fixtures of all partitioning tests."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def captured_programs_stay():
    """Freeze captured programs, which are kept for other tests, so that the garbage collector does
    not visit their many small objects."""
    yield
    gc.collect()
    gc.freeze()
