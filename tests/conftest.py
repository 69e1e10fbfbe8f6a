"""Fixtures and settings of all tests. Random examples are the same in every run, except with
`make fuzz` (tests.fuzz)."""

import gc
import os
import random
from unittest.mock import patch

import pytest

from tests import strided
from tests.jobs import run_in_job  # noqa: F401, a fixture

try:
    from hypothesis import settings
except ImportError:  # `make gpu-check` runs tests that draw nothing, with another Python
    settings = None

# Open MPI's ofi module, which nothing here needs, sleeps for 1 s when a rank starts.
os.environ.setdefault("OMPI_MCA_btl", "^ofi")

if settings:
    settings.register_profile(
        "test", max_examples=50, deadline=None, derandomize=True, print_blob=True
    )
    settings.register_profile(
        "fuzz", max_examples=200, deadline=None, database=None, print_blob=True
    )
    settings.load_profile("test")


def pytest_collection_finish():
    """Freeze imported objects, so that garbage collection is fast and does not cause timeouts."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Spread slow tests over days, and refuse one that would run on none (tests/strided.py)."""
    for item in items:
        strided.mark_slow(item)
    never = [item.nodeid for item in items if not strided.days_of(item)]
    if never:
        raise pytest.UsageError("runs on no day, give one table days=1: " + ", ".join(never[:9]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """Restore the environment, because a command in this process sets thread counts."""
    with patch.dict(os.environ):
        return (yield)


@pytest.fixture
def chance(request):
    """Random numbers of a test that draws its own cases."""
    seed = request.config.getoption("--hypothesis-seed", None)
    return random.Random(f"{seed or 1} {request.node.name}")


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Disable progress messages, which commands print if the machine is busy."""
    monkeypatch.setattr("hpc3d.console.progress.FIRST", 3600)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.option.dist == "loadfile":
        from tests.xdist_order import LongestFirst

        return LongestFirst(config, log)
    return None
