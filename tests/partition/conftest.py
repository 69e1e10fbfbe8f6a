"""Fixtures of all partitioning tests."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def captured_programs_stay():
    """They are kept for other tests, and are many small objects: whoever comes after them should
    not wait for the garbage collector to go through all of these."""
    yield
    gc.collect()
    gc.freeze()
